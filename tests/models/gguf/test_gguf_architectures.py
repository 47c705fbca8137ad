"""Each architecture of GGUF files: the checkpoint's logits, and the tokens that llama.cpp generates."""

import copy
import importlib.util
import json
import math
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.batch import make_batch
from xinfer.engine.types import Limits, Request, SamplingParams, Sequence
from xinfer.errors import ModelError
from xinfer.models.families import Family, llama, xinfer_model_families
from xinfer.models.gguf.architecture import Architecture
from xinfer.models.gguf.architectures import ARCHITECTURES
from xinfer.models.gguf.file import GgufFile
from xinfer.models.gguf.layouts import PAIRS
from xinfer.models.model import Model
from xinfer.testing.gguf import ARCHITECTURES as OF_FAMILIES
from xinfer.testing.gguf import GGUF_SHAPES, convert, gguf_shape
from xinfer.testing.reference import reference_logits, write_reference

DATA = Path(__file__).parents[2] / "data"
SHAPES = [(family, name) for family, names in GGUF_SHAPES.items() for name in names]
TOLD = json.loads((DATA / "gguf_texts.json").read_text())["shapes"]
FAMILIES = xinfer_model_families()
IDS = np.random.default_rng(3).integers(0, 160, 60).tolist()


def maker() -> Any:
    """Return the module that made what llama.cpp told."""
    found = importlib.util.spec_from_file_location("make_gguf_texts", DATA / "make_gguf_texts.py")
    assert found is not None and found.loader is not None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


MAKER = maker()


def model(path: Path, families: list[Family] | None = None) -> Model:
    return Model(str(path), lambda: path, families or FAMILIES)


