"""What all schemes share: where a config lies, what is refused and told, and that models compute what they should."""

import json
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_awq import Awq
from test_awq import config as awq
from test_compressed_tensors import Compressed
from test_fp8 import Fp8
from test_fp8 import config as fp8
from test_gptq import Gptq
from test_gptq import config as gptq
from transformers import AutoModelForCausalLM

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Batch, Limits
from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantized import dequantized
from xinfer.models.quantized._config import matches
from xinfer.models.weights import Tensors

PROMPT = np.random.default_rng(0).integers(0, 256, 48)
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "gptq": (Gptq(act_order=True), gptq(desc_act=True)),
    "awq": (Awq(), awq()),
    "compressed-tensors": (Compressed(symmetric=False), Compressed(symmetric=False).config()),
    "fp8": (Fp8((32, 16)), fp8()),
}


@torch.inference_mode()
def their_logits(folder: Path) -> torch.Tensor:
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    logits: torch.Tensor = reference(torch.tensor(PROMPT)[None], use_cache=False).logits[0]
    return logits


def our_logits(model: Model) -> torch.Tensor:
    runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), Limits()))
    places = np.arange(len(PROMPT), dtype=np.int32)
    batch = Batch(
        token_ids=PROMPT.astype(np.int32),
        positions=places,
        query_starts=np.array([0, len(PROMPT)], np.int32),
        context_lens=np.array([len(PROMPT)], np.int32),
        block_tables=np.arange(-(-len(PROMPT) // runner.info.block_size), dtype=np.int32)[None],
        slot_mapping=places.astype(np.int64),
        sample_at=places,
        adapters=np.zeros(1, np.int32),
    )
    return runner.forward(batch)


@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_transformers_on_the_dequantized_weights(kind: str, checkpoint: Any) -> None:
    written = checkpoint(*KINDS[kind])
    theirs = their_logits(written.plain)
    assert theirs.std() >= 0.5
    assert (our_logits(written.model()) - theirs).abs().max() <= 1e-4


# --- where a config lies --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json"])
def test_files_of_old_tools_are_found(name: str, checkpoint: Any) -> None:
    quantize, config = KINDS["gptq" if name == "quantize_config.json" else "awq"]
    written = checkpoint(quantize)
    own = {field: value for field, value in config.items() if field != "quant_method"}
    (written.path / name).write_text(json.dumps(own))
    written.check()
    (written.path / name).write_text("[1]")
    with pytest.raises(ModelError, match=rf"{name}: a JSON object is expected"):
        written.model().weights  # noqa: B018


def test_config_json_counts_more_than_a_file_beside_it(checkpoint: Any) -> None:
    written = checkpoint(*KINDS["gptq"])
    (written.path / "quantize_config.json").write_text(json.dumps(gptq(bits=8)))
    written.check()


@pytest.mark.parametrize("key", ["quantization_config", "compression_config"])
@pytest.mark.parametrize("value", [5, "gptq", [], True])
def test_a_config_that_is_no_object_is_refused(key: str, value: Any, checkpoint: Any) -> None:
    written = checkpoint(Gptq())
    written.configure(**{key: value})
    with pytest.raises(ModelError, match=f"{key}=.*an object is expected"):
        written.model().weights  # noqa: B018


def test_a_checkpoint_that_does_not_say_that_it_is_quantized_is_refused(checkpoint: Any) -> None:
    with pytest.raises(ModelError, match=r"lacks .* has unknown .*q(weight|zeros)|_proj"):
        checkpoint(Gptq()).model().weights  # noqa: B018


def test_random_weights_need_no_quantized_ones(checkpoint: Any) -> None:
    written = checkpoint(Gptq(), {"quant_method": "bitsandbytes"})
    model = Model("", lambda: written.path, xinfer_model_families(), load_format="dummy")
    assert model.weights.load("layers.0.mlp.up.weight").shape == (128, 64)
    assert model.notes == []


# --- what is told and refused ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "note"),
    [
        ("gptq", "4-bit GPTQ weights, computed in float32 after dequantizing"),
        ("awq", "4-bit AWQ weights, computed in float32 after dequantizing"),
        ("compressed-tensors", "int4 weights (compressed-tensors), computed in float32 after dequantizing"),
    ],
)
def test_a_note_tells_of_it(kind: str, note: str, checkpoint: Any) -> None:
    written = checkpoint(*KINDS[kind])
    model = Model("", lambda: written.path, xinfer_model_families(), dtype="float32")
    assert model.notes == [note]
    assert "the device's precision" in written.model().notes[0]


def test_a_note_tells_that_activations_are_not_rounded(checkpoint: Any) -> None:
    (note,) = checkpoint(*KINDS["fp8"]).model().notes
    assert "fp8 weights" in note
    assert "activations are not rounded to fp8" in note


OTHERS = [
    *("bitsandbytes", "eetq", "hqq", "quanto", "aqlm", "vptq", "fbgemm_fp8", "higgs", "modelopt", "torchao", "bitnet"),
    *("quark", "spqr", "nvfp4", "mxfp8", "auto-round", "fp_quant", "gguf", "marlin", "GPTQ"),
]


@pytest.mark.parametrize("method", [*OTHERS, None, 4, ["gptq"], {}])
def test_a_scheme_that_is_not_supported_is_named(method: Any, checkpoint: Any) -> None:
    written = checkpoint(Gptq(), {"quant_method": method, "bits": 4})
    with pytest.raises(ModelError) as error:
        written.model().weights  # noqa: B018
    assert f"quant_method={method!r} is not supported" in str(error.value)
    assert "supported: awq, compressed-tensors, fp8, gptq, mxfp4" in str(error.value)


def test_schemes_that_do_not_name_themselves_are_named(checkpoint: Any) -> None:
    written = checkpoint(Gptq(), {"load_in_4bit": True})
    with pytest.raises(ModelError, match="quant_method='bitsandbytes'"):
        written.model().weights  # noqa: B018
    written = checkpoint(Gptq())
    (written.path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "FP8"}}')
    with pytest.raises(ModelError, match="quant_method='modelopt'"):
        written.model().weights  # noqa: B018


