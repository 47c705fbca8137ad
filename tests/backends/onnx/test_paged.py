"""The graph for CUDA computes what transformers computes, with ONNX Runtime's operators taken from their documentation.

No CUDA is at hand: operators are emulated (`emulated.py`), the runner, the graph and what is bound are the real ones.
Only in float32, which the emulation takes and CUDA's attention does not, can the two be compared closely.
"""

from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from emulated import PagedAttention, Session
from onnxruntime.capi import onnxruntime_pybind11_state as state

from xinfer.backends import BackendContext
from xinfer.backends.onnx import OnnxConfig, supports
from xinfer.backends.onnx.cached import graph_for
from xinfer.backends.onnx.cuda import CudaRunner, bucket
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.paged import BLOCK
from xinfer.backends.onnx.providers import CPU, CUDA, Choice
from xinfer.engine.batch import make_batch
from xinfer.engine.types import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.testing.reference import reference_logits, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-4
FAR = 3e-4  # at hundreds of tokens, where angles are larger
LATENT = ("deepseek_v3", "usual")
USUAL = [
    ("llama", "plain"),
    ("mistral", "window"),
    ("qwen3", "usual"),  # normalized queries and keys
    ("gemma2", "usual"),  # windows, capped scores and logits, norms by 1 + w
    ("cohere", "normed"),  # interleaved, layer norms of each head, parallel parts
    ("gpt2", "usual"),  # learned positions
    ("gpt_neox", "usual"),  # turns of a part of each head
    ("olmo", "clipped"),
    ("ministral3", "usual"),  # queries that grow
    LATENT,
]
ALL = [(family, name) for family, names in SHAPES.items() for name in names]


@pytest.fixture(autouse=True)
def graphs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Graphs are written anew."""
    monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "cache"))


class EmulatedRunner(CudaRunner):
    """Computes in `kind` on the CPU. What was never written to the cache is no number."""

    kind = torch.float32

    def __init__(self, context, options=None):
        super().__init__(context, Choice(torch.device("cpu"), [(CUDA, options or {}), (CPU, {})]))
        for tensor in self._cache.values():
            tensor.fill_(float("nan"))

    def _dtype(self, wanted):
        return self.kind

    def _session_of(self, path, settings, providers):
        self.providers = providers
        return Session(path)

    @property
    def graphs(self):
        return self._session.graphs


class HalfRunner(EmulatedRunner):
    kind = torch.float16


def config_of(family, name):
    dense = {"first_k_dense_replace": 99} if (family, name) == LATENT else {}
    return shape(family, name) | dense


def model_of(folder):
    return Model(str(folder), lambda: folder, xinfer_model_families())


def context_of(folder, **limits):
    given = {"max_num_seqs": 8, "max_logits_rows": 2048, "kv_memory": 2e7, "max_model_len": 700} | limits
    return BackendContext(model_of(folder), OnnxConfig(), Limits(**given))


def tokens(config, count, seed=0):
    return np.random.default_rng(seed).integers(0, config["vocab_size"], count).tolist()


@pytest.mark.parametrize(("family", "name"), USUAL)
def test_logits_are_those_of_the_reference(family, name, tmp_path):
    compare(family, name, tmp_path, 24, [17, 7], 4)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "name"), ALL)
def test_logits_of_every_shape_are_those_of_the_reference(family, name, tmp_path):
    compare(family, name, tmp_path, 48, [20, 28], 32)


def compare(family, name, tmp_path, prompt, chunks, steps):
    config = config_of(family, name)
    reference = write_reference(tmp_path / "model", config, seed=1)
    if (reason := supports(model_of(tmp_path / "model").spec, OnnxConfig("cuda"))) is not None:
        pytest.skip(reason)
    length = {"longrope": 80, "dynamic": 80}.get(name)
    runner = EmulatedRunner(context_of(tmp_path / "model", max_model_len=length))
    given = tokens(config, prompt)
    new, logits = Stepper(runner).greedy(given, chunks, steps)
    expected = reference_logits(reference, [*given, *new][: prompt + steps])
    assert (logits - expected).abs().max() < TOLERANCE
    assert runner.graphs == [-1] * len(chunks) + [2] * steps


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    """A folder, its config, and the reference's model."""
    folder = tmp_path_factory.mktemp("models") / "llama"
    config = shape("llama", "plain") | {"max_position_embeddings": 1024}
    return folder, config, write_reference(folder, config, seed=1)


