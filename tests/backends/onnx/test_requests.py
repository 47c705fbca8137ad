"""Requests on the ONNX backend by way of the engine: what comes of them is what eager makes of them, each alone."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from cases import TOLERANCE, eager_runner, model_of, onnx_runner

from xinfer import LLM
from xinfer.engine.engine import Engine
from xinfer.engine.outputs import RequestOutput, StepStats
from xinfer.engine.runner import LEVELS, ModelRunner
from xinfer.engine.types import FinishReason, Limits, SamplingParams
from xinfer.errors import ConfigError
from xinfer.testing.tiny import tiny_config, write_folder
from xinfer.testing.workload import Met, Workload, check, outputs_of, workload

pytestmark = pytest.mark.usefixtures("one_thread")

LONGEST = 96
GREEDY = {"temperature": 0.0, "ignore_eos": True}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = tiny_config("qwen3", max_position_embeddings=LONGEST)
    return write_folder(tmp_path_factory.mktemp("tiny") / "qwen3", config, seed=0)


def runner_of(folder: Path, tokens: int | None = None, **limits) -> ModelRunner:
    """Return a runner whose cache holds so many tokens."""
    model = model_of(folder)
    token_bytes = onnx_bytes(model)
    return onnx_runner(model, Limits(**limits, kv_memory=None if tokens is None else tokens * token_bytes))


def onnx_bytes(model) -> int:
    """Of one token's keys and values."""
    return sum(2 * layer.attention.kv_heads * layer.attention.head_dim * 4 for layer in model.spec.layers)


def prompts(lengths: Sequence[int], vocab: int = 256) -> list[list[int]]:
    return [np.random.default_rng(length).integers(0, vocab, length).tolist() for length in lengths]


def run(engine: Engine, abort: dict[int, int] | None = None) -> tuple[dict[int, RequestOutput], list[StepStats]]:
    """Step to the end; `abort` says of requests before which step they are given up."""
    outputs, stats = {}, []
    while engine.has_work:
        for request, step in (abort or {}).items():
            if step == len(stats):
                engine.abort(str(request))
        result = engine.step()
        stats.append(result.stats)
        outputs |= {output.index: output for output in result.finished}
    return outputs, stats


def of_eager(folder: Path, asked: list[list[int]], count: int) -> list[tuple[int, ...]]:
    """Return what eager makes of each prompt alone."""
    limits = Limits(max_num_seqs=1, prefix_cache=False)
    engine = Engine(eager_runner(model_of(folder), limits), None, limits)
    for prompt in asked:
        engine.add_request(prompt, SamplingParams(max_tokens=count, **GREEDY))
    outputs, _ = run(engine)
    return [outputs[i].token_ids for i in range(len(asked))]


LENGTHS = [1, 40, 7, 2, 23, 60, 16, 33, 5, 12]


def test_an_llm_says_what_eager_says(tiny_llama: Path) -> None:
    asked = prompts(LENGTHS)
    params = [SamplingParams(max_tokens=24, temperature=t, seed=3) for t in (0.0, 0.8) for _ in asked]
    said = []
    for backend in ("eager", "onnx"):
        with LLM(tiny_llama, backend, ["backend.device=cpu", "backend.threads=1"], seed=0) as llm:
            results = llm.generate(asked * 2, params)
        said.append([(output.text, output.token_ids) for result in results for output in result.outputs])
    assert said[0] == said[1]


def test_requests_of_which_memory_puts_some_aside_come_to_the_same(folder: Path) -> None:
    limits = Limits(max_num_seqs=8, max_num_batched_tokens=16, prefix_cache=False)
    engine = Engine(runner_of(folder, 150, max_num_seqs=8), None, limits)
    for prompt in prompts(LENGTHS):
        engine.add_request(prompt, SamplingParams(max_tokens=30, **GREEDY))
    outputs, stats = run(engine)
    assert sum(each.preemptions for each in stats) > 0
    assert [outputs[i].token_ids for i in range(len(LENGTHS))] == of_eager(folder, prompts(LENGTHS), 30)


