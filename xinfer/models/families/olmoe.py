"""OLMoE: llama with experts, and norms over all queries and keys."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import flag, optional
from xinfer.models.families._parts import attention, decoder, experts, mlp, num_layers, rms_norm
from xinfer.models.families.qwen3_moe import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe an olmoe; each expert has the size that others' only part has."""
    config = {"max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8, **config}
    norm = rms_norm(config, default=1e-5)
    attended = attention(config, qk_norm=norm, qk_norm_over="all", clip=optional(config, "clip_qkv"))
    router = experts(config, normalized=flag(config, "norm_topk_prob"))
    layer = LayerSpec(attended, mlp(config, bias=False, experts=router), norm, norm)
    return decoder(config, [layer] * num_layers(config), norm)
