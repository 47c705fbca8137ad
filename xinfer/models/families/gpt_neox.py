"""GPT-NeoX and Pythia: both parts at once, positions in a quarter of a head, each head's projections together."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import activation, flag, integer, number
from xinfer.models.families._parts import decoder, layer_norm, mlp, num_layers
from xinfer.models.families._rope import rope
from xinfer.models.names import Names, Stored, Target
from xinfer.models.spec import AttentionSpec, DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a gpt_neox; its config has words of its own for rotary positions."""
    own = {
        "rope_theta": number(config, "rotary_emb_base", 10_000.0),
        "partial_rotary_factor": number(config, "rotary_pct", 0.25),
    }
    heads, bias = integer(config, "num_attention_heads"), flag(config, "attention_bias", default=True)
    head_dim = integer(config, "hidden_size") // heads
    attention = AttentionSpec(heads, heads, head_dim, rope({**config, **own}, head_dim), bias, bias)
    feed_forward = mlp(config, bias=True, activation=activation(config, default="gelu"), gated=False)
    norm, parallel = layer_norm(config), flag(config, "use_parallel_residual", default=True)
    layers = [LayerSpec(attention, feed_forward, norm, norm, parallel=parallel)] * num_layers(config)
    return decoder(config, layers, norm)


TOP = {"embed_in": "embed", "final_layer_norm": "norm", "embed_out": "head", "lm_head": "head"}
LAYER: dict[str, Target] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "attention.query_key_value": Stored(("attn.q", "attn.k", "attn.v"), interleaved="heads"),
    "attention.dense": "attn.o",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "attention.bias": None,  # masks and frequencies, which old checkpoints store
    "attention.masked_bias": None,
    "attention.rotary_emb.inv_freq": None,
}
NAMES = Names(TOP, LAYER)
