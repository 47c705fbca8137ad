"""`backend.kv_dtype=int8`: the cache is a quarter, and a model computes nearly what it does with a cache in float32.

The operator itself is held to exactly what the codes in its cache stand for, with windows, sinks and caps. Whole models
are held to a bound for noise. With scales from the text that they compute, keys and values are off by about half a
127th of a channel's largest at most; over all shapes a token's logits are then off by 0.001 to 0.026 of their standard
deviation (the median of tokens), by up to 0.06 where experts are chosen, since another expert may be. A window that is
forgotten makes 0.3 to 0.9 of it in most shapes that have one.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from cases import SEED, Case, in_company, model_of
from torch import Tensor

from xinfer.backends import BackendContext
from xinfer.backends.onnx import OnnxConfig, calibrated, create, supports
from xinfer.backends.onnx.runner import OnnxRunner
from xinfer.engine.engine import Engine
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import ConfigError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme
from xinfer.models.quantize.text import sample_text
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper, cut
from xinfer.testing.tiny import tiny_config, write_folder

pytestmark = pytest.mark.usefixtures("one_thread")

ALL = [(family, name) for family, names in SHAPES.items() for name in names]
# A window, sinks with one, capped scores, latent attention, partly turned heads, pairs side by side, no turns at all,
# norms of queries and keys, heads of odd widths.
SOME = {
    ("mistral", "window"),
    ("gpt_oss", "usual"),
    ("gemma2", "usual"),
    ("deepseek_v3", "usual"),
    ("gpt_neox", "usual"),
    ("gptj", "usual"),
    ("gpt2", "usual"),
    ("qwen3", "usual"),
    ("llama", "linear"),
}
SLICE = [pytest.param(*each, marks=() if each in SOME else pytest.mark.slow, id="-".join(each)) for each in ALL]


# The operator


def operator(cache: ir.DataType, slots: int, **attributes: float) -> ort.InferenceSession:
    """Return a session of one operator: 4 query heads, 2 key heads of width 16, whose cache is of this precision."""

    def value(name: str, kind: ir.DataType, *shape: int | str) -> ir.Value:
        return ir.val(name, dtype=kind, shape=shape)

    real, whole = ir.DataType.FLOAT, ir.DataType.INT32
    new = [value(name, real, "rows", "tokens", width) for name, width in (("q", 64), ("k", 32), ("v", 32))]
    past = [value(f"past_{part}", cache, "rows", 2, slots, 16) for part in "kv"]
    sizes = [value("last", whole, "rows"), value("longest", whole, 1)]
    sinks, scales = value("sinks", real, 4), [value(f"scale_{part}", real, 32) for part in "kv"]
    given: list[ir.Value | None] = [*new, *past, *sizes, None, None, None, None]
    inputs = [*new, *past, *sizes]
    more: dict[str, float | str] = dict(attributes)
    if more.pop("sinks", 0):
        inputs.append(sinks)
        given.append(sinks)
    if cache == ir.DataType.INT8:
        given += [None] * (12 - len(given)) + scales
        inputs += scales
        more |= {"k_quant_type": "PER_CHANNEL", "v_quant_type": "PER_CHANNEL", "kv_cache_bit_width": 8}
    node = ir.node(
        "GroupQueryAttention",
        given,
        {"num_heads": 4, "kv_num_heads": 2, **more},
        domain="com.microsoft",
        num_outputs=3,
    )
    for output, name, kind in zip(node.outputs, ("out", "present_k", "present_v"), (real, cache, cache), strict=True):
        output.name, output.dtype = name, kind
    graph = ir.Graph(inputs, node.outputs, nodes=[node], opset_imports={"": 21, "com.microsoft": 1}, name="one")
    options = ort.SessionOptions()
    options.intra_op_num_threads = 1
    proto = ir.to_proto(ir.Model(graph, ir_version=10)).SerializeToString()
    return ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])


KINDS = {
    "plain": {},
    "window": {"local_window_size": 9},
    "sinks": {"sinks": 1},
    "capped": {"softcap": 2.0},
    "all": {"local_window_size": 9, "sinks": 1, "softcap": 2.0, "scale": 0.3},
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "contexts"), [(1, (300,)), (1, (1, 40, 7, 300)), (21, (21,)), (30, (30, 12)), (17, (290,))]
)
def test_the_operator_computes_what_its_codes_stand_for(kind: str, tokens: int, contexts: tuple[int, ...]) -> None:
    """Decode alone and together, whole prompts alone and padded, a piece of a prompt; the cache is left in place."""
    rng, slots, rows = np.random.default_rng(1), 300, len(contexts)
    scales = {f"scale_{part}": rng.uniform(0.005, 0.02, 32).astype(np.float32) for part in "kv"}
    codes = {f"past_{part}": rng.integers(-127, 128, (rows, 2, slots, 16), np.int8) for part in "kv"}
    real = {f"past_{part}": codes[f"past_{part}"] * scales[f"scale_{part}"].reshape(2, 1, 16) for part in "kv"}
    new = {
        part: rng.integers(-127, 128, (rows, tokens, 32)).astype(np.float32) * scales[f"scale_{part}"] for part in "kv"
    }
    same = {
        **new,
        "q": rng.standard_normal((rows, tokens, 64)).astype(np.float32),
        "last": np.array(contexts, np.int32) - 1,
        "longest": np.array([max(contexts)], np.int32),
    } | ({"sinks": rng.standard_normal(4).astype(np.float32)} if KINDS[kind].get("sinks") else {})
    found = in_place(operator(ir.DataType.INT8, slots, **KINDS[kind]), same | scales, codes, slots)
    theirs = in_place(operator(ir.DataType.FLOAT, slots, **KINDS[kind]), same, real, slots)
    for row, context in enumerate(contexts):
        there = min(tokens, context)
        assert np.abs(found[row, :there] - theirs[row, :there]).max() <= 1e-5
        for part in "kv":
            kept = codes[f"past_{part}"][row, :, :context] * scales[f"scale_{part}"].reshape(2, 1, 16)
            assert np.abs(kept - real[f"past_{part}"][row, :, :context]).max() <= 1e-6


def in_place(session: ort.InferenceSession, feeds: dict, caches: dict, slots: int) -> np.ndarray:
    """Run with present caches where the past ones are."""
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for name, array in caches.items():
        place = ("cpu", 0, array.dtype.type, array.shape, array.ctypes.data)
        binding.bind_input(name, *place)
        binding.bind_output(name.replace("past", "present"), *place)
    binding.bind_output("out")
    session.run_with_iobinding(binding)
    return binding.copy_outputs_to_cpu()[-1]


# Models


def runner_of(model: Model, kv_dtype: str | None = "int8", **limits) -> OnnxRunner:
    config = OnnxConfig(device="cpu", threads=1, kv_dtype=kv_dtype)
    limits = {"max_model_len": 80, "max_num_seqs": 8, "max_num_batched_tokens": 512, "kv_memory": 64e6} | limits
    return OnnxRunner(BackendContext(model, config, Limits(**limits)))


@pytest.fixture
def familiar(monkeypatch: pytest.MonkeyPatch):
    """Calibrate on given tokens instead of the package's text: random models are not at home in that."""

    def take(prompts: list[list[int]]) -> None:
        texts = [np.array(prompt, np.int32) for prompt in prompts]
        monkeypatch.setattr(calibrated, "windows", lambda model, size, count: texts)

    return take


