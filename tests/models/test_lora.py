"""Weights with an adapter are those that PEFT merges, whatever the family and the format of the base."""

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from xinfer import LLM
from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.composing import compose
from xinfer.engine.batch import make_batch
from xinfer.engine.types import Limits, Request, SamplingParams
from xinfer.engine.types import Sequence as Tokens
from xinfer.errors import ConfigError, ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.families.llama import NAMES
from xinfer.models.lora.adapter import Adapter, find_adapter
from xinfer.models.lora.config import parse_lora
from xinfer.models.model import Model
from xinfer.plugins import load_plugins
from xinfer.session import Session
from xinfer.testing.reference import reference_logits, write_reference
from xinfer.testing.shapes import shape
from xinfer.testing.tiny import tiny_config, write_folder, write_gguf

SEED = 5
ATOL = 2e-6  # of weights around 1: a product of a few ranks, added up in another order


def model(path: Path, adapter: Path | None = None, scale: float = 1.0, **options: Any) -> Model:
    found = None if adapter is None else lambda: Adapter(adapter, scale)
    return Model(str(path), lambda: path, xinfer_model_families(), adapter=found, **options)


def read_all(found: Model) -> dict[str, Tensor]:
    return {name: found.weights.load(name) for name in found.weights}


def make(base: Any, folder: Path, **wanted: Any) -> Any:
    """Save an adapter with random weights as PEFT does, and return PEFT's model of it."""
    from peft import LoraConfig, get_peft_model

    generator = torch.Generator().manual_seed(SEED)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = get_peft_model(base, LoraConfig(**{"r": 4, "lora_alpha": 6, **wanted}))
        for name, parameter in adapted.named_parameters():
            if "magnitude" in name:
                parameter.data *= torch.empty_like(parameter).uniform_(0.5, 2, generator=generator)
            elif parameter.requires_grad:
                parameter.data.normal_(0, 0.3, generator=generator)
        adapted.save_pretrained(folder)
    return adapted


