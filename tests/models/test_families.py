"""What families make of config.json beside the logits that come of it."""

import json
import re

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, needed, shape

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
    bare = sizes(family) | needed(family)
    whole = AutoConfig.for_model(**bare).to_dict()
    assert FAMILIES[family].spec(bare) == FAMILIES[family].spec(whole)


# What each family's flags must be, or go together with, to be understood: a change of its usual shape, and the error.
REFUSED = {
    "gemma-activations": ("gemma", {"hidden_activation": "relu"}, "hidden_activation='relu' is not supported"),
    "gemma-both-ways": ("gemma", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "gemma2-both-ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True"),
    "falcon-alibi": ("falcon", {"alibi": True}, "alibi=True is not supported"),
    "falcon-second-norm": (
        "falcon",
        {"num_ln_in_parallel_attn": 2},
        "num_ln_in_parallel_attn=2 with parallel_attn=True",
    ),
    "falcon-serial-groups": (
        "falcon",
        {"new_decoder_architecture": True, "num_kv_heads": 2, "parallel_attn": False},
        "parallel_attn=False and new_decoder_architecture=True",
    ),
    "falcon-heads": ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 3}, "no multiple of num_kv_heads=3"),
    "gptj-odd": ("gptj", {"rotary_dim": 7}, "rotary_dim=7, but an even number of at most 12"),
    "gptj-wide": ("gptj", {"rotary_dim": 14}, "rotary_dim=14, but an even number of at most 12"),
    "starcoder2-gate": ("starcoder2", {"mlp_type": "gated"}, "mlp_type='gated' is not supported"),
    "smollm3-list": ("smollm3", {"no_rope_layers": [1, 0]}, "no_rope_layers must have 1"),
    "smollm3-window": (
        "smollm3",
        {"layer_types": ["sliding_attention"] * 4, "sliding_window": 9},
        "layer_types names sliding_attention, but use_sliding_window is false",
    ),
    "deepseek_v2-sum": ("deepseek_v2", {"norm_topk_prob": True}, "norm_topk_prob=True is not supported"),
    "deepseek_v2-method": ("deepseek_v2", {"topk_method": "noaux_tc"}, "topk_method='noaux_tc' is not supported"),
    "deepseek_v2-groups": ("deepseek_v2", {"n_group": 3}, "in 2 of 3 groups"),
    "deepseek_v3-score": ("deepseek_v3", {"scoring_func": "softmax"}, "scoring_func='softmax' is not supported"),
    "qwen2_moe-layers": ("qwen2_moe", {"mlp_only_layers": "all"}, "mlp_only_layers='all', but a list"),
    "granitemoehybrid-recurrent": (
        "granitemoehybrid",
        {"layer_types": ["attention", "mamba", "attention"]},
        "recurrent",
    ),
    "granitemoehybrid-experts": ("granitemoehybrid", {"num_local_experts": 4}, "num_local_experts=4 is not supported"),
    "exaone4-pattern": ("exaone4", {"sliding_window_pattern": "LLLG"}, "sliding_window_pattern='LLLG', but a whole"),
    "glm4_moe_lite-types": (
        "glm4_moe_lite",
        {"mlp_layer_types": ["dense"]},
        "mlp_layer_types must name dense or sparse",
    ),
    "gpt_bigcode-cross": ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention=True is not supported"),
    "granite-factor": ("granite", {"logits_scaling": 0}, "logits_scaling=0, but a positive number is expected"),
}


@pytest.mark.parametrize(("family", "change", "error"), REFUSED.values(), ids=REFUSED)
def test_a_flag_that_is_not_understood_is_named(family, change, error):
    usual = shape(family, SHAPES[family][0])
    FAMILIES[family].spec(usual)
    with pytest.raises(ModelError, match=re.escape(error)):
        FAMILIES[family].spec(usual | change)


@pytest.mark.parametrize("given", ["gelu", "gelu_pytorch_tanh"])
def test_the_first_gemmas_gelu_is_the_approximation(given):
    spec = FAMILIES["gemma"].spec(shape("gemma", "usual") | {"hidden_act": given})
    assert spec.layers[0].mlp.activation == "gelu_tanh"


def test_a_kind_of_rope_may_be_said_in_both_words():
    rope = {"type": "mrope", "rope_type": "default", "mrope_section": [2, 2, 2]}
    spec = FAMILIES["qwen2_vl"].spec(shape("qwen2", "usual") | {"rope_scaling": rope})
    assert spec.layers[0].attention.rope.kind == "default"


def test_layers_that_guess_further_tokens_are_not_read(tmp_path):
    config = shape("deepseek_v3", "usual") | {"num_nextn_predict_layers": 1}
    folder = tmp_path / "model"
    write_reference(folder, config, seed=1)
    tensors = load_file(folder / "model.safetensors")
    behind = {name.replace("layers.2.", "layers.3."): x for name, x in tensors.items() if "layers.2." in name}
    extra = {f"model.layers.3.{name}.weight": torch.zeros(48) for name in ("enorm", "hnorm", "shared_head.norm")}
    save_file(tensors | {name: x.clone() for name, x in behind.items()} | extra, folder / "model.safetensors")
    _ = Model("m", lambda: folder, FAMILIES.values()).weights
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 0}))
    with pytest.raises(ModelError, match="has unknown"):
        _ = Model("m", lambda: folder, FAMILIES.values()).weights