def test_a_step_may_mix_prefill_and_decode_over_shuffled_blocks(llama):
    folder, config, reference = llama
    runner = EmulatedRunner(context_of(folder))
    steps = Stepper(runner, seed=3)
    texts = [tokens(config, 600, 1), tokens(config, 40, 2), tokens(config, 290, 3)]
    one, two, three = (steps.start(text) for text in texts)
    found = [[], [], []]
    for plan in ([300, 0, 0], [212, 30, 0], [87, 1, 200], [1, 1, 85], [0, 8, 5]):
        running = [(i, s) for i, s in enumerate((one, two, three)) if plan[i]]
        for (i, _), rows in zip(running, steps.step([s for _, s in running], [n for n in plan if n]), strict=True):
            found[i].append(rows)
    for text, rows in zip(texts, found, strict=True):
        assert (torch.cat(rows) - reference_logits(reference, text)).abs().max() < FAR
    assert one.blocks != sorted(one.blocks) or three.blocks != sorted(three.blocks)
    assert set(runner.graphs) == {-1}


def test_decoding_is_padded_to_captured_graphs_and_tells_long_contexts_apart(llama):
    folder, config, reference = llama
    runner = EmulatedRunner(context_of(folder))
    steps = Stepper(runner)
    texts = [tokens(config, 40, i) for i in range(5)] + [tokens(config, 520, 9)]
    running = [steps.start(text) for text in texts]
    steps.step(running, [17, 18, 19, 20, 21, 511])
    PagedAttention.steps.clear()
    rows = [steps.step(running[:3], [1] * 3), steps.step(running[:5], [1] * 5), steps.step(running, [1] * 6)]
    rows += [steps.step([running[5]], [1]), steps.step(running[:3], [1] * 3), steps.step([running[5]], [1])]
    # three sequences are padded to four, five and six to eight; the last has 512, 513, 514 tokens
    assert runner.graphs[1:] == [2 * 4, 2 * 8, 2 * 8, 2 + 1, 2 * 4, 2 + 1]
    told = dict.fromkeys(PagedAttention.steps)
    assert list(told) == [(4, 4, 1, 512, 0), (8, 8, 1, 512, 0), (1, 1, 1, 700, 513)]
    expected = [reference_logits(reference, text) for text in texts]
    places = [(0, 0, 17), (0, 1, 18), (0, 2, 19), (1, 0, 18), (1, 4, 21), (2, 3, 21), (4, 2, 22), (2, 5, 511)]
    for step, row, position in places:
        assert (rows[step][row][0] - expected[row][position]).abs().max() < FAR
    assert (rows[3][0][0] - expected[5][512]).abs().max() < FAR
    assert (rows[5][0][0] - expected[5][513]).abs().max() < FAR


def test_captured_graphs_can_be_switched_off(llama):
    folder, config, _ = llama
    runner = EmulatedRunner(context_of(folder), {"enable_cuda_graph": "0"})
    Stepper(runner).greedy(tokens(config, 5), [5], 2)
    assert runner.graphs == [-1, -1, -1]
    assert runner.info.notes == ("no captured graphs",)