def stepped(runner: OnnxRunner, prompt: list[int], chunks: list[int], decoded: int) -> Tensor:
    """Return logits of a prompt in these pieces, the last tokens of it one by one."""
    stepper = Stepper(runner)
    sequence = stepper.start(prompt)
    return torch.cat([stepper.step([sequence], [count])[0] for count in [*chunks, *[1] * decoded]])


@pytest.mark.parametrize(("family", "name"), SLICE)
def test_logits_are_nearly_those_with_a_cache_in_float32(family: str, name: str, tmp_path: Path, familiar) -> None:
    case = Case(tmp_path, shape(family, name), SEED, write_reference, 80)
    prompt = case.prompt(64)
    familiar([prompt])
    chunks = cut(44, np.random.default_rng(1))
    ours, exact = (stepped(runner_of(model_of(case.folder), kind), prompt, chunks, 20) for kind in ("int8", None))
    chooses = any(layer.mlp.experts is not None for layer in model_of(case.folder).spec.layers)
    off = (ours - exact).abs().mean(-1).median() / exact.std()
    assert 0 < off <= (0.08 if chooses else 0.03)


@pytest.mark.parametrize(("family", "name"), [("mistral", "window"), ("gemma2", "usual"), ("gpt_oss", "usual")])
def test_it_does_not_matter_who_shares_the_step(family: str, name: str, tmp_path: Path) -> None:
    case = Case(tmp_path, shape(family, name), SEED, write_reference, 80)
    model = model_of(case.folder)
    for sequence, logits in in_company(Stepper(runner_of(model)), case):
        alone = stepped(runner_of(model), sequence.token_ids, [sequence.num_computed], 0)
        assert (logits - alone).abs().mean() <= 1e-4 * alone.std()