def merged(adapted: Any, base: Path, folder: Path) -> Path:
    """Write what PEFT merges as a model folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted.merge_and_unload().save_pretrained(folder)
    shutil.copy(base / "config.json", folder / "config.json")
    return folder


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=ATOL, rtol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
CASES = {
    "llama": ("llama", "llama3", {"target_modules": [*ATTENTION, "gate_proj", "up_proj", "down_proj"]}),
    "rslora": ("llama", "llama3", {"target_modules": ["q_proj"], "use_rslora": True}),
    "patterns": (
        "llama",
        "llama3",
        {
            "target_modules": [*ATTENTION, "down_proj"],
            "rank_pattern": {"q_proj": 2, r"model\.layers.1.self_attn.v_proj": 7, "^model.layers.0.mlp.down_proj": 3},
            "alpha_pattern": {"k_proj": 11, "layers.2.self_attn.v_proj": 5, r".*\.o_proj": -1},
        },
    ),
    "some layers": ("llama", "llama3", {"target_modules": ["q_proj"], "layers_to_transform": [1]}),
    "bias": ("llama", "plain", {"target_modules": ["q_proj", "o_proj"], "lora_bias": True}),
    "biases": ("llama", "plain", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "all biases": ("llama", "plain", {"target_modules": ["q_proj"], "bias": "all"}),
    "embedding": ("llama", "plain", {"target_modules": ["embed_tokens", "q_proj", "lm_head"]}),
    "saved": ("llama", "plain", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head", "norm"]}),
    "tied": ("llama", "linear", {"target_modules": ["embed_tokens", "v_proj"]}),
    "tied, saved": (
        "llama",
        "linear",
        {"target_modules": ["v_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "fused": ("phi3", "usual", {"target_modules": ["qkv_proj", "gate_up_proj", "o_proj"]}),
    "transposed": ("gpt2", "usual", {"target_modules": ["c_attn", "c_proj", "c_fc"], "fan_in_fan_out": True}),
    "transposed, not said": ("gpt2", "wide", {"target_modules": ["c_attn"]}),
    "latent": ("deepseek_v3", "usual", {"target_modules": ["kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa"]}),
    "experts' attention": ("qwen3_moe", "usual", {"target_modules": ATTENTION}),
    "gemma": ("gemma2", "usual", {"target_modules": "all-linear"}),
    "dora": ("llama", "llama3", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
    "dora, fused": ("phi3", "usual", {"target_modules": ["qkv_proj", "gate_up_proj"], "use_dora": True}),
    "dora, transposed": ("gpt2", "usual", {"target_modules": ["c_attn", "c_fc"], "use_dora": True}),
    "dora, latent": ("deepseek_v3", "usual", {"target_modules": ["kv_b_proj"], "use_dora": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_weights_are_those_that_peft_merges(case: str, tmp_path: Path) -> None:
    family, kind, wanted = CASES[case]
    base = tmp_path / "base"
    adapted = make(write_reference(base, shape(family, kind), SEED), tmp_path / "adapter", **wanted)
    found, plain = read_all(model(base, tmp_path / "adapter")), read_all(model(base))
    same(found, read_all(model(merged(adapted, base, tmp_path / "merged"))))
    changed = [name for name in plain if not torch.equal(plain[name], found[name])]
    assert 0 < len(changed) < len(plain)


@pytest.mark.parametrize("case", ["tied", "fused", "dora, transposed"])
def test_logits_are_those_of_the_merged_model(case: str, tmp_path: Path) -> None:
    """Through the torch backend, which reads weights on several threads."""
    family, kind, wanted = CASES[case]
    base, ids = tmp_path / "base", list(range(3, 40))
    adapted = make(write_reference(base, shape(family, kind), SEED), tmp_path / "adapter", **wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = reference_logits(adapted.merge_and_unload(), ids)
    ours = logits(model(base, tmp_path / "adapter"), ids)
    torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert (ours - logits(model(base), ids)).abs().max() > 0.1


@torch.inference_mode()
def logits(found: Model, ids: list[int]) -> Tensor:
    """Return our logits at every position."""
    runner = TorchRunner(BackendContext(found, EagerConfig(device="cpu"), Limits(max_num_seqs=1)))
    sequence = Tokens(Request("r", 0, tuple(ids), SamplingParams(), 0), list(ids), limit=1 << 20)
    size = runner.info.block_size
    sequence.blocks.extend(range(len(ids) // size + 1))
    return runner.forward(make_batch([sequence], [len(ids)], [len(ids)], size))


# --- adapters by the formula, without PEFT --------------------------------------------------------------------------


def write_adapter(folder: Path, modules: dict[str, tuple[int, int]], rank: int = 3, **config: Any) -> dict[str, Tensor]:
    """Write an adapter of [out, in] modules, and return the product B @ A of each."""
    folder.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(SEED)
    tensors, products = {}, {}
    for module, (rows, columns) in modules.items():
        b, a = (torch.empty(size).normal_(0, 0.3, generator=generator) for size in ((rows, rank), (rank, columns)))
        tensors |= {f"base_model.model.{module}.lora_{part}.weight": t for part, t in (("A", a), ("B", b))}
        products[module] = b @ a
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 6, **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    return products


MODULES = {
    "model.layers.0.self_attn.q_proj": (64, 64),
    "model.layers.2.self_attn.k_proj": (32, 64),
    "model.layers.1.mlp.down_proj": (64, 128),
}
PLACES = ["layers.0.attn.q.weight", "layers.2.attn.k.weight", "layers.1.mlp.down.weight"]


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    return write_folder(tmp_path / "llama", tiny_config("llama"), SEED)


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    write_adapter(tmp_path / "adapter", MODULES)
    return tmp_path / "adapter"


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_gguf_file_takes_the_adapters_of_its_family(family: str, kind: str, tmp_path: Path) -> None:
    """Also llama's queries and keys, whose rows lie in another order in the file."""
    wide = 128 if family == "qwen3" else 64
    modules = {"model.layers.0.self_attn.q_proj": (wide, 64), "model.layers.1.mlp.up_proj": (128, 64)}
    products = write_adapter(tmp_path / "adapter", modules)
    file = write_gguf(tmp_path / "model.gguf", tiny_config(family), SEED, kind)
    plain, found = read_all(model(file)), read_all(model(file, tmp_path / "adapter"))
    for place, module in zip(("layers.0.attn.q.weight", "layers.1.mlp.up.weight"), modules, strict=True):
        plain[place] = plain[place].float() + 2 * products[module]
    same(found, plain)


