"""GPT-2: learned positions, no gate, biases everywhere, matrices stored the other way round."""

__all__ = ["LAYER", "NAMES", "TOP", "renamed", "spec"]

from typing import Any

from xinfer.models.families import Config
from xinfer.models.families._fields import activation, flag, integer, refuse
from xinfer.models.families._parts import decoder, layer_norm, num_layers
from xinfer.models.names import Names, Stored, Target
from xinfer.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec

_SAME = {
    "n_embd": "hidden_size",
    "n_head": "num_attention_heads",
    "n_layer": "num_hidden_layers",
    "n_positions": "max_position_embeddings",
}


def spec(config: Config) -> DecoderSpec:
    """Describe a gpt2; its config has words of its own."""
    config = {"tie_word_embeddings": True, "max_position_embeddings": 1024, **renamed(config)}
    for name, usual in (("scale_attn_by_inverse_layer_idx", False), ("add_cross_attention", False)):
        refuse(config, name, usual)
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    scaling = None if flag(config, "scale_attn_weights", default=True) else 1.0
    attention = AttentionSpec(heads, heads, hidden // heads, qkv_bias=True, output_bias=True, scaling=scaling)
    size = integer(config, "n_inner", 4 * hidden)
    mlp = MlpSpec(size, bias=True, activation=activation(config, "activation_function", "gelu_new"), gated=False)
    norm = layer_norm(config, "layer_norm_epsilon")
    layers = [LayerSpec(attention, mlp, norm, norm)] * num_layers(config)
    return decoder(config, layers, norm, learned_positions=integer(config, "max_position_embeddings"))


def renamed(config: Config) -> dict[str, Any]:
    """Return a config with the words that others have for the same."""
    return {**config, **{_SAME[key]: config[key] for key in _SAME if key in config}}


TOP = {"wte": "embed", "wpe": "positions", "ln_f": "norm", "lm_head": "head"}
LAYER: dict[str, Target] = {
    "ln_1": "attn_norm",
    "ln_2": "mlp_norm",
    "attn.c_attn": Stored(("attn.q", "attn.k", "attn.v"), transposed=True),
    "attn.c_proj": Stored(("attn.o",), transposed=True),
    "mlp.c_fc": Stored(("mlp.up",), transposed=True),
    "mlp.c_proj": Stored(("mlp.down",), transposed=True),
    "attn.bias": None,  # masks, which old checkpoints store
    "attn.masked_bias": None,
}
NAMES = Names(TOP, LAYER, "h")