def test_a_session_that_can_not_capture_computes_without(llama, caplog):
    class Refusing(EmulatedRunner):
        def _session_of(self, path, settings, providers):
            if providers[0][1]["enable_cuda_graph"] == "1":
                raise state.Fail("not all nodes\nare CUDA's")
            return super()._session_of(path, settings, providers)

    runner = Refusing(context_of(llama[0]))
    assert "not all nodes are CUDA's" in caplog.text
    assert runner.info.notes == ("no captured graphs",)


def test_a_step_may_want_no_logits(llama):
    folder, config, reference = llama
    runner = EmulatedRunner(context_of(folder))
    steps = Stepper(runner)
    sequence = steps.start(text := tokens(config, 9))
    sequence.blocks = [1]
    assert runner.forward(make_batch([sequence], [8], [0], BLOCK)).shape == (0, config["vocab_size"])
    sequence.num_computed = 8
    last = runner.forward(make_batch([sequence], [1], [1], BLOCK))
    assert (last[0] - reference_logits(reference, text)[8]).abs().max() < TOLERANCE


def test_a_block_can_be_copied(llama):
    folder, config, reference = llama
    runner = EmulatedRunner(context_of(folder))
    steps = Stepper(runner)
    sequence = steps.start(text := tokens(config, 40))
    steps.step([sequence], [30])
    other = steps._free.pop()
    runner.copy(sequence.blocks[0], other, 30)
    sequence.blocks = [other]
    rows = steps.step([sequence], [10])[0]
    assert (rows - reference_logits(reference, text)[30:]).abs().max() < TOLERANCE


def test_logits_stay_as_they_are_when_the_next_step_runs(llama):
    folder, config, _ = llama
    steps = Stepper(EmulatedRunner(context_of(folder)))
    sequence = steps.start(tokens(config, 6))
    first = [steps.step([sequence], [n])[0] for n in (3, 1)]
    before = [rows.clone() for rows in first]
    steps.step([sequence], [1])
    assert all(torch.equal(a, b) for a, b in zip(first, before, strict=True))


@pytest.mark.parametrize(("family", "name"), [("llama", "plain"), ("gemma2", "usual"), ("olmo", "clipped"), LATENT])
def test_half_precision_stays_near(family, name, tmp_path):
    config = config_of(family, name)
    reference = write_reference(tmp_path / "model", config, seed=1)
    text = tokens(config, 40)
    runner = HalfRunner(context_of(tmp_path / "model"))
    steps = Stepper(runner)
    got = steps.step([steps.start(text)], [40])[0]
    expected = reference_logits(reference, text)
    assert got.dtype == torch.float32
    assert (got - expected).abs().mean() < 0.02 * expected.std()


def test_what_keeps_precision_is_float32_in_halves(tmp_path):
    config = config_of("gemma2", "usual")
    write_reference(tmp_path / "model", config, seed=1)
    runner = HalfRunner(context_of(tmp_path / "model"))
    kinds = {name: weight.dtype for name, weight in runner._weights.items()}
    assert {kind for name, kind in kinds.items() if name.endswith("norm.weight")} == {torch.float32}
    assert {kind for name, kind in kinds.items() if not name.endswith("norm.weight")} == {torch.float16}


@pytest.mark.parametrize(("family", "name"), USUAL)
def test_the_runtime_accepts_the_graph(family, name, tmp_path):
    """It checks names, counts and types of all that nodes have, and then looks for kernels, of which it has none."""
    write_reference(tmp_path / "model", config_of(family, name), seed=1)
    spec = model_of(tmp_path / "model").spec
    path, _ = graph_for(spec, Form(max_len=512, dtype="bfloat16", kv_dtype="bfloat16", paged=True))
    with pytest.raises(state.NotImplemented, match="Could not find an implementation"):
        onnxruntime.InferenceSession(str(path), providers=[CPU])


def test_buckets():
    assert [bucket(n) for n in (1, 2, 3, 4, 5, 8, 9, 16, 17, 25, 32, 33)] == [1, 2, 4, 4, 8, 8, 16, 16, 24, 32, 32, 40]
