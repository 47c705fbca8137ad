"""Llama 2 and 3, and everything built like it: SmolLM, TinyLlama, Yi, ..."""

__all__ = ["LAYER", "NAMES", "TOP", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a llama; `attention_bias` puts biases on all four attention projections."""
    norm = rms_norm(config)
    layer = LayerSpec(attention(config), mlp(config), norm, norm)
    return decoder(config, [layer] * num_layers(config), norm)


TOP = {"embed_tokens": "embed", "norm": "norm", "lm_head": "head"}
LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "self_attn.q_proj": "attn.q",
    "self_attn.k_proj": "attn.k",
    "self_attn.v_proj": "attn.v",
    "self_attn.o_proj": "attn.o",
    "mlp.gate_proj": "mlp.gate",
    "mlp.up_proj": "mlp.up",
    "mlp.down_proj": "mlp.down",
    "self_attn.rotary_emb.inv_freq": None,  # stored by old checkpoints, derived here
}
NAMES = Names(TOP, LAYER)
