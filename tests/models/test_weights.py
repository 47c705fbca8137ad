"""A checkpoint's files are read as their format means them, and one that is damaged or unsafe is refused by name."""

import json
import struct
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from xinfer.errors import ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.safetensors_reader import read_safetensors
from xinfer.models.spec import DecoderSpec
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import shape
from xinfer.testing.tiny import tiny_config, tiny_weights, write_folder

FAMILIES = ["llama", "mistral", "qwen2", "qwen3"]
SEED = 3


def model(path: Path) -> Model:
    return Model(str(path), lambda: path, xinfer_model_families())


def spec_of(config: dict[str, Any]) -> DecoderSpec:
    families = {family.name: family for family in xinfer_model_families()}
    return families[config["model_type"]].spec(config)


def read_all(path: Path) -> dict[str, np.ndarray]:
    """Return every weight that a backend would get, by canonical name."""
    weights = model(path).weights
    return {name: weights.load(name).numpy() for name in weights}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", tiny_config("llama", num_hidden_layers=1), SEED)


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "model", tiny_config("qwen2"), SEED, shards=3)


def rewrite(folder: Path, change: Callable[[dict[str, np.ndarray]], None], name: str = "model.safetensors") -> None:
    """Change the tensors of a weight file."""
    tensors = load_file(folder / name)
    change(tensors)
    save_file(tensors, folder / name)


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("shards", [1, 3])
def test_every_tensor_arrives_unchanged(family: str, shards: int, tmp_path: Path) -> None:
    config = tiny_config(family)
    found = read_all(write_folder(tmp_path, config, SEED, shards))
    written = tiny_weights(config, SEED)
    assert len(found) == len(written)
    for ours, theirs in (
        ("embed.weight", "model.embed_tokens.weight"),
        ("head.weight", "lm_head.weight"),
        ("norm.weight", "model.norm.weight"),
        ("layers.2.attn.k.weight", "model.layers.2.self_attn.k_proj.weight"),
        ("layers.1.mlp.down.weight", "model.layers.1.mlp.down_proj.weight"),
        ("layers.0.mlp_norm.weight", "model.layers.0.post_attention_layernorm.weight"),
    ):
        np.testing.assert_array_equal(found[ours], written[theirs])
    assert sorted(t.tobytes() for t in found.values()) == sorted(t.tobytes() for t in written.values())


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_other_float_types_arrive_as_they_are_stored(dtype: type, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({n: t.astype(dtype) for n, t in tensors.items()}))
    assert {array.dtype for array in read_all(folder).values()} == {np.dtype(dtype)}


def test_a_tied_model_needs_no_head(tmp_path: Path) -> None:
    """Case M01; that the logits are right is tests/backends/torch/test_parity.py's to say."""
    path = write_folder(tmp_path, tiny_config("llama", tie_word_embeddings=True), SEED)
    assert model(path).spec.tied
    assert "head.weight" not in set(model(path).weights)
    assert model(path).notes == []


@pytest.mark.parametrize("differs", [False, True])
def test_a_tied_models_own_head_is_ignored_and_noted_where_it_differs(differs: bool, tmp_path: Path) -> None:
    """Case M02. Engines disagree, and we side with config.json; transformers 5 would take the other head."""
    path = write_folder(tmp_path, tiny_config("llama", tie_word_embeddings=True), SEED)
    expected = read_all(path)
    rewrite(path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + np.float32(differs)}))
    found = read_all(path)
    assert found.keys() == expected.keys()
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    assert [("tied" in note, "head" in note) for note in model(path).notes] == [(True, True)] * differs


def test_frequencies_that_old_checkpoints_store_are_not_needed(folder: Path) -> None:
    stale = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.zeros(8, np.float32)}
    rewrite(folder, lambda tensors: tensors.update(stale))
    assert len(read_all(folder)) == len(tiny_weights(tiny_config("llama", num_hidden_layers=1), SEED))