class Text:
    """A text that our runner computes, step by step."""

    def __init__(self, path: Path, ids: list[int], max_model_len: int | None = None) -> None:
        limits = Limits(max_num_seqs=1, max_num_batched_tokens=256, kv_memory=20e6, max_model_len=max_model_len)
        self.runner = TorchRunner(BackendContext(model(path), EagerConfig(device="cpu"), limits))
        self.sequence = Sequence(Request("r", 0, tuple(ids), SamplingParams(), 0), list(ids), limit=1 << 20)
        self.sequence.blocks = list(range(min(self.runner.info.num_blocks, 256 // self.runner.info.block_size)))

    def step(self, count: int) -> torch.Tensor:
        """Compute so many tokens, and return their logits."""
        rows = self.runner.forward(make_batch([self.sequence], [count], [count], self.runner.info.block_size))
        self.sequence.num_computed += count
        return rows

    def generate(self, count: int) -> list[int]:
        """Return so many of the likeliest tokens."""
        rows, ids = self.step(len(self.sequence.token_ids)), self.sequence.token_ids
        first = len(ids)
        while len(ids) < first + count:
            ids.append(int(rows[-1].argmax()))
            rows = self.step(1)
        return ids[first:]


def logits(path: Path, max_model_len: int | None = None) -> torch.Tensor:
    return Text(path, IDS, max_model_len).step(len(IDS))


def longest(name: str) -> int | None:
    """Return how long a context has to be so that factors for long ones are used: else the shorter is the default."""
    return 80 if name == "longrope" else None


@pytest.mark.parametrize(("family", "name"), SHAPES)
def test_logits_are_those_of_transformers_on_the_checkpoint(family: str, name: str, tmp_path: Path) -> None:
    reference = write_reference(tmp_path / "model", gguf_shape(family, name), 2)
    ours = logits(convert(tmp_path / "model", tmp_path / "model.gguf"), longest(name))
    theirs = reference_logits(reference, IDS)
    assert theirs.std() >= 0.5
    assert (ours - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("told", TOLD)
def test_tokens_are_those_of_llama_cpp(told: str, tmp_path: Path) -> None:
    family, _, name = told.partition("/")
    config = gguf_shape(family, name)
    write_reference(tmp_path / "model", config, TOLD[told]["seed"])
    assert MAKER.fingerprint(tmp_path / "model") == TOLD[told]["weights"], "other weights: run make_gguf_texts.py"
    file = convert(tmp_path / "model", tmp_path / "model.gguf")
    for prompt, tokens in zip(MAKER.prompts(config["vocab_size"]), TOLD[told]["tokens"], strict=True):
        assert Text(file, prompt, longest(name)).generate(len(tokens)) == tokens


def test_llama_cpp_was_asked_of_every_architecture() -> None:
    """And its logits were the checkpoint's, but where it computes gelu in half precision, or has another epsilon."""
    families = {told.partition("/")[0] for told in TOLD}
    assert {gguf.MODEL_ARCH_NAMES[OF_FAMILIES[family]] for family in families} >= {each.name for each in ARCHITECTURES}
    gelu = ("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neox", "falcon", "phi", "starcoder2")
    for told, found in TOLD.items():
        assert found["difference"] <= 1e-4 or told.partition("/")[0] in (*gelu, "glm4_moe_lite")
    assert max(found["difference"] for found in TOLD.values()) <= 5e-3


def test_shapes_that_llama_cpp_was_not_asked_of_are_known() -> None:
    assert {f"{family}/{name}" for family, name in SHAPES} == TOLD.keys() | MAKER.NOT_ASKED.keys()


# --- other layouts ---------------------------------------------------------------------------------------------------


def checkpoint(tmp_path: Path, family: str, name: str, **changes: Any) -> Any:
    return write_reference(tmp_path / "model", gguf_shape(family, name) | changes, 2)


def test_experts_that_lie_apart_are_put_together(tmp_path: Path) -> None:
    """As files from before April 2024 have them."""

    def apart(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        if "_exps." in name:
            yield from ((name.replace("_exps", f".{i}"), matrix) for i, matrix in enumerate(tensor))
        else:
            yield name, tensor

    reference = checkpoint(tmp_path, "mixtral", "usual")
    file = convert(tmp_path / "model", tmp_path / "model.gguf", rewrite=apart)
    assert (logits(file) - reference_logits(reference, IDS)).abs().max() <= 1e-4


@pytest.mark.parametrize(("family", "name"), [("llama", "plain"), ("qwen3_moe", "usual"), ("granite", "bias")])
def test_fused_matrices_are_parted(family: str, name: str, tmp_path: Path) -> None:
    """What the converter's options write."""
    waiting: dict[str, np.ndarray] = {}

    def fused(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        waiting[name] = tensor
        before, _, part = name.rpartition(".")
        *_, place = before.split(".")
        groups = {"attn_qkv": ("attn_q", "attn_k", "attn_v"), "ffn_gate_up_exps": ("ffn_gate_exps", "ffn_up_exps")}
        for whole, parts in groups.items():
            if place in parts:
                stem = f"{before.removesuffix(place)}{{}}.{part}"
                if all(stem.format(each) in waiting for each in parts):
                    yield (
                        stem.format(whole),
                        np.concatenate(
                            [waiting[stem.format(p)] for p in parts], min(1, tensor.ndim - 2) if tensor.ndim > 2 else 0
                        ),
                    )
                return
        yield name, tensor

    reference = checkpoint(tmp_path, family, name)
    file = convert(tmp_path / "model", tmp_path / "model.gguf", rewrite=fused)
    assert (logits(file) - reference_logits(reference, IDS)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("family", "name"), [("deepseek_v3", "usual"), ("deepseek_v3", "plain"), ("deepseek_v2", "usual")]
)
def test_latent_attention_of_older_files_is_the_same(family: str, name: str, tmp_path: Path) -> None:
    """Their keys and values come from one matrix, and the plain names tell their widths."""
    config = gguf_shape(family, name)
    heads, nope, value = config["num_attention_heads"], config["qk_nope_head_dim"], config["v_head_dim"]
    keys: dict[str, np.ndarray] = {}

    def joined(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        if "attn_k_b" in name:
            keys[name] = tensor.swapaxes(1, 2)
        elif "attn_v_b" in name:
            both = np.concatenate([keys[name.replace("v_b", "k_b")], tensor], 1)
            yield name.replace("v_b", "kv_b"), both.reshape(heads * (nope + value), -1)
        else:
            yield name, tensor

    old = {
        "attention.head_count_kv": heads,
        "attention.key_length": nope + config["qk_rope_head_dim"],
        "attention.value_length": value,
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
    }
    reference = checkpoint(tmp_path, family, name)
    file = convert(tmp_path / "model", tmp_path / "model.gguf", keys=old, rewrite=joined)
    assert (logits(file) - reference_logits(reference, IDS)).abs().max() <= 1e-4


def test_layers_that_guess_further_tokens_are_left_out(tmp_path: Path) -> None:
    """They are counted with the others, and lie behind them."""

    def more(name: str, tensor: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
        yield name, tensor
        if name.startswith("blk.2."):
            yield name.replace("blk.2.", "blk.3."), tensor
        if name == "output_norm.weight":
            yield "blk.3.nextn.enorm.weight", tensor

    reference = checkpoint(tmp_path, "glm4_moe", "usual")
    file = convert(tmp_path / "model", tmp_path / "model.gguf", rewrite=more)
    assert model(file).config["num_hidden_layers"] == 3
    assert (logits(file) - reference_logits(reference, IDS)).abs().max() <= 1e-4


# --- quantized -------------------------------------------------------------------------------------------------------


def blocks(kind: GGMLQuantizationType, rows: int, columns: int, seed: int) -> np.ndarray:
    """Return rows of random bits that mean numbers of a usual size, in any type."""
    block, size = GGML_QUANT_SIZES[kind]
    rng, wanted, found = np.random.default_rng(seed), rows * columns // block, []
    while sum(map(len, found)) < wanted:
        raw = rng.integers(0, 256, (20_000, size), np.uint8)
        with np.errstate(all="ignore"):
            largest = np.abs(dequantize(raw, kind)).max(-1)
            found.append(raw[(largest > 0.02) & (largest < 0.3)])
    return np.concatenate(found)[:wanted].reshape(rows, -1)


@pytest.mark.parametrize(
    "kind",
    ["Q4_0", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ1_S", "IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "MXFP4"],
)
def test_quantized_rows_are_put_in_order_and_experts_stacked(kind: str, tmp_path: Path) -> None:
    """A file in any type gives what the one in float32 gives that holds the same numbers."""
    quantization, path = GGMLQuantizationType[kind], tmp_path / "quantized.gguf"
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 1, "num_local_experts": 2}
    checkpoint(tmp_path, "mixtral", "usual", **sizes)
    plain = gguf.GGUFReader(convert(tmp_path / "model", tmp_path / "plain.gguf"))
    writers = [gguf.GGUFWriter(each, "llama") for each in (path, tmp_path / "same.gguf")]
    for writer in writers:
        for key, field in plain.fields.items():
            if key.startswith("llama."):
                writer.add_key_value(key, field.contents(), field.types[0])
    for i, tensor in enumerate(plain.tensors):
        values = np.array(tensor.data)
        if values.ndim == 1 or "ffn_gate_inp" in tensor.name:
            for writer in writers:
                writer.add_tensor(tensor.name, values)
            continue
        raw = blocks(quantization, values.size // values.shape[-1], values.shape[-1], i)
        writers[0].add_tensor(tensor.name, raw.reshape(*values.shape[:-1], -1), raw_dtype=quantization)
        writers[1].add_tensor(tensor.name, dequantize(raw, quantization).reshape(values.shape))
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    found = logits(path)
    assert found.isfinite().all()
    torch.testing.assert_close(found, logits(tmp_path / "same.gguf"), rtol=1e-5, atol=1e-5)


def test_experts_in_mxfp4_are_read(tmp_path: Path) -> None:
    """As gpt-oss has them."""
    changes = {"hidden_size": 64, "intermediate_size": 96}
    checkpoint(tmp_path, "gpt_oss", "plain", **changes)
    file = convert(tmp_path / "model", tmp_path / "model.gguf", "MXFP4")
    kinds = {tensor.name.split(".")[-2]: tensor.tensor_type.name for tensor in gguf.GGUFReader(file).tensors}
    assert kinds["ffn_gate_exps"] == kinds["ffn_down_exps"] == "MXFP4"

    def rounded(name: str, tensor: np.ndarray) -> list[tuple[str, np.ndarray]]:
        if tensor.ndim == 1 or "ffn_gate_inp" in name or tensor.shape[-1] % 32:
            return [(name, tensor)]
        packed = gguf.quants.quantize(np.ascontiguousarray(tensor), GGMLQuantizationType.MXFP4)
        return [(name, dequantize(packed, GGMLQuantizationType.MXFP4))]

    same = convert(tmp_path / "model", tmp_path / "same.gguf", rewrite=rounded)
    torch.testing.assert_close(logits(file), logits(same), rtol=1e-5, atol=1e-5)


# --- keys ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "keys", "message"),
    [
        ("llama", {"attention.temperature_scale": 0.1}, r"llama\.attention\.temperature_scale=0\.1"),
        ("llama", {"attention.causal": False}, r"attention\.causal=False"),
        ("llama", {"logit_scale": 2.0}, r"llama\.logit_scale=2\.0"),
        ("llama", {"rope.scaling.alpha": 1000.0}, r"rope\.scaling\.alpha"),
        ("llama", {"attention.head_count_kv": [1, 2, 4]}, "head_count_kv differs between layers"),
        ("llama", {"feed_forward_length": [80, 80, 90]}, "feed_forward_length differs between layers"),
        ("llama", {"rope.dimension_count": 6}, "rope.dimension_count"),
        ("llama", {"rope.freq_base_swa": 7.0}, "rope.freq_base_swa"),
        ("llama", {"nextn_predict_layers": 0.5}, "nextn_predict_layers=0.5"),
        ("llama", {"nextn_predict_layers": 3}, "num_hidden_layers=0"),
        ("qwen3", {"attention.value_length": 12}, "attention.value_length"),
        (
            "qwen3",
            {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_ext_factor": 0.5},
            "ext",
        ),
        ("qwen3", {"rope.scaling.type": "su", "rope.scaling.factor": 4.0}, "longrope"),
        ("qwen3", {"rope.scaling.attn_factor": 2.0}, "attn_factor"),
        ("qwen3_moe", {"expert_gating_func": 2}, "expert_gating_func=2"),
        ("qwen3_moe", {"expert_weights_scale": 2.5}, "expert_weights_scale"),
        ("granite", {"rope.scaling.finetuned": False}, "finetuned"),
        ("gemma2", {"attn_logit_softcapping": 0.0}, "attn_logit_softcapping"),
        ("gemma3_text", {"attention.sliding_window_pattern": [True]}, "layer_types"),
        ("deepseek_v3", {"attention.key_length": 5}, "attention.key_length=5"),
        ("glm4", {"rope.dimension_sections": [4, 2, 2, 0]}, "rope.dimension_sections"),
        ("falcon", {"feed_forward_length": None}, "lacks falcon.feed_forward_length"),
    ],
)
def test_a_key_that_would_change_the_computation_is_followed_or_refused(
    family: str, keys: dict[str, Any], message: str, tmp_path: Path
) -> None:
    checkpoint(tmp_path, family, next(iter(GGUF_SHAPES[family])))
    file = convert(tmp_path / "model", tmp_path / "model.gguf", keys=keys)
    with pytest.raises(ModelError, match=message):
        model(file).spec  # noqa: B018


ODD: list[Any] = [None, "x", True, 0, -1, 3, 2**64 - 1, 0.0, -0.5, 1e300, math.nan, [], ["a"], [1, 2], [[1]]]


@pytest.mark.parametrize("family", GGUF_SHAPES)
def test_an_odd_value_is_understood_or_refused(family: str, tmp_path: Path) -> None:
    """Whatever any key says; also those that this file does not have."""
    checkpoint(tmp_path, family, next(iter(GGUF_SHAPES[family])))
    path = convert(tmp_path / "model", tmp_path / "model.gguf")
    file = GgufFile(path)
    architecture = file.architecture
    own = {key for key in file.metadata if key.startswith(f"{architecture.name}.")}
    known = {*architecture.words, *architecture.optional, *own, *(f"rope.scaling.{name}" for name in SCALING)}
    for key in sorted({key.removeprefix(f"{architecture.name}.") for key in known}):
        for value in ODD:
            odd = model(path)
            changed = GgufFile.__new__(GgufFile)
            changed.__dict__ |= {"path": path, "_reader": copy.copy(file._reader), "_known": file._known}
            changed._reader.metadata = {**file.metadata, f"{architecture.name}.{key}": value}
            odd.__dict__["_source"] = changed
            with suppress(ModelError):
                odd.spec  # noqa: B018


SCALING = ("type", "factor", "attn_factor", "original_context_length", "yarn_log_multiplier", "yarn_beta_fast")


@pytest.mark.parametrize(
    ("family", "keys"),
    [
        ("llama", {"attention.causal": True, "expert_count": 0, "expert_used_count": 0, "rope.scaling.type": "none"}),
        ("llama", {"attention.head_count_kv": [2, 2, 2], "tensor_data_layout": "Meta AI original pth"}),
        ("llama", {"rope.scaling.finetuned": False, "pooling_type": 0, "attention.layer_norm_epsilon": 0.5}),
        ("gemma2", {"attention.sliding_window_pattern": 2}),
        ("gemma2", {"attention.sliding_window_pattern": [True, False, True]}),
        ("qwen3_moe", {"expert_gating_func": 1, "expert_weights_norm": True}),
        ("gpt_oss", {"rope.freq_base_swa": 212.88}),
        ("cohere2", {"rope.freq_base": 10_000.0}),
    ],
)
def test_what_says_the_same_changes_nothing(family: str, keys: dict[str, Any], tmp_path: Path) -> None:
    checkpoint(tmp_path, family, "linear" if family == "llama" else "usual")
    plain = {"rope.scaling.type": None, "rope.scaling.factor": None} if family == "llama" else {}
    file = convert(tmp_path / "model", tmp_path / "model.gguf", keys=plain)
    other = convert(tmp_path / "model", tmp_path / "other.gguf", keys={**plain, **keys})
    assert model(file).spec == model(other).spec


def test_yarn_is_followed_in_all_its_keys(tmp_path: Path) -> None:
    """Also in those that llama.cpp ignores for this architecture, though its converter writes them."""
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 1000.0}
    scaling |= {"attention_factor": 0.8, "beta_fast": 16, "beta_slow": 2}
    reference = checkpoint(tmp_path, "llama", "yarn", rope_scaling=scaling)
    file = convert(tmp_path / "model", tmp_path / "model.gguf")
    assert (logits(file) - reference_logits(reference, IDS)).abs().max() <= 1e-4


@pytest.mark.parametrize("attention_factor", [True, False])
def test_a_factor_on_yarns_amplitude_multiplies_it(attention_factor: bool, tmp_path: Path) -> None:
    """`attn_factor` multiplies what yarn has by itself, 1 + 0.1 ln 4, or what the file has instead."""
    checkpoint(tmp_path, "llama", "yarn")
    keys = {"rope.scaling.attn_factor": 0.5, "rope.scaling.yarn_attn_factor": 3.0 if attention_factor else None}
    spec = model(convert(tmp_path / "model", tmp_path / "model.gguf", keys=keys)).spec
    rope = spec.layers[0].attention.rope
    assert rope is not None
    assert rope.amplitude == pytest.approx(1.5 if attention_factor else 0.5 * (1 + 0.1 * np.log(4)))


@pytest.mark.parametrize(("layers", "scalar"), [(46, 12), (3, 16)])
def test_the_largest_gemma2_scales_scores_by_the_embeddings_share(layers: int, scalar: int, tmp_path: Path) -> None:
    """Which no file says."""
    checkpoint(tmp_path, "gemma2", "usual", num_hidden_layers=layers)
    spec = model(convert(tmp_path / "model", tmp_path / "model.gguf")).spec
    assert spec.layers[0].attention.scale == scalar**-0.5


def test_a_share_of_a_head_turns_as_many_dimensions_as_the_file_says(tmp_path: Path) -> None:
    """Whatever rounding does to the share."""
    checkpoint(tmp_path, "stablelm", "usual", hidden_size=384, num_hidden_layers=1, intermediate_size=8)
    for turned in range(2, 97, 2):
        file = convert(tmp_path / "model", tmp_path / "model.gguf", keys={"rope.dimension_count": turned})
        rope = model(file).spec.layers[0].attention.rope
        assert rope is not None and rope.dim == turned


# --- third parties' families -----------------------------------------------------------------------------------------


def test_a_family_brings_the_architecture_of_its_files(tmp_path: Path) -> None:
    """Its names, words and layouts are an entry like those of the table."""
    checkpoint(tmp_path, "llama", "plain")
    plain = convert(tmp_path / "model", tmp_path / "model.gguf")
    content = plain.read_bytes()
    own = tmp_path / "own.gguf"
    own.write_bytes(content.replace(b"llama", b"lemma").replace(b"ffn_up.", b"ffn_xy."))
    table = {each.name: each for each in ARCHITECTURES}["llama"]
    entry = Architecture(
        "lemma",
        "lemma",
        table.words,
        layer={**table.layer, "ffn_xy": "mlp.up"},
        undo=PAIRS,  # type: ignore[dict-item]
    )
    families = [*FAMILIES, Family("lemma", llama.spec, llama.NAMES, gguf=(entry,))]
    found, expected = model(own, families).weights, model(plain).weights
    assert [*found] == [*expected]
    assert all(torch.equal(found.load(name), expected.load(name)) for name in found)
    with pytest.raises(ModelError, match="'lemma' is not supported in GGUF"):
        model(own).spec  # noqa: B018
