"""Gemma 3, its text part: as gemma2 without caps, but with normalized queries and keys, and two rotary embeddings."""

__all__ = ["MODEL_TYPES", "NAMES", "spec"]

from xinfer.models.families import Config, gemma2, llama
from xinfer.models.families._fields import activation, integer, number, optional, refuse
from xinfer.models.families._parts import attention, decoder, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec, RopeSpec

MODEL_TYPES = ("gemma3_text", "gemma3")
_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "vocab_size": 262_208,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a gemma3; of six layers the last sees all, unless `sliding_window_pattern` or `layer_types` differ."""
    config = {**_DEFAULTS, **config}
    refuse(config, "use_bidirectional_attention", False)
    norm = rms_norm(config, offset=1.0)
    feed_forward = mlp(config, activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    pattern = integer(config, "sliding_window_pattern", 6)
    everywhere = {
        "scaling": number(config, "query_pre_attn_scalar", 256) ** -0.5,
        "softcap": optional(config, "attn_logit_softcapping"),
        "qk_norm": norm,
    }
    attentions = [
        attention(config, window=window, rope=_rope(config, local=window is not None), **everywhere)
        for window in layer_windows(config, [(i + 1) % pattern > 0 for i in range(num_layers(config))])
    ]
    return decoder(
        config,
        [LayerSpec(each, feed_forward, norm, norm, norm, norm) for each in attentions],
        norm,
        embed_scale=integer(config, "hidden_size") ** 0.5,
        logit_softcap=optional(config, "final_logit_softcapping"),
    )


def _rope(config: Config, local: bool) -> RopeSpec:
    """Return a layer's rotary embedding: only layers that see all have the longer context's scaling."""
    head_dim = integer(config, "head_dim")
    if isinstance(config.get("rope_parameters"), dict):
        config = {**config, "rope_theta": 10_000.0 if local else 1e6}
        return rope(config, head_dim, "sliding_attention" if local else "full_attention")
    if local:
        config = {**config, "rope_theta": number(config, "rope_local_base_freq", 10_000.0), "rope_scaling": None}
    return rope({"rope_theta": 1e6, **config}, head_dim)


NAMES = Names(llama.TOP, {**gemma2.LAYER, "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"})
