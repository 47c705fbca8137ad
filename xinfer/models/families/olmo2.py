"""OLMo 2: llama with norms behind each part instead of before it, and over all queries and keys."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama, qwen3
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe an olmo2."""
    norm = rms_norm(config, default=1e-5)
    attended = attention(config, qk_norm=norm, qk_norm_over="all")
    layer = LayerSpec(attended, mlp(config, bias=False), None, None, norm, norm)
    return decoder(config, [layer] * num_layers(config), norm)


LAYER = {
    **qwen3.LAYER,
    "post_attention_layernorm": "attn_post_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
NAMES = Names(llama.TOP, LAYER)
