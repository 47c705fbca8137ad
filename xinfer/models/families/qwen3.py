"""Qwen3: llama whose queries and keys are normalized per head."""

__all__ = ["LAYER", "NAMES", "spec"]

from xinfer.models.families import Config, llama
from xinfer.models.families._parts import attention, decoder, mlp, rms_norm
from xinfer.models.families.qwen2 import windows
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a qwen3; without `use_sliding_window` its `sliding_window` means nothing."""
    config = {"head_dim": 128, "num_key_value_heads": 32, "max_position_embeddings": 32_768, **config}
    norm, feed_forward = rms_norm(config), mlp(config)
    attentions = [attention(config, qk_norm=norm, window=window) for window in windows(config)]
    return decoder(config, [LayerSpec(each, feed_forward, norm, norm) for each in attentions], norm)


LAYER = {**llama.LAYER, "self_attn.q_norm": "attn.q_norm", "self_attn.k_norm": "attn.k_norm"}
NAMES = Names(llama.TOP, LAYER)
