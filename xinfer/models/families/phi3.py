"""Phi 3, 3.5 and 4: llama with fused projections, longrope in those of long context."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._parts import attention, decoder, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.names import Names, Stored
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a phi3; what its old configs call yarn is longrope."""
    defaults = {"max_position_embeddings": 4096, "original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5}
    config = {**defaults, **config}
    for spelling in ("rope_scaling", "rope_parameters"):
        scaling = config.get(spelling)
        if isinstance(scaling, dict) and "yarn" in (scaling.get("type"), scaling.get("rope_type")):
            config[spelling] = {**scaling, "type": "longrope", "rope_type": "longrope"}
    norm = rms_norm(config)
    windows = layer_windows(config, [True] * num_layers(config))
    layers = [LayerSpec(attention(config, window=window), mlp(config), norm, norm) for window in windows]
    return decoder(config, layers, norm)


LAYER = {
    **llama.LAYER,
    "self_attn.qkv_proj": Stored(("attn.q", "attn.k", "attn.v")),
    "mlp.gate_up_proj": Stored(("mlp.gate", "mlp.up")),
}
NAMES = Names(llama.TOP, LAYER)
