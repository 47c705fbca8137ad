"""GGUF files say the same as the checkpoints they were made from, and a damaged one can do no more than be refused."""

import json
import math
import os
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize, quantize
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file
from transformers import AutoModelForCausalLM

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Batch, Limits
from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.gguf.file import GgufFile
from xinfer.models.model import Model
from xinfer.testing.tiny import tiny_config, tiny_weights, write_folder, write_gguf

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
SEED = 4
PROMPT = np.random.default_rng(0).integers(0, 256, 48)
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}


def model(path: Path) -> Model:
    return Model(str(path), lambda: path, xinfer_model_families())


def our_logits(path: Path) -> torch.Tensor:
    """Return our logits at every position of the prompt."""
    runner = TorchRunner(BackendContext(model(path), EagerConfig(device="cpu"), Limits()))
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


@torch.inference_mode()
def their_logits(folder: Path, **options: Any) -> torch.Tensor:
    """Return transformers' logits at every position of the prompt."""
    reference = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", **options
    ).eval()
    logits: torch.Tensor = reference(torch.tensor(PROMPT)[None], use_cache=False).logits[0]
    return logits


# --- what a file means ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((family, {}) for family in FAMILIES),
        ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 1}),
        ("llama", {"rope_scaling": {"rope_type": "linear", "factor": 4.0}}),
        ("llama", {"rope_scaling": {"rope_type": "llama3", **LLAMA3}}),
        ("llama", {"head_dim": 24}),
        ("qwen3", {"tie_word_embeddings": True, "num_key_value_heads": 4}),
    ],
)
def test_logits_are_those_of_transformers_on_the_checkpoint(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    config = tiny_config(family, **changes)
    theirs = their_logits(write_folder(tmp_path / "model", config, SEED))
    assert theirs.std() >= 1
    ours = our_logits(write_gguf(tmp_path / "model.gguf", config, SEED))
    assert (ours - theirs).abs().max() <= 1e-4


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q8_0", "Q4_1", "Q4_0"])
def test_logits_of_a_quantized_file_are_those_of_its_rounded_weights(kind: str, tmp_path: Path) -> None:
    config = tiny_config("llama")
    folder, quantization = write_folder(tmp_path / "model", config, SEED), GGMLQuantizationType[kind]
    rounded = {
        name: dequantize(quantize(tensor, quantization), quantization) if tensor.ndim == 2 else tensor
        for name, tensor in tiny_weights(config, SEED).items()
    }
    save_file(rounded, folder / "model.safetensors", {"format": "pt"})
    ours = our_logits(write_gguf(tmp_path / "model.gguf", config, SEED, kind))
    assert (ours - their_logits(folder)).abs().max() <= 1e-4


def test_transformers_reads_the_same_file_the_same_way(tmp_path: Path) -> None:
    """That the order of a llama's rows is that of real files is not only our writer's word."""
    file = write_gguf(tmp_path / "model.gguf", tiny_config("llama"), SEED)
    assert (our_logits(file) - their_logits(tmp_path, gguf_file=file.name)).abs().max() <= 1e-4


@pytest.mark.parametrize("family", FAMILIES)
def test_rows_of_queries_and_keys_are_in_the_checkpoints_order(family: str, tmp_path: Path) -> None:
    """Case U01."""
    config = tiny_config(family, num_hidden_layers=2)
    weights, originals = model(write_gguf(tmp_path / "model.gguf", config, SEED)).weights, tiny_weights(config, SEED)
    for layer in range(2):
        for part in ("q", "k", "v"):
            name = f"model.layers.{layer}.self_attn.{part}_proj"
            np.testing.assert_array_equal(
                weights.load(f"layers.{layer}.attn.{part}.weight"), originals[f"{name}.weight"]
            )
            if family == "qwen2":
                np.testing.assert_array_equal(
                    weights.load(f"layers.{layer}.attn.{part}.bias"), originals[f"{name}.bias"]
                )


def test_without_an_output_matrix_the_embedding_is_the_head(tmp_path: Path) -> None:
    """Case U02."""
    found = model(write_gguf(tmp_path / "model.gguf", tiny_config("llama", tie_word_embeddings=True), SEED))
    assert found.spec.tied
    assert "head.weight" not in set(found.weights)


@pytest.mark.parametrize("family", FAMILIES)
def test_text_becomes_the_same_tokens_as_with_the_checkpoint(family: str, tmp_path: Path) -> None:
    folder = model(write_folder(tmp_path / "model", tiny_config(family), SEED))
    file = model(write_gguf(tmp_path / "model.gguf", tiny_config(family), SEED))
    text, messages = "naïve 123 <|im_end|>\n", [{"role": "user", "content": "Hi, 你好"}]
    assert file.tokenizer.encode(text) == folder.tokenizer.encode(text)
    assert file.tokenizer.encode_chat(messages) == folder.tokenizer.encode_chat(messages)
    assert file.eos_token_ids == folder.eos_token_ids


def renamed(file: Path, *pairs: tuple[str, str]) -> Path:
    """Write a file in which these names, of the same length, are others."""
    content = file.read_bytes()
    for old, new in pairs:
        assert content.count(struct.pack("<Q", len(old)) + old.encode()) == 1
        assert len(old) == len(new)
        content = content.replace(old.encode(), new.encode())
    file.write_bytes(content)
    return file


def without(file: Path, *keys: str) -> Path:
    """Write a file in which these keys are no longer of the architecture."""
    return renamed(file, *((key, "~" + key[1:]) for key in keys))


def test_keys_that_are_missing_have_documented_defaults(tmp_path: Path) -> None:
    """Case U04: vocabulary size from the tokens, as many kv heads as heads, base 10,000, heads that share the width."""
    config = tiny_config("llama", num_key_value_heads=4, rms_norm_eps=2.0**-17)  # which float32 holds exactly
    file, folder = write_gguf(tmp_path / "model.gguf", config, SEED), write_folder(tmp_path / "model", config, SEED)
    keys = ("vocab_size", "attention.head_count_kv", "rope.freq_base", "attention.key_length", "rope.dimension_count")
    without(file, *(f"llama.{key}" for key in keys))
    assert model(file).spec == model(folder).spec


@pytest.mark.parametrize(
    "key",
    [
        "embedding_length",
        "feed_forward_length",
        "block_count",
        "context_length",
        "attention.head_count",
        "attention.layer_norm_rms_epsilon",
    ],
)
def test_a_missing_key_without_a_default_is_named(key: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_config("llama", num_hidden_layers=1), SEED)
    if key == "attention.head_count":  # also the beginning of another
        file = without(file, "llama.attention.head_count_kv")
    with pytest.raises(ModelError, match=rf"lacks llama\.{key}"):
        model(without(file, f"llama.{key}")).spec  # noqa: B018


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("blk.0.ffn_up.weight", "blk.0.ffn_xx.weight"),
        ("blk.0.ffn_up.weight", "blk.9.ffn_up.weight"),
        ("output_norm.weight", "outpux_norm.weight"),
    ],
)
def test_a_tensor_that_nothing_maps_is_an_error(old: str, new: str, tmp_path: Path) -> None:
    """Case U05."""
    file = renamed(write_gguf(tmp_path / "model.gguf", tiny_config("llama", num_hidden_layers=1), SEED), (old, new))
    with pytest.raises(ModelError, match=r"lacks.*unknown"):
        model(file).weights  # noqa: B018


