"""OLMo 3: olmo2 with a window in three of four layers; only those that see all have the longer context's positions."""

__all__ = ["NAMES", "spec"]

from xinfer.models.families import Config
from xinfer.models.families._fields import integer
from xinfer.models.families._parts import attention, decoder, layer_windows, mlp, num_layers, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.families.olmo2 import NAMES
from xinfer.models.spec import DecoderSpec, LayerSpec, RopeSpec


def spec(config: Config) -> DecoderSpec:
    """Describe an olmo3."""
    config = {"sliding_window": 4096, "rope_theta": 500_000.0, **config}
    norm, feed_forward = rms_norm(config, default=1e-5), mlp(config, bias=False)
    attentions = [
        attention(config, rope=_rope(config, local=window is not None), window=window, qk_norm=norm, qk_norm_over="all")
        for window in layer_windows(config, [(i + 1) % 4 > 0 for i in range(num_layers(config))])
    ]
    return decoder(config, [LayerSpec(each, feed_forward, None, None, norm, norm) for each in attentions], norm)


def _rope(config: Config, local: bool) -> RopeSpec:
    """Return a layer's rotary embedding, of `rope_parameters` for its kind; `rope_scaling` is not for a window's."""
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    if local and config.get("rope_scaling"):
        config = {**config, "rope_scaling": None}
    kind = "sliding_attention" if local else "full_attention"
    return rope(config, integer(config, "head_dim", hidden // heads), kind)