def test_experts_that_an_adapter_changes_are_changed_alone(tmp_path: Path) -> None:
    base = tmp_path / "base"
    write_reference(base, shape("qwen3_moe", "usual"), SEED)
    modules = {f"model.layers.1.mlp.experts.{expert}.gate_proj": (40, 48) for expert in (0, 4)}
    products = write_adapter(tmp_path / "adapter", modules)
    plain, found = read_all(model(base)), read_all(model(base, tmp_path / "adapter"))
    for module, expert in zip(modules, (0, 4), strict=True):
        plain["layers.1.mlp.experts.gate.weight"][expert] += 2 * products[module]
    same(found, plain)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rank=st.integers(1, 9),
    alpha=st.integers(-40, 40) | st.floats(-4, 4),
    scale=st.floats(-3, 3),
    root=st.booleans(),
)
def test_what_is_added_is_scale_times_alpha_over_rank_times_the_product(
    rank: int, alpha: float, scale: float, root: bool, llama: Path, tmp_path: Path
) -> None:
    products = write_adapter(tmp_path / "adapter", MODULES, rank, lora_alpha=alpha, use_rslora=root)
    plain, weights = read_all(model(llama)), model(llama, tmp_path / "adapter", scale).weights
    factor = scale * alpha / (rank**0.5 if root else rank)
    for place, product in zip(PLACES, products.values(), strict=True):
        expected = plain[place].double() + factor * product.double()
        torch.testing.assert_close(weights.load(place).double(), expected, atol=3e-6 * (1 + abs(factor)), rtol=1e-5)


