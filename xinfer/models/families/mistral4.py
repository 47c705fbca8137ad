"""Mistral 4: latent attention whose queries grow with the length of the context, experts chosen by a softmax."""

__all__ = ["NAMES", "spec"]

from typing import Any

from xinfer.models.families import Config, llama
from xinfer.models.families._fields import flag
from xinfer.models.families._latent import LAYER, latent_attention
from xinfer.models.families._parts import decoder, rms_norm
from xinfer.models.families._sparse import feed_forwards, first_layers
from xinfer.models.families.ministral3 import ROPE
from xinfer.models.names import Names, Stored, Target
from xinfer.models.spec import DecoderSpec, LayerSpec

_DEFAULTS = {
    "max_position_embeddings": 1_048_576,
    "kv_lora_rank": 256,
    "q_lora_rank": 1024,
    "qk_nope_head_dim": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 2048,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 0,
}


def spec(config: Config) -> DecoderSpec:
    """Describe a mistral4; its `partial_rotary_factor` says again what the parts of a head say."""
    config = {**_DEFAULTS, **config}
    own = {"rope_theta": 10_000.0, "factor": 128.0, "original_max_position_embeddings": 8192}
    said: Any = config.get("rope_scaling") or config.get("rope_parameters") or {**ROPE, **own}
    if isinstance(said, dict):
        config |= {"rope_scaling": None, "rope_parameters": {**said, "partial_rotary_factor": 1.0}}
    norm = rms_norm(config)
    attention = latent_attention(config, interleaved=flag(config, "rope_interleave", default=True))
    parts = feed_forwards(config, first_layers(config), score="softmax", correction=False)
    return decoder(config, [LayerSpec(attention, part, norm, norm) for part in parts], norm)


_STACKED: dict[str, Target] = {
    "mlp.experts.gate_up_proj": Stored(("mlp.experts.gate.weight", "mlp.experts.up.weight")),
    "mlp.experts.down_proj": "mlp.experts.down.weight",
}
NAMES = Names(llama.TOP, {**LAYER, **_STACKED})
