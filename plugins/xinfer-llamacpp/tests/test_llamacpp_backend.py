"""Whatever the engine asks, the logits are the model's, and the tokens those that llama.cpp generates by itself."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("llama_cpp")

import llama_cpp
from xinfer_llamacpp import LlamaCppConfig
from xinfer_llamacpp.runner import LlamaCppRunner

from xinfer import LLM, BackendContext, Engine, Limits, ModelRunner, RequestOutput, SamplingParams
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.composing import default_model
from xinfer.errors import ConfigError, DeviceError, ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.sources import resolve
from xinfer.testing.gguf import GGUF_SHAPES, convert, gguf_shape
from xinfer.testing.reference import parity, reference_logits, write_reference
from xinfer.testing.stepper import Stepper, cut
from xinfer.testing.tiny import tiny_config, write_gguf
from xinfer.testing.workload import Met, Workload, check, workload

TOLERANCE = 1e-4
# llama.cpp looks gelu up in a table of half precision, and has an epsilon of its own for glm4_moe_lite.
ROUGHLY = 5e-3
ROUGH = (
    *("gemma", "gemma2", "gemma3_text", "gpt2", "gpt_bigcode", "gpt_neox", "falcon", "phi", "starcoder2"),
    "glm4_moe_lite",
)
# What llama.cpp computes in another way than the checkpoint says, or does not load; tests/data/make_gguf_texts.py says
# in which. Windows that it leaves out and contexts in which all positions turn otherwise have tests of their own.
OTHERWISE = ("cohere/normed", "deepseek_v2/usual", "exaone4/usual", "deepseek_v3/plain", "phi3/short", "phi3/longrope")
LONGEST = 96
EXACT = LlamaCppConfig(threads=1, kv_dtype="float32", flash_attention="off")
FAMILIES = ("llama", "qwen2", "qwen3_moe", "gemma2", "cohere2", "deepseek_v3", "gpt_oss")
CASES = [
    pytest.param(family, name, marks=() if family in FAMILIES and name == next(iter(names)) else pytest.mark.slow)
    for family, names in GGUF_SHAPES.items()
    for name in names
    if f"{family}/{name}" not in OTHERWISE
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf", tiny_config("llama"), seed=0)


def context(path: Path, config: Any, limits: Limits | None = None) -> BackendContext:
    model = Model(str(path), lambda: path, xinfer_model_families())
    return BackendContext(model, config, limits or Limits(max_model_len=LONGEST, max_num_seqs=8))


def runner(path: Path, limits: Limits | None = None, config: LlamaCppConfig = EXACT) -> LlamaCppRunner:
    return LlamaCppRunner(context(path, config, limits))


def eager(path: Path, limits: Limits | None = None) -> TorchRunner:
    return TorchRunner(context(path, EagerConfig(device="cpu", threads=1), limits))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, length).tolist()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_in_pieces_and_in_company_are_those_of_transformers(family: str, name: str, tmp_path: Path):
    config = gguf_shape(family, name)
    reference, size = write_reference(tmp_path / "model", config, seed=2), config["vocab_size"]
    limits = Limits(max_model_len=80, max_num_seqs=8)
    stepper = Stepper(runner(convert(tmp_path / "model", tmp_path / "model.gguf"), limits))
    tolerance = ROUGHLY if family in ROUGH else TOLERANCE
    ids = np.random.default_rng(0).integers(0, size, 40).tolist()
    found = parity(stepper, reference, ids, 16, cut(40, np.random.default_rng(1)))
    assert found.difference <= tolerance
    assert found.spread >= 0.5
    rng = np.random.default_rng(2)
    sequences = [stepper.start(rng.integers(0, size, length).tolist()) for length in (1, 3, 17, 40, 60)]
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for _ in range(16):  # they join at different times, are cut at random, and decode between others' chunks
        chosen = [i for i in rng.permutation(len(sequences)) if rng.random() < 0.7]
        missing = [len(sequences[i].token_ids) - sequences[i].num_computed for i in chosen]
        counts = [int(rng.integers(1, most + 1)) for most in missing]
        step = stepper.step([sequences[i] for i in chosen], counts) if chosen else []
        for i, logits in zip(chosen, step, strict=True):
            rows[i].append(logits)
            if sequences[i].num_computed == len(sequences[i].token_ids):
                sequences[i].token_ids.append(int(logits[-1].argmax()))
    for sequence, logits in zip(sequences, rows, strict=True):
        theirs = reference_logits(reference, sequence.token_ids[: sequence.num_computed])
        assert (torch.cat(logits) - theirs).abs().max() <= tolerance


def outputs(made: ModelRunner, limits: Limits) -> list[RequestOutput]:
    engine = Engine(made, None, limits, seed=3)
    for i in range(9):
        params = SamplingParams(
            max_tokens=12 + 3 * i, temperature=float(i % 2), n=1 + i % 3, ignore_eos=True, logprobs=2
        )
        engine.add_request(prompt(5 + 4 * i, seed=i % 4), params)
    done = [output for step in engine.run() for output in step.finished]
    return sorted(done, key=lambda output: (output.index, output.sample))


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_tokens_of_many_requests_are_those_of_the_torch_backend(family: str, tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_config(family), seed=1)
    limits = Limits(max_model_len=LONGEST, max_num_seqs=6, max_num_batched_tokens=40)
    said = [[output.token_ids for output in outputs(made(file, limits), limits)] for made in (runner, eager)]
    assert said[0] == said[1]
    assert len(said[0]) == 18


def made_for(file: Path, work: Workload, unified: bool, cache: dict[str, Any]) -> LlamaCppRunner:
    """Return a runner for a workload, with room for hardly more than one sequence; without a `cache` for all."""
    if not cache:
        return runner(file, Limits(max_model_len=LONGEST, max_num_batched_tokens=4096))
    config = replace(EXACT, kv_unified=unified)
    if not unified:
        return runner(file, replace(work.limits, max_model_len=LONGEST), config)
    memory = LONGEST * (1 + work.seed % 3) * 2 * 2 * 3 * 16 * 4  # tokens, keys and values, heads, layers, width, bytes
    return runner(file, replace(work.limits, max_model_len=LONGEST, kv_memory=memory), config)


@pytest.mark.parametrize("unified", [True, False])
def test_random_workloads_come_to_what_each_request_comes_to_alone(unified: bool, tiny: Path):
    met = []
    for number in range(12):
        work = workload(number, 256, LONGEST)
        work = replace(work, limits=replace(work.limits, determinism="fast"))
        met.append(check(work, partial(made_for, tiny, work, unified), TOLERANCE))
    seen = {name for name in Met.__dataclass_fields__ if any(getattr(each, name) for each in met)}
    assert seen == set(Met.__dataclass_fields__) - (set() if unified else {"preemptions"})  # each row has room for all


@pytest.mark.parametrize("config", [LlamaCppConfig(threads=1), EXACT])
def test_the_same_command_comes_to_the_same_bit_for_bit(config: LlamaCppConfig, tiny: Path):
    limits = Limits(max_model_len=LONGEST, max_num_seqs=4)
    once, again = (outputs(runner(tiny, limits, config), limits) for _ in range(2))
    assert [(each.token_ids, each.logprobs) for each in once] == [(each.token_ids, each.logprobs) for each in again]


@pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0"])
def test_tokens_are_those_that_llama_cpp_generates_by_itself(kind: str, tmp_path: Path):
    config = tiny_config("llama", hidden_size=128, num_attention_heads=4)
    file = write_gguf(tmp_path / "tiny.gguf", config, seed=1, kind=kind)
    theirs = llama_cpp.Llama(str(file), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, flash_attn=True)
    made = runner(file, config=LlamaCppConfig(threads=1, flash_attention="on"))
    for seed in range(4):
        engine = Engine(made, None, Limits(max_model_len=LONGEST, max_num_seqs=8))
        engine.add_request(prompt(20, seed), SamplingParams(max_tokens=32, temperature=0, ignore_eos=True))
        (ours,) = [output.token_ids for step in engine.run() for output in step.finished]
        generated = theirs.generate(prompt(20, seed), temp=0.0, repeat_penalty=1.0)
        assert ours == tuple(token for token, _ in zip(generated, range(32), strict=False))


def test_a_split_file_is_loaded_whichever_part_is_named(tiny: Path, tmp_path: Path):
    write_gguf(tmp_path / "split.gguf", tiny_config("llama"), seed=0, split_max_tensors=10)
    parts = sorted(tmp_path.glob("split-*.gguf"))
    assert len(parts) > 2
    whole, first, last = (Stepper(runner(path)) for path in (tiny, parts[0], parts[-1]))
    expected = whole.step([whole.start(prompt(20))], [20])[0]
    for stepper in (first, last):
        assert torch.equal(stepper.step([stepper.start(prompt(20))], [20])[0], expected)


def test_a_damaged_file_is_named_with_llama_cpps_reason(tiny: Path, tmp_path: Path):
    whole = tiny.read_bytes()
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(whole)
    made = context(broken, EXACT)
    assert made.model.spec.vocab_size == 272
    broken.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match=f"{broken}: llama.cpp can't load it .*corrupted or incomplete"):
        LlamaCppRunner(made)


def test_windows_that_llama_cpp_leaves_out_are_refused_where_they_matter(tmp_path: Path):
    file = write_gguf(tmp_path / "tiny.gguf", tiny_config("mistral"), seed=1)
    with pytest.raises(ConfigError, match=r"layers see 16 tokens.*take engine\.max_model_len=16 at most"):
        runner(file)
    assert runner(file, Limits(max_model_len=16)).info.max_model_len == 16


@pytest.mark.parametrize("wanted", [None, 512])
def test_positions_turn_as_the_runs_longest_context_has_them(wanted: int | None, tmp_path: Path):
    """Though the pool of cells, by whose size llama.cpp decides, would hold more than one such context."""
    changes = {"max_position_embeddings": 512, "original_max_position_embeddings": 256}
    write_reference(tmp_path / "model", gguf_shape("phi3", "longrope") | changes, seed=2)
    file = convert(tmp_path / "model", tmp_path / "model.gguf")
    limits, ids = Limits(max_model_len=wanted, max_num_seqs=4), list(range(3, 43))
    ours, theirs = Stepper(runner(file, limits)), Stepper(eager(file, limits))
    assert ours.runner.info.max_model_len == (wanted or 256)
    logits = [stepper.step([stepper.start(ids)], [40])[0] for stepper in (ours, theirs)]
    assert (logits[0] - logits[1]).abs().max() <= TOLERANCE


def test_limits_that_llama_cpp_has_are_refused(tiny: Path):
    with pytest.raises(ConfigError, match=r"engine\.max_num_seqs=300: llama.cpp runs at most 256 sequences"):
        runner(tiny, Limits(max_model_len=LONGEST, max_num_seqs=300))
    with pytest.raises(DeviceError, match=r"raise engine\.kv_memory"):
        runner(tiny, Limits(max_model_len=LONGEST, kv_memory=700))


def test_the_command_says_what_the_torch_backend_says(xinfer, tiny: Path, tmp_path: Path):
    prompts = ["Hello", "What is this?", "Once upon a time"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = ["--model", str(tiny), "--prompts-file", "prompts.txt", "--max-tokens", "12", "--temperature", "0"]
    done = xinfer("backend=llamacpp", "backend.kv_dtype=float32", "backend.flash_attention=off", *words, "chat=false")
    assert done.returncode == 0, done.stderr
    with LLM(tiny) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert done.stdout.splitlines() == "\n".join(expected).splitlines()
    assert "llama_" not in done.stderr


def test_smollm2_generates_what_llama_cpp_generates_by_itself():
    path, limits = resolve(default_model()), Limits(max_model_len=256, max_num_seqs=4)
    theirs = llama_cpp.Llama(str(path), n_ctx=256, n_threads=1, n_threads_batch=1, verbose=False, flash_attn=True)
    made = runner(path, limits, LlamaCppConfig(threads=1, flash_attention="on"))
    tokenizer = Model(str(path), lambda: path, xinfer_model_families()).tokenizer
    for text in ("Once upon a time,", "def fibonacci(n):", "日本の首都は"):
        ids = tokenizer.encode(text)
        engine = Engine(made, tokenizer, limits)
        engine.add_request(ids, SamplingParams(max_tokens=24, temperature=0, ignore_eos=True))
        (ours,) = [output.token_ids for step in engine.run() for output in step.finished]
        generated = theirs.generate(ids, temp=0.0, repeat_penalty=1.0)
        assert ours == tuple(token for token, _ in zip(generated, range(24), strict=False))
