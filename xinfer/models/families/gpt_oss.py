"""gpt-oss: sinks, windows in every other layer, experts whose inner values are cut."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import number
from xinfer.models.families._parts import attention, decoder, experts, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.names import Names, Stored
from xinfer.models.spec import DecoderSpec, LayerSpec

_YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
_DEFAULTS = {
    "head_dim": 64,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150_000.0,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a gpt_oss."""
    config = {**_DEFAULTS, **config}
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        config["rope_scaling"] = _YARN
    norm = rms_norm(config)
    feed_forward = mlp(
        config,
        bias=True,
        activation="swiglu",
        limit=number(config, "swiglu_limit", 7.0),
        alpha=number(config, "swiglu_alpha", 1.702),
        experts=experts(config, "num_local_experts", router_bias=True),
    )
    windows = layer_windows(config, [i % 2 == 0 for i in range(num_layers(config))])
    layers = [LayerSpec(attention(config, window=w, sinks=True), feed_forward, norm, norm) for w in windows]
    return decoder(config, layers, norm)


_UP = ("mlp.experts.gate.", "mlp.experts.up.")
LAYER = {
    **llama.LAYER,
    "self_attn.sinks": "attn.sinks",
    "mlp.router": "mlp.router",
    "mlp.experts.gate_up_proj": Stored(tuple(f"{part}weight" for part in _UP), transposed=True, interleaved="rows"),
    "mlp.experts.gate_up_proj_bias": Stored(tuple(f"{part}bias" for part in _UP), interleaved="rows"),
    "mlp.experts.down_proj": Stored(("mlp.experts.down.weight",), transposed=True),
    "mlp.experts.down_proj_bias": "mlp.experts.down.bias",
}
NAMES = Names(llama.TOP, LAYER)