# --- quantization ---------------------------------------------------------------------------------------------------


def dequantized_kinds() -> list[str]:
    """Return the types that the gguf package can undo."""
    found = []
    for kind, (_, size) in GGML_QUANT_SIZES.items():
        try:
            dequantize(np.zeros((1, size), np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind.name)
    return found


def blocks_of(kind: GGMLQuantizationType, rows: int, columns: int) -> np.ndarray:
    """Return rows of packed numbers: quantized where the package can, else random bits that mean finite numbers."""
    block, size = GGML_QUANT_SIZES[kind]
    rng = np.random.default_rng(SEED)
    try:
        return quantize(rng.standard_normal((rows, columns), np.float32), kind).view(np.uint8)
    except NotImplementedError:
        wanted = rows * columns // block
        raw = rng.integers(0, 256, (8 * wanted, size), np.uint8)
        with np.errstate(all="ignore"):
            sound = np.isfinite(dequantize(raw, kind)).all(-1) & (np.abs(dequantize(raw, kind)) < 1e4).all(-1)
        assert sound.sum() >= wanted
        return raw[sound][:wanted].reshape(rows, -1)


@pytest.mark.parametrize("kind", dequantized_kinds())
def test_every_type_that_can_be_undone_is_read_as_the_gguf_package_does(kind: str, tmp_path: Path) -> None:
    quantization, path = GGMLQuantizationType[kind], tmp_path / "model.gguf"
    raw = blocks_of(quantization, 6, 512)
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tensor("before", np.arange(3, dtype=np.float32))  # so that the next one does not begin the data
    writer.add_tensor("token_embd.weight", raw, raw_dtype=quantization)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GgufFile(path).tensors()
    assert tensors.shapes["token_embd.weight"] == (6, 512)
    found = tensors.load("token_embd.weight").float().numpy()
    np.testing.assert_array_equal(found, dequantize(raw, quantization).reshape(6, 512))


@pytest.mark.parametrize("kind", ["I8", "I32", "I64", "F64", "Q8_K"])
def test_a_type_that_can_not_be_undone_is_named(kind: str, tmp_path: Path) -> None:
    block, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    raw = raw_file(tmp_path, [Info("a.weight", (block, 2), GGMLQuantizationType[kind])], bytes(2 * size))
    with pytest.raises(ModelError, match=rf"'a\.weight' has the type {kind}"):
        GgufFile(raw).tensors()


# --- files that are refused -----------------------------------------------------------------------------------------


class Info:
    """A tensor as a file's header lists it."""

    def __init__(self, name: str, dims: tuple[int, ...], kind: int = 0, offset: int = 0) -> None:
        self.name, self.dims, self.kind, self.offset = name, dims, kind, offset

    def packed(self) -> bytes:
        numbers = struct.pack(f"<I{len(self.dims)}QIQ", len(self.dims), *self.dims, self.kind, self.offset)
        return string(self.name) + numbers


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def pair(name: str, kind: int, value: bytes) -> bytes:
    return string(name) + struct.pack("<I", kind) + value


ARCHITECTURE = pair("general.architecture", 8, string("llama"))


def raw_file(
    folder: Path, tensors: list[Info], data: bytes, pairs: list[bytes] | None = None, counts: Any = None
) -> Path:
    """Write a file byte by byte, as wrong as is wanted; alignment is 32."""
    pairs = [ARCHITECTURE] if pairs is None else pairs
    header = b"GGUF" + struct.pack("<IQQ", 3, *(counts or (len(tensors), len(pairs)))) + b"".join(pairs)
    header += b"".join(tensor.packed() for tensor in tensors)
    path = folder / "model.gguf"
    path.write_bytes(header + bytes(-len(header) % 32) + data)
    return path


Q4_0 = int(GGMLQuantizationType.Q4_0)


@pytest.mark.parametrize(
    ("tensors", "data", "message"),
    [
        ([Info("a", (2**32, 2**32))], 64, "'a' ends at byte"),
        ([Info("a", (2**63, 2))], 64, "'a' ends at byte"),
        ([Info("a", (2**62, 2**62, 2**62, 2**62))], 64, "'a' ends at byte"),
        ([Info("a", (8,), offset=2**40)], 64, "'a' ends at byte"),
        ([Info("a", (8,), offset=2**64 - 32)], 64, "'a' ends at byte"),
        ([Info("a", (64,), Q4_0)], 18, "'a' ends at byte"),
        ([Info("a", (17,))], 64, "'a' ends at byte"),
        ([Info("a", (33,), Q4_0)], 64, "'a' has rows of 33, which are no whole blocks of 32"),
        ([Info("a", (31, 32), Q4_0)], 1024, "'a' has rows of 31"),
        ([Info("a", (8,)), Info("a", (8,), offset=32)], 64, "'a' is listed twice"),
        ([Info("a", (16,)), Info("b", (8,), offset=32)], 64, "'b' overlaps"),
        ([Info("a", (8,), offset=4)], 64, "'a' begins at 4, which is not aligned to 32"),
        ([Info("a", (8,), 999)], 64, "'a' has the unknown type 999"),
        ([Info("a", (8,), 4)], 64, "'a' has the unknown type 4"),
        ([Info("a", ())], 64, "'a' has 0 dimensions"),
        ([Info("a", (0,))], 64, r"'a' has the dimensions \[0\]"),
        ([Info("a", (8, 0))], 64, r"'a' has the dimensions \[8, 0\]"),
        ([Info("a", (1, 1, 1, 1, 1))], 64, "'a' has 5 dimensions"),
    ],
)
def test_a_tensor_that_its_file_can_not_hold_is_named(
    tensors: list[Info], data: int, message: str, tmp_path: Path
) -> None:
    """Case U07."""
    with pytest.raises(ModelError, match=message):
        GgufFile(raw_file(tmp_path, tensors, bytes(data)))


@pytest.mark.parametrize("value", [0, 3, 24, 2**32 - 1])
def test_an_alignment_that_is_no_power_of_two_is_refused(value: int, tmp_path: Path) -> None:
    """Case U07."""
    alignment = pair("general.alignment", 4, struct.pack("<I", value))
    with pytest.raises(ModelError, match=f"general.alignment={value}"):
        GgufFile(raw_file(tmp_path, [Info("a", (8,))], bytes(64), [ARCHITECTURE, alignment]))


def test_another_alignment_is_followed(tmp_path: Path) -> None:
    alignment = pair("general.alignment", 4, struct.pack("<I", 8))
    path = raw_file(tmp_path, [], b"", [ARCHITECTURE, alignment])
    infos = Info("a", (2,)).packed() + Info("b", (2,), offset=8).packed()
    header = path.read_bytes().rstrip(b"\0")[:8] + struct.pack("<QQ", 2, 2) + ARCHITECTURE + alignment + infos
    path.write_bytes(header + bytes(-len(header) % 8) + np.arange(4, dtype=np.float32).tobytes())
    tensors = GgufFile(path).tensors()
    assert [tensors.load(name).tolist() for name in ("a", "b")] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("counts", "pairs"),
    [
        ((2**63, 1), [ARCHITECTURE]),
        ((0, 2**63), [ARCHITECTURE]),
        ((10**9, 1), [ARCHITECTURE]),
        ((0, 10**9), [ARCHITECTURE]),
        ((0, 1), [struct.pack("<Q", 2**63)]),
        ((0, 1), [struct.pack("<Q", 2**64 - 1)]),
        ((0, 1), [pair("a", 8, struct.pack("<Q", 2**40))]),
        ((0, 1), [pair("a", 9, struct.pack("<IQ", 10, 2**61))]),
        ((0, 1), [pair("a", 9, struct.pack("<IQ", 8, 2**40))]),
        ((0, 1), [pair("a", 9, struct.pack("<IQ", 9, 2**40))]),
        ((0, 1), [pair("a", 9, struct.pack("<IQ", 9, 1) * 10_000)]),
        ((0, 1), [pair("a", 13, bytes(8))]),
        ((0, 1), [pair("a", 9, struct.pack("<IQ", 77, 1) + bytes(8))]),
        ((0, 2), [ARCHITECTURE, ARCHITECTURE]),
    ],
)
def test_a_count_that_its_file_can_not_hold_is_refused(counts: Any, pairs: list[bytes], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.gguf"):
        GgufFile(raw_file(tmp_path, [], bytes(64), pairs, counts))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "can't be read"),
        (b"GG", "truncated"),
        (b"GGML" + bytes(60), "not a GGUF file"),
        (b"PK\3\4" + bytes(60), "not a GGUF file"),
        (b"GGUF" + struct.pack("<I", 1) + bytes(60), "version 1 is not supported"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(60), "big-endian.*convert"),
        (b"GGUF" + struct.pack("<I", 4) + bytes(60), "version 4 is not supported"),
    ],
)
def test_what_is_no_gguf_file_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=message):
        GgufFile(tmp_path / "model.gguf")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("llama.block_count", struct.pack("<II", 4, 2**31), "num_hidden_layers=2147483648"),
        ("llama.block_count", struct.pack("<If", 6, 1.0), "num_hidden_layers=1.0"),
        ("llama.embedding_length", struct.pack("<II", 4, 0), "embedding_length=0"),
        ("llama.attention.head_count_kv", struct.pack("<II", 4, 0), "num_key_value_heads=0"),
        ("llama.vocab_size", struct.pack("<II", 4, 0), "vocab_size=0"),
        ("llama.rope.dimension_count", struct.pack("<II", 4, 8), "rope.dimension_count"),
        ("llama.attention.value_length", struct.pack("<II", 4, 8), "attention.value_length"),
        ("llama.attention.layer_norm_rms_epsilon", struct.pack("<If", 6, math.nan), "rms_norm_eps=nan"),
    ],
)
def test_a_number_that_describes_no_model_is_named(old: str, new: bytes, message: str, tmp_path: Path) -> None:
    file = write_gguf(tmp_path / "model.gguf", tiny_config("llama", num_hidden_layers=1), SEED)
    content = file.read_bytes()
    at = content.index(string(old)) + len(string(old))
    file.write_bytes(content[:at] + new + content[at + len(new) :])
    with pytest.raises(ModelError, match=message):
        model(file).spec  # noqa: B018


