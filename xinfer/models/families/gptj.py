"""GPT-J: both parts at once from one norm, rotary positions of neighbouring dimensions in a part of each head."""

__all__ = ["NAMES", "spec"]

from xinfer.errors import ModelError
from xinfer.models.families import Config, gpt2
from xinfer.models.families._fields import activation, integer
from xinfer.models.families._parts import decoder, layer_norm, num_layers
from xinfer.models.names import Names, Target
from xinfer.models.spec import AttentionSpec, DecoderSpec, LayerSpec, MlpSpec, RopeSpec


def spec(config: Config) -> DecoderSpec:
    """Describe a gptj; its config has the words of gpt2's."""
    config = gpt2.renamed(config)
    hidden, heads = integer(config, "hidden_size"), integer(config, "num_attention_heads")
    head_dim, turned = hidden // heads, integer(config, "rotary_dim", 64)
    if turned % 2 or turned > head_dim:
        raise ModelError(f"config.json: rotary_dim={turned}, but an even number of at most {head_dim} is expected")
    act = activation(config, "activation_function", "gelu_new")
    mlp = MlpSpec(integer(config, "n_inner", 4 * hidden), bias=True, activation=act, gated=False)
    norm = layer_norm(config, "layer_norm_epsilon")
    attention = AttentionSpec(heads, heads, head_dim, RopeSpec(turned, interleaved=True))
    layer = LayerSpec(attention, mlp, norm, None, parallel=True)
    return decoder(config, [layer] * num_layers(config), norm, head_bias=True)


LAYER: dict[str, Target] = {
    "ln_1": "attn_norm",
    "attn.q_proj": "attn.q",
    "attn.k_proj": "attn.k",
    "attn.v_proj": "attn.v",
    "attn.out_proj": "attn.o",
    "mlp.fc_in": "mlp.up",
    "mlp.fc_out": "mlp.down",
    "attn.bias": None,  # masks, which old checkpoints store
    "attn.masked_bias": None,
}
NAMES = Names(gpt2.TOP, LAYER, "h")
