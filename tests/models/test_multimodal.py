"""Of a model that reads images too, the text part is read, and computes what the whole does for a text."""

import numpy as np
import pytest

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.batch import make_batch
from xinfer.engine.types import Limits, Request, SamplingParams
from xinfer.engine.types import Sequence as Tokens
from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.multimodal import text_part
from xinfer.testing.reference import reference_logits, write_reference
from xinfer.testing.shapes import shape
from xinfer.testing.shapes._common import LATENT

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1000.0}
GROWING = {"llama_4_scaling_beta": 0.5}

VISION = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN = {"depth": 1, "embed_dim": 16, "hidden_size": 48, "num_heads": 2}
MROPE = {"rope_scaling": {"type": "mrope", "mrope_section": [2, 2, 2]}}
QWEN3 = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 2,
    "out_hidden_size": 48,
    "deepstack_visual_indexes": [0],
}
INTERLEAVED = {"rope_type": "default", "mrope_interleaved": True, "mrope_section": [4, 2, 2]}
MISTRAL4 = {
    "model_type": "mistral4",
    "rope_parameters": {**YARN, **GROWING, "mscale": 1.0, "mscale_all_dim": 1.0},
}
GROUPS = {"q_lora_rank": None, "n_group": 4, "topk_group": 2, "norm_topk_prob": False, "rope_interleave": False}
GEMMA3 = {name: value for name, value in shape("gemma3_text", "usual").items() if name != "tie_word_embeddings"}
CASES = {
    "gemma3": {
        "model_type": "gemma3",
        "text_config": GEMMA3,
        "vision_config": {"model_type": "siglip_vision_model", **VISION},
        "mm_tokens_per_image": 4,
    },
    "llava": {
        "model_type": "llava",
        "text_config": shape("llama", "linear"),
        "vision_config": {"model_type": "clip_vision_model", **VISION, "projection_dim": 8},
    },
    "mistral3": {
        "model_type": "mistral3",
        "text_config": shape("mistral", "window"),
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "pixtral", **VISION},
    },
    "mistral3-mistral4": {
        "model_type": "mistral3",
        "text_config": shape("qwen2", "usual") | LATENT | MISTRAL4 | {"q_lora_rank": 20},
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "pixtral", **VISION},
    },
    "mistral3-mistral4-groups": {
        "model_type": "mistral3",
        "text_config": shape("qwen2", "usual") | LATENT | MISTRAL4 | GROUPS,
        "tie_word_embeddings": False,
        "vision_config": {"model_type": "pixtral", **VISION},
    },
    "qwen2_vl": {
        "model_type": "qwen2_vl",
        "text_config": shape("qwen2", "window") | MROPE | {"model_type": "qwen2_vl_text"},
        "vision_config": QWEN,
    },
    "qwen3_vl": {
        "model_type": "qwen3_vl",
        "text_config": shape("qwen3", "usual") | {"model_type": "qwen3_vl_text", "rope_scaling": INTERLEAVED},
        "vision_config": QWEN3,
    },
    "qwen2_vl-flat": shape("qwen2", "usual") | MROPE | {"model_type": "qwen2_vl", "vision_config": QWEN},
}


def open_folder(folder):
    return Model(str(folder), lambda: folder, xinfer_model_families())


@pytest.mark.parametrize("config", CASES.values(), ids=CASES)
def test_a_text_has_the_logits_that_the_whole_model_gives_it(tmp_path, config):
    whole = write_reference(tmp_path / "model", config, seed=3, auto="AutoModelForImageTextToText")
    model = open_folder(tmp_path / "model")
    limits = Limits(max_num_seqs=1, max_num_batched_tokens=64, kv_memory=5e6)
    runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), limits))
    ids = np.random.default_rng(0).integers(3, 150, 40).tolist()
    sequence = Tokens(Request("r", 0, tuple(ids), SamplingParams(), 0), list(ids), limit=1 << 20)
    sequence.blocks = list(range(3))
    logits = runner.forward(make_batch([sequence], [40], [40], 16))
    reference = reference_logits(whole, ids)
    assert reference.std() > 1
    assert (logits - reference).abs().max() < 1e-4
    [note] = model.notes
    assert note.startswith("only its text part is read, not ")


def test_what_holds_for_the_whole_is_read_from_beside_the_text_part():
    beside = {"eos_token_id": 7, "quantization_config": {"quant_method": "x"}, "hidden_size": 1, "pad_token_id": None}
    part = text_part({"model_type": "mistral3", **beside, "text_config": {"hidden_size": 64, "eos_token_id": 8}})
    assert part["model_type"] == "mistral"
    assert part["eos_token_id"] == 8
    assert part["quantization_config"] == {"quant_method": "x"}
    assert part["hidden_size"] == 64
    assert "pad_token_id" not in part


@pytest.mark.parametrize(
    ("whole", "text", "tied"),
    [
        (None, None, None),
        (True, None, True),
        (False, None, False),
        (None, True, True),
        (True, False, True),
        (False, True, True),
    ],
)
def test_the_head_is_the_embedding_where_either_says_so(whole, text, tied):
    config = {"model_type": "gemma3", "tie_word_embeddings": whole, "text_config": {"tie_word_embeddings": text}}
    assert text_part(config).get("tie_word_embeddings") is tied


def test_the_first_llava_leaves_out_the_sizes_of_the_first_llama():
    part = text_part({"model_type": "llava", "text_config": {"model_type": "llama", "vocab_size": 32_064}})
    assert (part["vocab_size"], part["hidden_size"], part["num_hidden_layers"]) == (32_064, 4096, 32)


def test_a_whole_that_is_more_than_its_text_part_is_refused(tmp_path):
    with pytest.raises(ModelError, match="'llama4' is not supported: its text part \\('llama4_text'\\) is not known"):
        text_part({"model_type": "llama4", "text_config": {"model_type": "llama4_text"}})
    (tmp_path / "config.json").write_text('{"model_type": "llava", "text_config": {"model_type": "mamba"}}')
    with pytest.raises(ModelError, match="model_type='mamba' is not supported"):
        _ = open_folder(tmp_path).family