@pytest.mark.parametrize("dora", [False, True])
def test_a_scale_of_zero_is_the_model_bit_for_bit(dora: bool, tmp_path: Path) -> None:
    base = tmp_path / "base"
    wanted = {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"], "use_dora": dora}
    make(write_reference(base, shape("llama", "plain"), SEED), tmp_path / "adapter", **wanted)
    plain, found = read_all(model(base)), read_all(model(base, tmp_path / "adapter", 0.0))
    assert all(torch.equal(plain[name], found[name]) and plain[name].dtype == found[name].dtype for name in plain)


@pytest.mark.parametrize("dora", [False, True])
def test_a_scale_says_how_far_to_go(dora: bool, tmp_path: Path) -> None:
    """Also for what is replaced and for DoRA: a point on the line through the model and the adapted one."""
    base = tmp_path / "base"
    wanted = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"], "use_dora": dora}
    make(write_reference(base, shape("llama", "plain"), SEED), tmp_path / "adapter", **wanted)
    plain, whole = read_all(model(base)), read_all(model(base, tmp_path / "adapter"))
    for scale in (0.25, 0.5, 2.0, -1.0):
        expected = {name: plain[name] + scale * (whole[name] - plain[name]) for name in plain}
        found = read_all(model(base, tmp_path / "adapter", scale))
        for name in found:
            torch.testing.assert_close(found[name], expected[name], atol=1e-5, rtol=1e-5)


def test_one_adapter_undoes_itself(llama: Path, adapter: Path, tmp_path: Path) -> None:
    """Merged with 1 and written, then merged with -1, a model is what it was, up to rounding."""
    tensors = load_file(llama / "model.safetensors")
    there = model(llama, adapter).weights
    for place, module in zip(PLACES, MODULES, strict=True):
        tensors[f"{module}.weight"] = there.load(place)
    (again := tmp_path / "again").mkdir()
    shutil.copy(llama / "config.json", again)
    save_file(tensors, again / "model.safetensors")
    same(read_all(model(again, adapter, -1.0)), read_all(model(llama)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_what_is_changed_keeps_every_digit_and_the_rest_its_type(
    dtype: torch.dtype, llama: Path, adapter: Path
) -> None:
    tensors = {name: tensor.to(dtype) for name, tensor in load_file(llama / "model.safetensors").items()}
    save_file(tensors, llama / "model.safetensors")
    plain, found = read_all(model(llama)), read_all(model(llama, adapter))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {name for name in found if found[name].dtype != dtype or not torch.equal(found[name], plain[name])} == {
        *PLACES
    }
    assert {found[name].dtype for name in PLACES} == {wide}


def test_reading_leaves_the_file_alone_and_can_be_repeated(llama: Path, adapter: Path) -> None:
    before = (llama / "model.safetensors").read_bytes()
    weights = model(llama, adapter).weights
    assert all(torch.equal(weights.load(place), weights.load(place)) for place in PLACES)
    assert (llama / "model.safetensors").read_bytes() == before


def test_random_weights_take_an_adapter_too(llama: Path, adapter: Path) -> None:
    plain, found = (read_all(model(llama, a, load_format="dummy")) for a in (None, adapter))
    assert [name for name in plain if not torch.equal(plain[name], found[name])] == sorted(PLACES)


def test_a_saved_module_may_have_the_name_that_old_peft_gave_it(llama: Path, adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    norm = torch.full((64,), 3.0)
    save_file({"base_model.model.model.norm.modules_to_save.weight": norm}, file)
    assert torch.equal(model(llama, adapter).weights.load("norm.weight"), norm)


# --- what is refused ------------------------------------------------------------------------------------------------


CONFIGS: list[tuple[dict[str, Any], str]] = [
    *(({"peft_type": kind}, f"peft_type={kind!r} is not supported") for kind in ("IA3", "LOHA", "ADALORA", None, 3)),
    *(
        ({"init_lora_weights": kind}, f"init_lora_weights='{kind}' changes the base model")
        for kind in ("pissa", "pissa_niter_4", "olora", "corda", "loftq", "lora_ga")
    ),
    ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters="),
    ({"trainable_token_indices": [1]}, "trainable_token_indices="),
    ({"layer_replication": [[0, 2]]}, "layer_replication="),
    ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens="),
    ({"use_qalora": True}, "use_qalora=True is not supported"),
    ({"use_something_new": True}, "use_something_new=True is not supported: merge it with PEFT"),
    *(({"r": value}, "r=") for value in (0, -1, 1.5, "3", True, None, [])),
    *(({"lora_alpha": value}, "lora_alpha=") for value in ("3", True, None, float("nan"), float("inf"), 10**400)),
    ({"use_rslora": "yes"}, "use_rslora='yes'"),
    ({"rank_pattern": ["q_proj"]}, "rank_pattern="),
    ({"rank_pattern": {"q_proj": 0}}, "rank_pattern['q_proj']=0"),
    ({"alpha_pattern": {"q_proj": "x"}}, "alpha_pattern['q_proj']='x'"),
    *(
        ({"alpha_pattern": {key: 1}}, "alpha_pattern has")
        for key in ("(", "(a+)+$", "(.*)*", ".*.*.*x", "a{1,99}", "[")
    ),
    ({"r": 4}, "'model.layers.0.self_attn.q_proj' has lora_A [3, 64] and lora_B [64, 3]"),
    ({"rank_pattern": {"k_proj": 5}}, "'model.layers.2.self_attn.k_proj'"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIGS, ids=[str(changes)[:60] for changes, _ in CONFIGS])
def test_a_setting_that_is_not_understood_is_named(changes: dict[str, Any], message: str, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
    with pytest.raises(ModelError) as caught:
        Adapter(adapter)
    assert message in str(caught.value) and str(adapter) in str(caught.value)
    assert "\n" not in str(caught.value)


Q = "base_model.model.model.layers.0.self_attn.q_proj"
A, B = f"{Q}.lora_A.weight", f"{Q}.lora_B.weight"
E = "base_model.model.model.embed_tokens"
LAYER = "base_model.model.model.layers"
ONES = torch.ones

FILES: list[tuple[dict[str, Tensor | None], str]] = [
    ({A: None}, "needs both lora_A and lora_B"),
    ({A: ONES(3)}, "don't fit its rank"),
    ({A: ONES(3, 63)}, "'model.layers.0.self_attn.q_proj.weight' has the shape [64, 63], but"),
    ({f"{LAYER}.0.self_attn.qq_proj.lora_{p}.weight": ONES(3, 3) for p in "AB"}, "layers.0.self_attn.qq_proj.weight"),
    ({f"{LAYER}.7.self_attn.q_proj.lora_{p}.weight": ONES(3, 3) for p in "AB"}, "layers.7.self_attn.q_proj.weight"),
    ({f"{LAYER}.0.mlp.experts.lora_{p}.weight": ONES(3, 3) for p in "AB"}, "layers.0.mlp.experts.weight"),
    ({f"{LAYER}.0.input_layernorm.lora_{p}.weight": ONES(3, 3) for p in "AB"}, "input_layernorm.weight' has the shape"),
    ({f"{LAYER}.0.self_attn.q_proj.bias": ONES(64)}, "layers.0.self_attn.q_proj.bias"),
    ({f"{Q}.lora_B.bias": ONES(64)}, "layers.0.self_attn.q_proj.bias"),
    ({f"{Q}.lora_B.bias": ONES(63)}, "can't be merged"),
    ({f"{Q}.lora_magnitude_vector": ONES(1, 64)}, "can't be merged"),
    ({f"{E}.weight": ONES(280, 64)}, "'model.embed_tokens.weight' has the shape [280, 64]"),
    (
        {
            f"{E}.lora_embedding_A": ONES(3, 272),
            f"{E}.lora_embedding_B": ONES(64, 3),
            f"{E}.lora_magnitude_vector": ONES(64),
        },
        "DoRA and biases on embeddings are not supported",
    ),
    ({f"{E}.token_adapter.trainable_tokens_delta": ONES(2, 64)}, "is not one of a LoRA"),
    ({A.removeprefix("base_model.model."): ONES(3, 64)}, "is not one of a LoRA"),
    ({f"{Q}.hada_w1_a": ONES(3, 64)}, "is not one of a LoRA"),
    ({f"base_model.model.{'x' * 300}.weight": ONES(2)}, "is not one of a LoRA"),
]


@pytest.mark.parametrize(("changes", "message"), FILES, ids=[message[:40] for _, message in FILES])
def test_what_does_not_fit_the_model_is_named(
    changes: dict[str, Tensor | None], message: str, llama: Path, adapter: Path
) -> None:
    file = adapter / "adapter_model.safetensors"
    tensors = {name: t for name, t in (load_file(file) | changes).items() if t is not None}
    save_file(tensors, file)
    with pytest.raises(ModelError) as caught:
        model(llama, adapter).weights  # noqa: B018
    assert message in str(caught.value) and "adapter_model.safetensors" in str(caught.value)


TIED = ("llama", "linear")
PARTED: list[dict[str, Any]] = [
    {"target_modules": ["lm_head"]},
    {"target_modules": ["embed_tokens", "lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
]


@pytest.mark.parametrize("wanted", PARTED, ids=str)
def test_an_adapter_may_not_part_a_tied_models_head_from_its_embedding(wanted: dict[str, Any], tmp_path: Path) -> None:
    base = tmp_path / "base"
    make(write_reference(base, shape(*TIED), SEED), tmp_path / "adapter", **wanted)
    with pytest.raises(ModelError, match="a model whose head is its embedding"):
        model(base, tmp_path / "adapter").weights  # noqa: B018


def test_a_change_of_both_that_peft_kept_alike_counts_once(tmp_path: Path) -> None:
    base = tmp_path / "base"
    wanted = {"target_modules": ["embed_tokens"], "ensure_weight_tying": True}
    make(write_reference(base, shape(*TIED), SEED), tmp_path / "adapter", **wanted)
    stored = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    name = "base_model.model.model.embed_tokens"
    product = stored[f"{name}.lora_embedding_B"] @ stored[f"{name}.lora_embedding_A"]
    assert "base_model.model.lm_head.lora_A.weight" in stored
    plain, found = read_all(model(base)), read_all(model(base, tmp_path / "adapter"))
    same(found, {**plain, "embed.weight": plain["embed.weight"] + 6 / 4 * product.T})


def test_pickles_are_refused_unopened(adapter: Path) -> None:
    (adapter / "adapter_model.safetensors").rename(adapter / "adapter_model.bin")
    with pytest.raises(ModelError, match=r"adapter_model\.bin, a pickle"):
        Adapter(adapter)


def test_a_folder_without_an_adapter_is_refused(llama: Path, adapter: Path) -> None:
    with pytest.raises(ModelError, match=r"no adapter_config\.json"):
        Adapter(llama)
    save_file({}, adapter / "adapter_model.safetensors")
    with pytest.raises(ModelError, match="changes nothing"):
        Adapter(adapter)
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no adapter_model\.safetensors"):
        Adapter(adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(ModelError, match="a JSON object"):
        Adapter(adapter)


def test_a_damaged_file_is_refused(adapter: Path) -> None:
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ModelError, match=r"adapter_model\.safetensors: damaged"):
        Adapter(adapter)


# --- how it is asked for, and what is told --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("folder", ("folder", 1.0)),
        ("folder:0.5", ("folder", 0.5)),
        ("folder:-1", ("folder", -1.0)),
        ("folder:.5e1", ("folder", 5.0)),
        ("a:b/c:2:0", ("a:b/c:2", 0.0)),
        ("a:b/c", ("a:b/c", 1.0)),
        (r"C:\lora", (r"C:\lora", 1.0)),
        (r"C:\lora:2", (r"C:\lora", 2.0)),
        ("folder:nan", ("folder:nan", 1.0)),
        ("folder:", ("folder:", 1.0)),
        ("hf:org/name@v1:0.25", ("hf:org/name@v1", 0.25)),
        ("hf:org/name", ("hf:org/name", 1.0)),
    ],
)
def test_only_a_number_at_the_end_is_a_scale(text: str, expected: tuple[str, float]) -> None:
    assert parse_lora(text) == expected


def test_a_folder_may_have_a_colon_in_its_name(adapter: Path) -> None:
    place = adapter.rename(adapter.parent / "v:a")
    assert find_adapter(str(place))().scale == 1
    assert find_adapter(f"{place}:0.5")().folder == place


def test_what_is_not_there_is_said_with_its_form() -> None:
    with pytest.raises(ModelError, match=r"model\.lora='/no/such': no such folder.*:NUMBER"):
        find_adapter("/no/such:2")()
    with pytest.raises(ConfigError, match="1e999 is out of range"):
        find_adapter("folder:1e999")


@pytest.mark.parametrize(
    ("base", "reference", "noted"),
    [
        (None, "models/x", False),
        ("org/Name", "models/name/", False),
        ("org/Name", "hf:org/Name@v1", False),
        ("org/Name", "models/Name-Q8_0.gguf", False),
        ("org/Name", "models/Name-Base", True),
        ("C:\\models\\Name", "name", False),
        ("org/Other", "hf:org/Name", True),
    ],
)
def test_an_adapter_of_another_model_is_noted(base: str | None, reference: str, noted: bool, adapter: Path) -> None:
    file = adapter / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": base}))
    assert any("was made for" in note for note in Adapter(adapter).notes(reference, NAMES.find)) == noted


def test_notes_tell_of_what_was_merged(llama: Path, adapter: Path) -> None:
    assert any("merged: 3 tensors" in note and "scale 0.5" in note for note in model(llama, adapter, 0.5).notes)


def test_what_is_of_no_text_part_is_left_out_and_noted(llama: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path / "adapter", {**MODULES, "model.vision_tower.layers.0.q_proj": (9, 9)})
    found = model(llama, tmp_path / "adapter")
    assert any("1 of the adapter's, as model.vision_tower.layers.0.q_proj.weight" in note for note in found.notes)
    assert len(read_all(found)) == len(read_all(model(llama)))


def test_a_tied_models_own_head_is_compared_with_the_files_embedding(tmp_path: Path) -> None:
    base = write_folder(tmp_path / "model", tiny_config("llama", tie_word_embeddings=True), SEED)
    tensors = load_file(base / "model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, base / "model.safetensors")
    write_adapter(tmp_path / "adapter", {"model.embed_tokens": (272, 64)})
    found = model(base, tmp_path / "adapter")
    assert not torch.equal(found.weights.load("embed.weight"), tensors["model.embed_tokens.weight"])
    assert not any("the file's other head" in note for note in found.notes)


def test_the_draft_model_has_no_adapter(llama: Path, adapter: Path) -> None:
    plugins = load_plugins()
    config = compose([f"model.reference={llama}", f"model.lora={adapter}", "model=custom"], plugins)
    session = Session(config, plugins)
    assert session.model.adapter is not None
    assert session._model(str(llama)).adapter is None


def test_a_backend_without_the_models_weights_refuses_an_adapter(fake_backend: Any, adapter: Path) -> None:
    fake_backend()
    with pytest.raises(ConfigError, match=r"model\.lora=.*backend fake"):
        LLM(backend="fake", overrides=[f"model.lora={adapter}"])


def test_a_run_is_recorded_with_its_adapter(xinfer: Any, llama: Path, adapter: Path, tmp_path: Path) -> None:
    words = ["--model", str(llama), "--prompt", "the", "--temperature", "0", "--max-tokens", "8", "--no-chat"]
    texts, records = [], []
    for scale in ("", ":0"):
        run = tmp_path / f"run{scale[1:]}"
        done = xinfer(*words, f"model.lora={adapter}{scale}", f"hydra.run.dir={run}")
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout.strip())
        records.append(json.loads((run / "run.json").read_text()))
    for record, scale in zip(records, (1.0, 0.0), strict=True):
        assert record["model"]["adapter"] == {"path": str(adapter), "scale": scale}
        assert any(f"{adapter} merged" in note for note in record["model"]["notes"])
    one, other = (record["hashes"] for record in records)
    assert one["weights"] == other["weights"] and one["adapter"] != other["adapter"]
    greedy = SamplingParams(temperature=0, max_tokens=8)
    for text, overrides in zip(texts, ([f"model.lora={adapter}"], []), strict=True):
        with LLM(llama, overrides=overrides) as llm:
            assert llm.generate("the", greedy)[0].outputs[0].text.strip() == text
    assert texts[0] != texts[1]


def test_a_wrong_adapter_is_one_line_before_weights_are_read(xinfer: Any, llama: Path, tmp_path: Path) -> None:
    done = xinfer("--model", str(llama), f"model.lora={llama}", "--prompt", "x")
    assert done.returncode == 2
    assert len(done.stderr.strip().splitlines()) == 1 and "no adapter_config.json" in done.stderr
    assert not list((tmp_path / "outputs").rglob("*.json*"))