def token_bytes(config: dict) -> int:
    """Of keys and values in int8."""
    return 2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config.get("head_dim", 16)


def test_the_cache_takes_a_quarter_and_holds_four_times_as_much(tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    model = model_of(write_folder(tmp_path / "m", config, seed=0))
    size = 4 * 40 * token_bytes(config)
    ours, exact = (runner_of(model, kind, kv_memory=size).info for kind in ("int8", None))
    assert exact.kv_token_bytes == 4 * ours.kv_token_bytes == 4 * token_bytes(config)
    assert (ours.kv_tokens, exact.kv_tokens) == (160, 40)
    assert ours.kv_cache_bytes == exact.kv_cache_bytes == size
    assert ours.notes == ("the KV cache is int8",)
    assert exact.notes == ()


def said(runner: OnnxRunner, limits: Limits, prompts: list[list[int]], n: int = 1) -> tuple[list[tuple[int, ...]], int]:
    """Return what the engine makes of prompts, greedily if it is one sample each, and tokens found in the cache."""
    engine = Engine(runner, None, limits)
    params = SamplingParams(n=n, max_tokens=12, temperature=float(n > 1), seed=1, ignore_eos=True)
    for prompt in prompts:
        engine.add_request(prompt, params)
    outputs, cached = {}, 0
    while engine.has_work:
        result = engine.step()
        cached += result.stats.cached_tokens
        outputs |= {(output.index, output.sample): output.token_ids for output in result.finished}
    return [outputs[key] for key in sorted(outputs)], cached


def test_prefixes_and_samples_are_copied_and_rows_change_places(tmp_path: Path) -> None:
    model = model_of(write_folder(tmp_path / "m", tiny_config("qwen3"), seed=0))
    common = np.random.default_rng(0).integers(0, 256, 48).tolist()
    asked = [common + [number] * (1 + number % 3) for number in range(7)]
    found = {}
    for cached in (True, False):
        limits = Limits(max_num_seqs=3, prefix_cache=cached)
        found[cached], hits = said(runner_of(model, max_num_seqs=3), limits, asked)
        assert (hits > 0) == cached
    assert found[True] == found[False]
    alone = [said(runner_of(model, max_num_seqs=1), Limits(max_num_seqs=1), [prompt])[0][0] for prompt in asked]
    assert found[False] == alone
    limits = Limits(max_num_seqs=4)
    samples, _ = said(runner_of(model, max_num_seqs=4), limits, asked[:1], n=4)
    assert len(set(samples)) == 4


# Scales


def test_scales_are_found_once_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "m", tiny_config("llama"), seed=0)
    opened: list[str] = []
    largest = calibrated._largest
    monkeypatch.setattr(calibrated, "_largest", lambda *given: opened.append("") or largest(*given))
    first = stepped(runner_of(model_of(folder)), [1, 2, 3, 4], [4], 0)
    assert torch.equal(stepped(runner_of(model_of(folder)), [1, 2, 3, 4], [4], 0), first)
    assert len(opened) == 1
    quantized = model_of(folder)
    quantized.quantization = Scheme(8)
    runner_of(quantized)
    assert len(opened) == 2  # of other weights
    for file in (tmp_path / "cache" / "onnx" / "weights").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    assert torch.equal(stepped(runner_of(model_of(folder)), [1, 2, 3, 4], [4], 0), first)
    assert len(opened) == 3


