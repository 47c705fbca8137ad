"""Gemma 2: norms on both sides of each part, capped scores and logits, a window in every other layer."""

__all__ = ["LAYER", "NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import activation, integer, number, optional, refuse
from xinfer.models.families._parts import attention, decoder, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "head_dim": 256,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a gemma2; embeddings are scaled by the root of their width."""
    config = {**_DEFAULTS, **config}
    refuse(config, "use_bidirectional_attention", False)
    norm = rms_norm(config, offset=1.0)
    feed_forward = mlp(config, activation=activation(config, "hidden_activation", "gelu_pytorch_tanh"))
    scaling = number(config, "query_pre_attn_scalar", 256) ** -0.5
    windows = layer_windows(config, [i % 2 == 0 for i in range(num_layers(config))])
    attentions = [
        attention(config, window=window, scaling=scaling, softcap=optional(config, "attn_logit_softcapping"))
        for window in windows
    ]
    return decoder(
        config,
        [LayerSpec(each, feed_forward, norm, norm, norm, norm) for each in attentions],
        norm,
        embed_scale=integer(config, "hidden_size") ** 0.5,
        logit_softcap=optional(config, "final_logit_softcapping"),
    )


LAYER = {
    **llama.LAYER,
    "post_attention_layernorm": "attn_post_norm",
    "pre_feedforward_layernorm": "mlp_norm",
    "post_feedforward_layernorm": "mlp_post_norm",
}
NAMES = Names(llama.TOP, LAYER)