def test_an_architecture_that_can_not_be_translated_is_named(tmp_path: Path) -> None:
    path = raw_file(tmp_path, [], b"", [pair("general.architecture", 8, string("mamba"))])
    with pytest.raises(ModelError, match=r"'mamba' is not supported in GGUF \(supported: llama"):
        model(path).spec  # noqa: B018
    with pytest.raises(ModelError, match="architecture None"):
        model(raw_file(tmp_path, [], b"", [])).spec  # noqa: B018


def read_everything(path: Path) -> None:
    """Read all that a backend would: description, tokenizer, every weight."""
    found = model(path)
    for name in found.weights:
        assert tuple(found.weights.load(name).shape) == found.spec.tensors[name]
    found.tokenizer.encode("text <|im_end|>")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A small sound file."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 32, "intermediate_size": 32, "vocab_size": 264}
    path = tmp_path_factory.mktemp("gguf") / "model.gguf"
    config = tiny_config("llama", rope_scaling={"rope_type": "llama3", **LLAMA3}, **sizes)
    return write_gguf(path, config, SEED, "Q8_0").read_bytes()


def header_size(content: bytes) -> int:
    """Return where the tensors' data begins: their sizes are known, and nothing follows."""
    reader_data = content.rindex(b"output.weight") + len(b"output.weight") + 4 + 2 * 8 + 4 + 8
    return -(-reader_data // 32) * 32


def cuts(content: bytes) -> Iterator[int]:
    """Yield lengths short of the whole, most of them in the header."""
    header = header_size(content)
    yield from range(1, 200)
    yield from range(200, header, 97)
    yield from range(header, len(content) - 32, 1999)
    yield len(content) - 32  # without the padding at the end, of less than 32 bytes, nothing is lost


def test_a_file_truncated_anywhere_is_refused(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    read_everything(path)
    for cut in cuts(whole):
        path.write_bytes(whole[:cut])
        with pytest.raises(ModelError):
            GgufFile(path)


@settings(max_examples=400, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damage_to_the_header_never_raises_anything_else(data: st.DataObject, whole: bytes, tmp_path: Path) -> None:
    """Bytes, or whole numbers, anywhere in the header; and nothing that lies outside the file is ever returned."""
    path, content = tmp_path / "model.gguf", bytearray(whole)
    places = st.integers(8, header_size(whole) - 9) | st.integers(8, 1500)  # where most of the numbers are
    for _ in range(data.draw(st.integers(1, 3))):
        place, size = data.draw(places), data.draw(st.sampled_from([1, 1, 4, 8]))
        value = data.draw(st.integers(0, 2 ** (8 * size) - 1) | st.sampled_from([0, 1, 2, 8, 9, 2 ** (8 * size) - 1]))
        content[place : place + size] = (value % 2 ** (8 * size)).to_bytes(size, "little")
    path.write_bytes(content)
    with suppress(ModelError):
        read_everything(path)


@pytest.mark.parametrize("key", ["general.architecture", "tokenizer.ggml.tokens", "tokenizer.ggml.token_type"])
@pytest.mark.parametrize("other", [0, 1, ["a"], [1], [[1]], "x", 1.5, True, None])
def test_metadata_of_another_kind_never_raises_anything_else(
    key: str, other: Any, whole: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(whole)
    file = GgufFile(path)
    file.metadata[key] = other
    found = model(path)
    found.__dict__["_source"] = file
    with pytest.raises(ModelError, match=key.rpartition(".")[2].replace("token_type", "type")):
        found.spec, found.tokenizer  # noqa: B018


# --- split files ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The parts of a small checkpoint as the gguf package writes them."""
    folder = tmp_path_factory.mktemp("split")
    write_gguf(folder / "model.gguf", tiny_config("llama", num_hidden_layers=1), SEED, split_max_tensors=5)
    parts = sorted(folder.iterdir())
    assert [part.name for part in parts] == [f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)]
    return parts


def copied(parts: list[Path], folder: Path) -> list[Path]:
    copies = [folder / part.name for part in parts]
    for part, copy in zip(parts, copies, strict=True):
        copy.write_bytes(part.read_bytes())
    return copies


@pytest.mark.parametrize("given", range(3))
def test_a_split_checkpoint_is_read_whole_whichever_part_is_given(
    given: int, split: list[Path], tmp_path: Path
) -> None:
    single = model(write_gguf(tmp_path / "model.gguf", tiny_config("llama", num_hidden_layers=1), SEED))
    parts = model(split[given])
    assert parts.files == split
    assert parts.spec == single.spec
    assert parts.tokenizer.encode("the text") == single.tokenizer.encode("the text")
    for name in single.weights:
        np.testing.assert_array_equal(parts.weights.load(name), single.weights.load(name))


def test_missing_parts_are_listed(split: list[Path], tmp_path: Path) -> None:
    parts = copied(split, tmp_path)
    parts[0].unlink()
    parts[2].unlink()
    with pytest.raises(ModelError, match=r"model-00001-of-00003\.gguf, model-00003-of-00003\.gguf are missing"):
        GgufFile(parts[1])


@pytest.mark.parametrize("name", ["model.gguf", "model-00001-of-00002.gguf", "model-1-of-3.gguf"])
def test_a_part_that_lost_its_name_is_refused(name: str, split: list[Path], tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"one of 3 parts, but not named like one.*-of-00003\.gguf"):
        GgufFile(copied(split, tmp_path)[0].rename(tmp_path / name))


def test_parts_that_do_not_belong_together_are_refused(split: list[Path], tmp_path: Path) -> None:
    parts = copied(split, tmp_path)
    parts[1].write_bytes(parts[2].read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: split\.no=2 of split\.count=3"):
        GgufFile(parts[0])
    whole = write_gguf(tmp_path / "whole.gguf", tiny_config("llama", num_hidden_layers=1), SEED)
    parts[1].write_bytes(whole.read_bytes())
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: split\.no=None"):
        GgufFile(parts[2])


def with_number(file: Path, key: str, code: str, value: int) -> None:
    content = file.read_bytes()
    at = content.index(string(key)) + len(string(key)) + 4
    packed = struct.pack("<" + code, value)
    file.write_bytes(content[:at] + packed + content[at + len(packed) :])


@pytest.mark.parametrize(("key", "code", "value"), [("tensors.count", "i", 13), ("tensors.count", "i", -1)])
def test_another_number_of_tensors_than_was_promised_is_refused(
    key: str, code: str, value: int, split: list[Path], tmp_path: Path
) -> None:
    parts = copied(split, tmp_path)
    with_number(parts[0], f"split.{key}", code, value)
    with pytest.raises(ModelError, match=rf"hold 12 tensors, but split\.{key}={value}"):
        GgufFile(parts[1])


def test_a_tensor_in_two_parts_is_refused(split: list[Path], tmp_path: Path) -> None:
    parts = copied(split, tmp_path)
    renamed(parts[1], ("blk.0.ffn_up.weight", "blk.0.attn_q.weight"))
    with pytest.raises(ModelError, match=r"00002-of-00003\.gguf: tensor 'blk\.0\.attn_q\.weight' is in model-00001"):
        GgufFile(parts[0])


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(data=st.data())
def test_damage_to_any_part_never_raises_anything_else(data: st.DataObject, split: list[Path], tmp_path: Path) -> None:
    parts = copied(split, tmp_path)
    for _ in range(data.draw(st.integers(1, 3))):
        part = data.draw(st.sampled_from(parts))
        content = bytearray(part.read_bytes())
        if content and data.draw(st.booleans()):
            content[data.draw(st.integers(0, min(len(content), 1200) - 1))] = data.draw(st.integers(0, 255))
        else:
            del content[data.draw(st.integers(0, len(content))) :]
        part.write_bytes(content)
    started = time.process_time()
    with suppress(ModelError):
        read_everything(data.draw(st.sampled_from(parts)))
    assert time.process_time() - started < 1


# --- files made to be slow or large ---------------------------------------------------------------------------------

MANY = 1 << 20


@pytest.mark.parametrize(
    ("counts", "body"),
    [
        ((0, 1), pair("a", 9, struct.pack("<IQ", 8, MANY) + bytes(8 * MANY))),
        ((0, 1), pair("a", 9, struct.pack("<IQ", 9, MANY) + struct.pack("<IQ", 0, 0) * MANY)),
        ((0, 1), pair("a", 9, struct.pack("<IQ", 0, 4 * MANY) + bytes(4 * MANY))),
        ((0, 1), struct.pack("<Q", MANY) + bytes(MANY)),
        ((0, MANY), (string("") + struct.pack("<IB", 0, 1)) * MANY),
        ((MANY, 0), bytes(24 * MANY)),
        ((1, 0), string("a") + struct.pack("<I", MANY) + bytes(8 * MANY)),
    ],
    ids=["strings", "arrays", "numbers", "name", "keys", "tensors", "dimensions"],
)
def test_a_header_made_to_take_long_does_not(counts: tuple[int, int], body: bytes, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, *counts) + body)
    started = time.process_time()
    with suppress(ModelError):
        GgufFile(path)
    assert time.process_time() - started < 1


def test_a_header_of_holes_takes_no_memory(tmp_path: Path) -> None:
    """Of a string that a sparse file holds for real, none is made."""
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair("a", 8, struct.pack("<Q", 1 << 33)))
    os.truncate(path, 1 << 34)
    with pytest.raises(ModelError, match=r"a header of more than \d+ bytes"):
        GgufFile(path)


def test_chat_template_and_special_tokens_come_from_the_metadata(tmp_path: Path) -> None:
    found = model(write_gguf(tmp_path / "model.gguf", tiny_config("llama"), SEED)).tokenizer
    assert found.chat_template is not None
    assert json.loads(json.dumps(dict(found.chat_template.special))) == {
        "bos_token": "<|endoftext|>",
        "eos_token": "<|im_end|>",
    }