def test_dummies_leave_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "cache"))
    folder = write_folder(tmp_path / "m", tiny_config("llama"), seed=0)
    model = Model(str(folder), lambda: folder, xinfer_model_families(), dtype="float32", load_format="dummy")
    assert stepped(runner_of(model), [1, 2, 3], [2], 1).isfinite().all()
    assert not (tmp_path / "cache" / "onnx" / "weights").exists()


def test_turned_channels_have_room_for_any_position(tmp_path: Path) -> None:
    """The slowest pair hardly turns within the text, but far behind it one channel becomes the other."""
    model = model_of(write_folder(tmp_path / "m", tiny_config("llama", rope_theta=1e6), seed=0))
    rope = model.spec.layers[0].attention.rope
    assert rope is not None
    keys = np.zeros((1, 2, 5, 16), np.float32)
    keys[..., 3], keys[..., 11], keys[..., 4] = 3, -4, 2
    room = calibrated._turned(keys, rope, 1 << 20)
    assert (room[..., 3] == 5).all() and (room[..., 11] == 5).all() and (room[..., 4] == 2).all()
    beside = calibrated._turned(keys, replace(rope, interleaved=True, dim=8), 1 << 20)
    assert (beside[..., 2] == 3).all() and (beside[..., 3] == 3).all() and (beside[..., 11] == -4).all()


# Configuration


def test_other_precisions_and_devices_are_refused(tmp_path: Path) -> None:
    model = model_of(write_folder(tmp_path / "m", tiny_config("llama"), seed=0))
    assert supports(model.spec, OnnxConfig(device="cpu", kv_dtype="int8")) is None
    reason = supports(model.spec, OnnxConfig(device="cuda:1", kv_dtype="int8"))
    assert reason is not None and "backend.kv_dtype=int8 is for the CPU" in reason
    wrong = OnnxConfig(device="cpu", kv_dtype="int4")
    assert "none of null and int8" in (supports(model.spec, wrong) or "")
    with pytest.raises(ConfigError, match="kv_dtype=int4 is none of null and int8"):
        create(BackendContext(model, wrong, Limits()))


# The real model


def test_a_real_model_says_nearly_the_same(smollm2_path: Path) -> None:
    """Mean divergence from a cache in float32 on 384 tokens of the text, none of which scales were taken from."""
    models = [Model("smollm2", lambda: smollm2_path, xinfer_model_families(), dtype="float32") for _ in range(2)]
    tokens = models[0].tokenizer.encode(sample_text())[:384]
    ours, exact = (
        stepped(runner_of(model, kind, max_model_len=512, max_num_seqs=1), tokens, [256, 120], 8).log_softmax(-1)
        for model, kind in zip(models, ("int8", None), strict=True)
    )
    divergence = (exact.exp() * (exact - ours)).sum(-1)
    assert 0 < divergence.mean() <= 0.003
    assert (ours.argmax(-1) == exact.argmax(-1)).float().mean() >= 0.95
