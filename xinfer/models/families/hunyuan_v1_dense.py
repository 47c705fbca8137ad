"""Hunyuan: llama whose queries and keys are normalized once they are turned."""

__all__ = ["LAYER", "NAMES", "described", "spec"]

from xinfer.errors import ModelError
from xinfer.models.families import Config, llama
from xinfer.models.families._fields import integer, number
from xinfer.models.families._parts import attention, decoder, mlp, num_layers, rms_norm
from xinfer.models.families._rope import rope
from xinfer.models.names import Names
from xinfer.models.spec import DecoderSpec, LayerSpec, MlpSpec, RopeSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a hunyuan_v1_dense."""
    return described(config, [mlp(config, bias=False)] * num_layers(config))


def described(config: Config, parts: list[MlpSpec]) -> DecoderSpec:
    """Return a decoder of the family with these feed-forward parts."""
    norm = rms_norm(config, default=1e-5)
    attended = attention(config, rope=_rope(config), qk_norm=norm, qk_norm_turned=True)
    return decoder(config, [LayerSpec(attended, part, norm, norm) for part in parts], norm)


def _rope(config: Config) -> RopeSpec:
    """Return the rotary embedding: what is called dynamic and has an `alpha` has a larger base, and that is all."""
    head_dim = integer(config, "head_dim", integer(config, "hidden_size") // integer(config, "num_attention_heads"))
    said = config.get("rope_scaling") or config.get("rope_parameters")
    if not isinstance(said, dict) or not said.get("alpha") or said.get("rope_type", said.get("type")) != "dynamic":
        return rope(config, head_dim)
    theta, alpha = number({**config, **said}, "rope_theta", 10_000.0), number(said, "alpha")
    try:
        theta *= alpha ** (head_dim / (head_dim - 2))
    except ArithmeticError as error:
        raise ModelError(f"config.json: alpha={alpha} makes no frequencies of {head_dim} dimensions") from error
    return rope({"rope_theta": theta}, head_dim)


LAYER = {**llama.LAYER, "self_attn.query_layernorm": "attn.q_norm", "self_attn.key_layernorm": "attn.k_norm"}
NAMES = Names(llama.TOP, LAYER)