def test_requests_that_are_given_up_leave_others_alone(folder: Path) -> None:
    limits = Limits(max_num_seqs=4, max_num_batched_tokens=16)
    engine = Engine(runner_of(folder, max_num_seqs=4), None, limits)
    for prompt in prompts(LENGTHS):
        engine.add_request(prompt, SamplingParams(max_tokens=30, **GREEDY))
    outputs, _ = run(engine, abort={0: 4, 2: 0, 3: 11, 5: 30, 8: 60})
    whole = of_eager(folder, prompts(LENGTHS), 30)
    aborted = [i for i, output in outputs.items() if output.finish_reason is FinishReason.ABORT]
    assert len(aborted) >= 3
    for i, output in outputs.items():
        assert output.token_ids == whole[i][: len(output.token_ids)]
        assert i in aborted or len(output.token_ids) == 30
    assert engine.scheduler.pool.num_used == 0


def test_beginnings_found_in_the_cache_spare_work_and_change_nothing(folder: Path) -> None:
    beginning, *ends = prompts([48, *range(1, 13)])
    asked = [[*beginning, *end] for end in ends]
    done = {}
    for cached in (True, False):
        limits = Limits(max_num_seqs=3, max_num_batched_tokens=32, prefix_cache=cached)
        engine = Engine(runner_of(folder, max_num_seqs=3), None, limits)
        for prompt in asked:
            engine.add_request(prompt, SamplingParams(max_tokens=12, **GREEDY))
        outputs, stats = run(engine)
        assert [outputs[i].token_ids for i in range(len(asked))] == of_eager(folder, asked, 12)
        done[cached] = sum(each.prefill_tokens for each in stats)
        assert (sum(each.cached_tokens for each in stats) > 0) == cached
        assert (sum(each.copies for each in stats) > 0) == cached
    assert done[False] == sum(map(len, asked))
    assert done[True] <= done[False] - 48 * (len(asked) - 3)


def test_samples_of_one_prompt_go_their_own_ways(folder: Path) -> None:
    params = SamplingParams(n=5, max_tokens=20, temperature=1.0, seed=1, ignore_eos=True)
    said = []
    for make in (onnx_runner, eager_runner):
        engine = Engine(make(model_of(folder), Limits(max_num_seqs=5)), None, Limits(max_num_seqs=5))
        engine.add_request(prompts([30])[0], params)
        said.append({output.sample: output.token_ids for step in engine.run() for output in step.finished})
    assert said[0] == said[1]
    assert len(set(said[0].values())) == 5


# Random workloads


def fast(number: int) -> Workload:
    work = workload(number, 256, LONGEST)
    return replace(work, limits=replace(work.limits, determinism="fast"))


def maker(folder: Path, work: Workload):
    """What makes runners for a workload: with memory for hardly more than one sequence, or for all."""

    def make(cache) -> ModelRunner:
        most = work.limits.max_num_seqs if cache else 32
        tokens = LONGEST * (1 + work.seed % 3) if cache else None
        return runner_of(folder, tokens, max_num_seqs=most, determinism=work.limits.determinism)

    return make


def shares(met: list[Met]) -> dict[str, int]:
    return {name: sum(getattr(each, name) > 0 for each in met) for name in Met.__dataclass_fields__}


def test_random_workloads_come_to_what_each_request_comes_to_alone(folder: Path) -> None:
    """What is not promised bit for bit is true within rounding."""
    met = [check(fast(number), maker(folder, fast(number)), TOLERANCE) for number in range(12)]
    assert min(shares(met).values()) > 0


@pytest.mark.slow
def test_two_hundred_workloads_come_to_what_each_request_comes_to_alone(folder: Path) -> None:
    for number in range(200):
        check(fast(number), maker(folder, fast(number)), TOLERANCE)


def test_what_is_promised_of_repetition_is_kept_bit_for_bit(folder: Path) -> None:
    promised = runner_of(folder).info.levels
    assert "rerun" in promised
    for number in (3, 4, 8):
        once, again = (outputs_of(fast(number), maker(folder, fast(number))) for _ in range(2))
        assert {key: what(each) for key, each in once.items()} == {key: what(each) for key, each in again.items()}


def what(output: RequestOutput) -> tuple:
    return output.token_ids, output.finish_reason, output.logprobs, output.prompt_logprobs


def test_what_is_promised_of_invariance_is_kept_bit_for_bit_or_refused(folder: Path) -> None:
    limits = Limits(determinism="invariant")
    runner = runner_of(folder, determinism="invariant")
    if missing := LEVELS - runner.info.levels:
        with pytest.raises(ConfigError, match=f"does not promise {', '.join(sorted(missing))}"):
            Engine(runner, None, limits)
        return
    works = [workload(number, 256, LONGEST) for number in range(12)]
    met = [check(work, maker(folder, work)) for work in works]
    assert min(shares(met)[name] for name in ("preemptions", "cached_tokens", "copies")) > 0
