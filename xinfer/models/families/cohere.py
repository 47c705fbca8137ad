"""Command R: both parts at once from one norm without biases, logits scaled."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, qwen3
from xinfer.models.families._fields import flag, integer, number
from xinfer.models.families._parts import attention, decoder, layer_norm, mlp, num_layers
from xinfer.models.families._rope import rope
from xinfer.models.spec import DecoderSpec, LayerSpec

NAMES = qwen3.NAMES
_DEFAULTS = {"max_position_embeddings": 8192, "tie_word_embeddings": True, "rope_theta": 500_000.0}


def spec(config: Config) -> DecoderSpec:
    """Describe a cohere; in the larger one each head's queries and keys are normalized."""
    config = {**_DEFAULTS, **config}
    norm = layer_norm(config, bias=False)
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    attended = attention(
        config,
        rope=rope(config, head_dim, interleaved=True),
        qk_norm=norm if flag(config, "use_qk_norm") else None,
        qk_norm_over="heads",
    )
    layers = [LayerSpec(attended, mlp(config, bias=False), norm, None, parallel=True)] * num_layers(config)
    return decoder(config, layers, norm, logit_scale=number(config, "logit_scale", 0.0625))