@pytest.mark.parametrize("kind", ["gptq", "awq", "compressed-tensors"])
def test_a_weight_that_is_there_twice_is_named(kind: str, checkpoint: Any) -> None:
    written = checkpoint(*KINDS[kind])
    written.stored["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64)
    written.save()
    with pytest.raises(ModelError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight' is there both"):
        written.model().weights  # noqa: B018


def test_patterns_that_could_take_forever_are_refused() -> None:
    started = time.perf_counter()
    for pattern in (
        "(a+)+$",
        "(a|a)*$",
        "(?:a|aa)+$",
        "(.*)*x",
        "((a+)){9}$",
        ".*" * 7 + "x",
        "a{1,9}" * 7,
        "x" * 2000,
    ):
        with pytest.raises(ModelError, match="repeats too much"):
            matches(pattern, "a" * 60)
    assert not matches(".*a.*a.*ax", "a" * 10**6)
    assert time.perf_counter() - started < 5
    assert matches(r".*layers\.(\d+)\.(self_attn|mlp)\..*_proj$", "model.layers.11.mlp.up_proj")
    assert matches("(?!.*lm_head).*proj", "a.q_proj")


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 2**70)
    | st.floats()
    | st.text(max_size=3)
    | st.sampled_from([4, 8, 32]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weights", "targets", "num_bits", "a", ".*", "format", "strategy"]), inner)
    ),
    max_leaves=6,
)
FIELDS = [
    *("bits", "group_size", "sym", "desc_act", "checkpoint_format", "dynamic", "version", "zero_point", "pack_dtype"),
    *("config_groups", "format", "ignore", "weight_block_size", "activation_scheme", "sparsity_config"),
    *("kv_cache_scheme", "is_marlin_format"),
]


@settings(max_examples=400)
@given(kind=st.sampled_from([*KINDS, "mxfp4"]), field=st.sampled_from(FIELDS), value=VALUES, seed=st.integers(0, 9))
def test_no_value_of_any_field_raises_anything_else(kind: str, field: str, value: Any, seed: int) -> None:
    quantize, config = KINDS.get(kind, (Gptq(), {"quant_method": "mxfp4"}))
    parts = quantize(np.random.default_rng(seed), 64, 64)[0]
    stored = {f"a.{name}": part for name, part in parts.items()}
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    with suppress(ModelError):
        found = dequantized(source, config | {field: value})
        for name, shape in found.shapes.items():
            with suppress(ModelError):
                assert found.load(name).shape == shape


@settings(max_examples=300)
@given(
    kind=st.sampled_from(list(KINDS)),
    part=st.integers(0, 9),
    shape=st.lists(st.integers(0, 70), max_size=3),
    dtype=st.sampled_from([torch.int32, torch.int8, torch.float16, torch.float32, torch.int64, torch.bool]),
)
def test_no_stored_tensor_raises_anything_else(kind: str, part: int, shape: list[int], dtype: torch.dtype) -> None:
    quantize, config = KINDS[kind]
    parts = quantize(np.random.default_rng(0), 64, 64)[0]
    stored = {f"a.{name}": tensor for name, tensor in parts.items()}
    name = sorted(stored)[part % len(stored)]
    stored[name] = torch.ones(shape or stored[name].shape).to(dtype)
    source = Tensors({name: tuple(part.shape) for name, part in stored.items()}, stored.__getitem__, ())
    with suppress(ModelError):
        found = dequantized(source, config)
        for name, found_shape in found.shapes.items():
            assert found.load(name).shape == found_shape
