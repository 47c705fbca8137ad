"""GLM-4: norms on both sides of each part, positions of neighbouring dimensions turned in half of a head."""

__all__ = ["MODEL_TYPES", "NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import flag, integer
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.names import Names, Stored
from xinfer.models.spec import DecoderSpec, LayerSpec

MODEL_TYPES = ("glm4", "glm")
_DEFAULTS = {
    "head_dim": 128,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131_072,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1.5625e-07,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a glm4, or a glm, which has norms before each part only."""
    config = {**_DEFAULTS, **config}
    norm = rms_norm(config)
    behind = norm if config.get("model_type") == "glm4" else None
    attended = attention(
        config,
        rope=rope(config, integer(config, "head_dim"), interleaved=True),
        qkv_bias=flag(config, "attention_bias", default=True),
        output_bias=False,
    )
    layers = [LayerSpec(attended, mlp(config, bias=False), norm, norm, behind, behind)] * num_layers(config)
    return decoder(config, layers, norm)


LAYER = {
    **llama.LAYER,
    "post_self_attn_layernorm": "attn_post_norm",
    "post_mlp_layernorm": "mlp_post_norm",
    "mlp.gate_up_proj": Stored(("mlp.gate", "mlp.up")),
}
NAMES = Names(llama.TOP, LAYER)
