"""Falcon: both parts at once; the 7b with one key head, the 40b and 11b with groups, each beside its queries."""

__all__ = ["NAMES", "spec"]

from xinfer.errors import ModelError
from xinfer.models.families import Config
from xinfer.models.families._fields import activation, flag, integer, refuse
from xinfer.models.families._parts import decoder, layer_norm, num_layers
from xinfer.models.families._rope import rope
from xinfer.models.names import Names, Stored, Target
from xinfer.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a falcon."""
    config = {"tie_word_embeddings": True, **config}
    refuse(config, "alibi", False)
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    grouped, bias = flag(config, "new_decoder_architecture"), flag(config, "bias")
    kv_heads = 1 if flag(config, "multi_query", default=True) else heads
    if grouped:
        kv_heads = integer(config, "num_kv_heads", heads)
    if heads % kv_heads:
        raise ModelError(f"config.json: num_attention_heads={heads} is no multiple of num_kv_heads={kv_heads}")
    head_dim = hidden // heads
    attention = AttentionSpec(heads, kv_heads, head_dim, rope(config, head_dim), bias, bias)
    act = activation(config, "activation", "gelu")
    mlp = MlpSpec(integer(config, "ffn_hidden_size", 4 * hidden), bias=bias, activation=act, gated=False)
    norm = layer_norm(config, "layer_norm_epsilon")
    second, parallel = _second_norm(config, grouped)
    layers = [LayerSpec(attention, mlp, norm, norm if second else None, parallel=parallel)] * num_layers(config)
    return decoder(config, layers, norm)


def _second_norm(config: Config, grouped: bool) -> tuple[bool, bool]:
    """Return whether the feed-forward part has a norm of its own, and whether both parts are computed at once."""
    parallel = flag(config, "parallel_attn", default=True)
    norms = integer(config, "num_ln_in_parallel_attn", 2 if grouped else 1)
    if norms > (2 if grouped else 1) or (grouped and not parallel):
        raise ModelError(
            f"config.json: num_ln_in_parallel_attn={norms} with parallel_attn={parallel} and new_decoder_architecture="
            f"{grouped} is not supported"
        )
    return norms == 2 or not parallel, parallel


LAYER: dict[str, Target] = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "mlp_norm",
    "ln_attn": "attn_norm",
    "ln_mlp": "mlp_norm",
    "self_attention.query_key_value": Stored(("attn.q", "attn.k", "attn.v"), interleaved="heads"),
    "self_attention.dense": "attn.o",
    "mlp.dense_h_to_4h": "mlp.up",
    "mlp.dense_4h_to_h": "mlp.down",
    "self_attention.rotary_emb.inv_freq": None,
}
NAMES = Names({"word_embeddings": "embed", "ln_f": "norm", "lm_head": "head"}, LAYER, "h")