@pytest.mark.parametrize("stray", ["model.safetensors", "consolidated.safetensors"])
def test_only_files_that_the_index_names_are_read_and_others_are_reported(stray: str, sharded: Path) -> None:
    """Case M05."""
    expected = read_all(sharded)
    save_file({n: t + 1 for n, t in tiny_weights(tiny_config("qwen2"), SEED).items()}, sharded / stray)
    assert all(np.array_equal(array, expected[name]) for name, array in read_all(sharded).items())
    assert any(stray in note for note in model(sharded).notes)


def test_without_an_index_the_file_with_the_usual_name_is_read(folder: Path) -> None:
    expected = read_all(folder)
    save_file({"other": np.zeros(3)}, folder / "consolidated.safetensors")
    assert read_all(folder).keys() == expected.keys()
    assert any("consolidated.safetensors" in note for note in model(folder).notes)


# --- files that are refused -----------------------------------------------------------------------------------------


def test_an_absent_shard_is_named(sharded: Path) -> None:
    """Case M04."""
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors.*missing"):
        model(sharded).weights  # noqa: B018


def test_several_files_without_an_index_are_refused(sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelError, match=r"no model\.safetensors\.index\.json"):
        model(sharded).weights  # noqa: B018


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "weights.pth"])
def test_pickled_weights_are_refused_unopened(name: str, folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / name).write_bytes(b"cos\nsystem\n(S'touch pickle-was-run'\ntR.")
    with pytest.raises(ModelError, match=rf"pickled weights \({name}\).*convert"):
        model(folder).weights  # noqa: B018


def test_a_folder_without_weights_or_config_is_refused(folder: Path, tmp_path: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        model(folder).weights  # noqa: B018
    with pytest.raises(ModelError, match=r"no config\.json"):
        model(tmp_path).config  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/etc/secret.safetensors",
        "sub/model.safetensors",
        "..",
        "",
        "model.bin",
        None,
        7,
        [],
        {},
    ],
)
def test_an_index_can_name_nothing_but_weight_files_of_its_folder(name: Any, sharded: Path) -> None:
    index = sharded / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["model.norm.weight"] = name
    index.write_text(json.dumps(content))
    save_file({"model.norm.weight": np.zeros(64, np.float32)}, sharded.parent / "secret.safetensors")
    with pytest.raises(ModelError, match=r"not the name of a \.safetensors file in this folder"):
        model(sharded).weights  # noqa: B018


