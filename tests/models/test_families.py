"""What families make of config.json beside the logits that come of it."""

import pytest
from transformers import AutoConfig

from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.testing.shapes import SHAPES, shape

FAMILIES = {family.name: family for family in xinfer_model_families()}
SIZES = {
    "vocab_size": 160,
    "hidden_size": 2048,
    "intermediate_size": 80,
    "num_hidden_layers": 8,
    "num_attention_heads": 32,
}
GPT2_SIZES = {"vocab_size": 160, "n_embd": 2048, "n_layer": 8, "n_head": 32}


def sizes(family):
    return {"model_type": family, **(GPT2_SIZES if "n_embd" in shape(family, SHAPES[family][0]) else SIZES)}


@pytest.mark.parametrize("family", SHAPES)
def test_what_a_config_leaves_out_is_what_the_reference_has_it_to_be(family):
    bare = sizes(family)
    if family == "deepseek_v2":
        bare["num_experts_per_tok"] = 3  # has no default
    whole = AutoConfig.for_model(**bare).to_dict()
    assert FAMILIES[family].spec(bare) == FAMILIES[family].spec(whole)