@pytest.mark.parametrize(
    "content", ["", "{", "[]", "null", "{}", '{"weight_map": 5}', '{"weight_map": []}', "[" * 100_000, "\xff"]
)
def test_a_damaged_index_is_refused(content: str, sharded: Path) -> None:
    (sharded / "model.safetensors.index.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=r"model\.safetensors\.index\.json"):
        model(sharded).weights  # noqa: B018


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json", "config.json"])
def test_a_folder_in_a_files_place_is_refused(name: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    (folder / name).mkdir()
    with pytest.raises(ModelError, match=name):
        model(folder).weights  # noqa: B018


NORM = "model.layers.0.input_layernorm.weight"


def test_a_missing_tensor_is_named(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.__delitem__(NORM))
    with pytest.raises(ModelError, match=r"lacks 'layers\.0\.attn_norm\.weight'"):
        model(folder).weights  # noqa: B018


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.bias",
        "model.layers.1.input_layernorm.weight",
        "model.layers.0.mlp.experts.weight",
        "model.layers.0",
        "model.layers.",
        "layers.weight",
        "extra",
    ],
)
def test_an_unknown_tensor_is_named(name: str, folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({name: np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match=f"unknown.*{name}"):
        model(folder).weights  # noqa: B018


def test_a_misshapen_tensor_is_named_with_both_shapes(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({NORM: np.zeros(65, np.float32)}))
    with pytest.raises(ModelError, match=rf"{NORM}' has the shape \[65\].*\[64\]"):
        model(folder).weights  # noqa: B018


def test_a_tensor_under_two_names_is_refused(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors.update({"norm.weight": np.zeros(64, np.float32)}))
    with pytest.raises(ModelError, match=r"twice.*model\.norm\.weight"):
        model(folder).weights  # noqa: B018


def test_a_tensor_in_two_files_is_refused(sharded: Path) -> None:
    norm = {"model.norm.weight": np.zeros(64, np.float32)}
    rewrite(sharded, lambda tensors: tensors.update(norm), "model-00001-of-00003.safetensors")
    with pytest.raises(ModelError, match=r"'model\.norm\.weight' is in another file too"):
        model(sharded).weights  # noqa: B018


# --- safetensors, byte by byte --------------------------------------------------------------------------------------


def safetensors_file(path: Path, header: bytes, data: bytes = bytes(8)) -> Path:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)
    return path


def test_a_name_that_occurs_twice_in_a_header_is_refused(tmp_path: Path) -> None:
    """Case M13: the safetensors library takes the last one silently."""
    entry = b'{"dtype":"%s","shape":[2],"data_offsets":[0,8]}'
    header = b'{"a":' + entry % b"F32" + b',"a":' + entry % b"I32" + b"}"
    path = safetensors_file(tmp_path / "model.safetensors", header)
    assert load_file(path)["a"].dtype == np.int32
    with pytest.raises(ModelError, match=r"model\.safetensors.*'a' twice"):
        read_safetensors([path])


@pytest.mark.parametrize("length", [100, 99_999, 100_000, 100_001])
def test_headers_of_any_size_are_read(length: int, tmp_path: Path) -> None:
    """Case M14."""
    header = b'{"__metadata__":{},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'.ljust(length)
    path = safetensors_file(tmp_path / "model.safetensors", header, np.array([1, 2], np.float32).tobytes())
    tensors = read_safetensors([path])
    assert tensors.shapes == {"a": (2,)}
    assert tensors.load("a").tolist() == [1, 2]


@pytest.mark.parametrize(
    "header",
    [
        b"",
        b"[]",
        b"null",
        b"{",
        b"[" * 50_000,
        b'{"a": 1}',
        b'{"a": {}}',
        b'{"a": {"dtype": "F32", "shape": [2]}}',
        b'{"a": {"dtype": "F33", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [4294967296, 4294967296], "data_offsets": [0, 8]}}',
        b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}',
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"\xff": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}',
    ],
)
def test_a_header_that_does_not_describe_its_file_is_refused(header: bytes, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        read_safetensors([safetensors_file(tmp_path / "model.safetensors", header)])


def test_a_file_truncated_anywhere_is_refused_at_once(folder: Path) -> None:
    """No more is read or reserved than the file holds, whatever it claims."""
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    header = 8 + struct.unpack("<Q", whole[:8])[0]
    cuts = [*range(20), *range(20, header, 53), header - 1, header, header + 1, *range(header, len(whole), 9973)]
    started = time.perf_counter()
    for cut in [*cuts, len(whole) - 1]:
        file.write_bytes(whole[:cut])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            model(folder).weights  # noqa: B018
    for claimed in (len(whole), 2**31, 2**40, 2**63, 2**64 - 1):
        file.write_bytes(struct.pack("<Q", claimed) + whole[8:])
        with pytest.raises(ModelError, match=r"model\.safetensors.*damaged or truncated"):
            model(folder).weights  # noqa: B018
    assert time.perf_counter() - started < 10


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(flips=st.lists(st.tuples(st.integers(0, 1400), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_never_raises_anything_else(flips: list[tuple[int, int]], folder: Path) -> None:
    file = folder / "damaged.safetensors"
    content = bytearray((folder / "model.safetensors").read_bytes())
    for place, value in flips:
        content[place] = value
    file.write_bytes(content)
    with suppress(ModelError):
        tensors = read_safetensors([file])
        for name, shape in tensors.shapes.items():
            assert tuple(tensors.load(name).shape) == shape


# --- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_config_leaves_out_is_what_transformers_takes(family: str, tmp_path: Path) -> None:
    needed = ("model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    config = {name: tiny_config(family)[name] for name in needed} | {"hidden_size": 2048, "num_attention_heads": 32}
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs, ours = AutoConfig.from_pretrained(tmp_path), spec_of(config)
    attention = ours.layers[0].attention
    assert attention.kv_heads == theirs.num_key_value_heads
    assert attention.head_dim == getattr(theirs, "head_dim", 2048 // 32)
    assert attention.rope.theta == theirs.rope_parameters["rope_theta"]
    assert attention.window == getattr(theirs, "sliding_window", None)
    assert ours.norm.eps == theirs.rms_norm_eps
    assert ours.max_model_len == theirs.max_position_embeddings
    assert ours.tied == theirs.tie_word_embeddings


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_a_window_that_is_not_used_means_nothing(family: str) -> None:
    """Case M11."""
    spec = spec_of(tiny_config(family, use_sliding_window=False, sliding_window=8, max_window_layers=0))
    assert {layer.attention.window for layer in spec.layers} == {None}
    with pytest.raises(ModelError, match="use_sliding_window=true, but sliding_window is missing"):
        spec_of(tiny_config(family, use_sliding_window=True, sliding_window=None))


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALINGS: list[dict[str, Any] | None] = [
    None,
    {"type": "linear", "factor": 2.0},
    {"rope_type": "linear", "factor": 3.7},
    {"type": "linear", "rope_type": "linear", "factor": 8},
    {"rope_type": "llama3", **LLAMA3},
    {"type": "llama3", **LLAMA3},
    {"rope_type": "llama3", **LLAMA3, "factor": 32.0, "high_freq_factor": 8.0},
    {"rope_type": "default"},
    {"rope_type": "yarn", "factor": 2.0},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "beta_fast": 20, "beta_slow": 2},
    {"type": "yarn", "factor": 16.0, "original_max_position_embeddings": 8192, "truncate": False},
    {"rope_type": "dynamic", "factor": 2.0},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=str)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize(("dim", "theta"), [(16, 1e4), (64, 1e5), (128, 5e5)])
def test_frequencies_are_those_of_transformers(
    scaling: dict[str, Any] | None, spelling: str, dim: int, theta: float, tmp_path: Path
) -> None:
    """Case M07; two parts in a million are left to the last bits of two libraries' float32 powers."""
    config = tiny_config("llama", head_dim=dim, rope_theta=theta, max_position_embeddings=131_072)
    if spelling == "rope_parameters":
        config["rope_parameters"] = {"rope_theta": config.pop("rope_theta"), **(scaling or {"rope_type": "default"})}
    else:
        config["rope_scaling"] = scaling
    (tmp_path / "config.json").write_text(json.dumps(config))
    theirs = LlamaRotaryEmbedding(AutoConfig.from_pretrained(tmp_path)).inv_freq.numpy()
    ours = spec_of(config).layers[0].attention.rope.inverse_frequencies(131_072)
    np.testing.assert_allclose(ours, theirs, rtol=2e-6)


@pytest.mark.parametrize(
    ("scaling", "named"),
    [
        ({"rope_type": "dynamic"}, "lacks 'factor'"),
        ({"type": "longrope", "factor": 2.0}, "lacks the list 'short_factor'"),
        ({"type": "su", "short_factor": [1.0]}, "1 factors for 8 pairs"),
        ({"type": "yarn", "factor": 2.0, "beta_fast": -1}, "beta_fast=-1"),
        ({"type": "yarn", "factor": 2.0, "truncate": 1}, "truncate=1"),
        ({"type": "yarn", "factor": 2.0, "rope_theta": 1.0}, "make no frequencies"),
        ({"rope_type": "lineal", "factor": 2.0}, "did you mean 'linear'"),
        ({"type": "linear", "rope_type": "llama3", **LLAMA3}, "two kinds"),
        ({"type": "linear"}, "lacks 'factor'"),
        ({"type": "linear", "factor": 0}, "factor=0"),
        ({"type": "linear", "factor": "2"}, "factor='2'"),
        ({"type": []}, r"\[\]"),
        *(({"rope_type": "llama3", **LLAMA3, name: None}, f"lacks '{name}'") for name in LLAMA3),
        ({"rope_type": "llama3", **LLAMA3, "high_freq_factor": 1.0}, "high_freq_factor=1.0"),
        ({"rope_type": "default", "partial_rotary_factor": 0.05}, "not 0"),
        ({"rope_type": "default", "partial_rotary_factor": 1.5}, "not 24"),
        ({"full_attention": {"rope_type": "default", "rope_theta": 1e4}}, "one kind for all layers"),
        ("linear", "'linear'"),
        ([1], r"\[1\]"),
    ],
)
@pytest.mark.parametrize("spelling", ["rope_scaling", "rope_parameters"])
def test_a_rope_scaling_that_is_not_understood_is_named(scaling: Any, named: str, spelling: str) -> None:
    """Cases M07 and M08."""
    with pytest.raises(ModelError, match=named):
        spec_of(tiny_config("llama", **{spelling: scaling}))


REQUIRED = ["vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", REQUIRED)
def test_a_missing_field_is_named(family: str, name: str) -> None:
    config = tiny_config(family)
    del config[name]
    with pytest.raises(ModelError, match=f"{name}=None"):
        spec_of(config)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *((name, [0, -1, 1.5, "64", True, [64], {}]) for name in [*REQUIRED, "num_key_value_heads", "head_dim"]),
        ("head_dim", [15]),
        ("num_key_value_heads", [3, 8]),
        ("num_hidden_layers", [10**9]),
        ("max_position_embeddings", [0, "256", 1e3]),
        ("rms_norm_eps", [0, -1e-5, "1e-5", float("nan"), float("inf"), True, []]),
        ("rope_theta", [0, "10000", float("inf"), {}]),
        ("sliding_window", [0, "16", 1.0]),
        ("layer_types", ["sliding_attention", ["sliding_attention"], ["sliding"] * 3, [[]] * 3, 3]),
        ("max_window_layers", [-1, "1", 1.5]),
        ("hidden_act", ["geluu", 5, []]),
        ("tie_word_embeddings", ["false", 1]),
        ("attention_bias", ["false", 1]),
        ("use_sliding_window", ["false", 0]),
    ],
)
def test_a_field_of_the_wrong_kind_is_named(name: str, values: list[Any]) -> None:
    for value in values:
        config = tiny_config("qwen3", use_sliding_window=True, sliding_window=16, max_window_layers=0) | {name: value}
        with pytest.raises(ModelError, match=f"{name}"):
            spec_of(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [("lama", "'lama' is not supported .did you mean 'llama'"), (None, "None"), (["llama"], "llama"), ({}, "{}")],
)
def test_an_unknown_model_type_is_named(name: Any, message: str, folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(tiny_config("llama") | {"model_type": name}))
    with pytest.raises(ModelError, match=f"model_type.*{message}.*qwen3"):
        model(folder).spec  # noqa: B018


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "7", "[" * 100_000, "\xff{}"])
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_json_that_is_not_an_object_is_refused(name: str, content: str, folder: Path) -> None:
    (folder / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelError, match=name):
        model(folder).eos_token_ids  # noqa: B018


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["rope_type", "factor"]), inner),
    max_leaves=5,
)


@settings(max_examples=200)
@given(family=st.sampled_from(FAMILIES), data=st.data())
def test_no_value_of_any_field_raises_anything_else(family: str, data: st.DataObject) -> None:
    fields = [*tiny_config(family), "rope_scaling", "rope_parameters", "layer_types", "max_window_layers"]
    name = data.draw(st.sampled_from([field for field in fields if field != "model_type"]))
    try:
        spec = spec_of(tiny_config(family) | {name: data.draw(JSON)})
    except ModelError:
        return
    assert torch.isfinite(torch.from_numpy(spec.layers[0].attention.rope.inverse_frequencies(131_072))).all()


def test_a_tensor_of_several_parts_is_read_once_for_all_of_them(tmp_path: Path) -> None:
    write_reference(tmp_path, shape("phi3", "usual"), seed=1)
    found = Model("phi3", lambda: tmp_path, xinfer_model_families()).weights
    read: list[str] = []
    load, found._load = found._load, lambda name: read.append(name) or load(name)
    for name in found:
        found.load(name)
    assert len(read) == len(set(read))
    assert "model.layers.0.self_attn.qkv_proj.weight" in read
