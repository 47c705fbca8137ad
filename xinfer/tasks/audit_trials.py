"""What an audit tries: each thing that should not change tokens, and what comes of the same requests with it."""

__all__ = ["ALL_TRIALS", "Outcome", "Trial", "outcome_of", "outcome_of_processes"]

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from xinfer.engine.engine import Engine
from xinfer.engine.outputs import StepOutput
from xinfer.engine.speculative import Speculator
from xinfer.engine.types import Sequence as Tokens
from xinfer.errors import UsageError, XinferError
from xinfer.flags import quote_text
from xinfer.models.split import shares
from xinfer.processes import count
from xinfer.records.reader import read_run
from xinfer.session import Session
from xinfer.tasks.recorded import RecordedRequest

_MOST_PROCESSES = 4  # that an audit starts
WAVES = 2  # times that the requests come, so that their prompts can be found in the cache
Texts = dict[tuple[int, int], tuple[list[int], list[float]]]  # by wave and index, tokens and their logprobs


@dataclass(frozen=True, slots=True)
class Trial:
    """Something that should not change tokens.

    Attributes:
        name: of it, as `audit.only` has it.
        changes: from the session as configured, and the tokens of the longest request, to the overrides that change it,
            or in words why that can't be tried.
        words, count: what of a run's steps shows that it makes a difference, and how many of that there were; without
            words nothing does.
        prepare: what else is done to its engine, with what came without it.
    """

    name: str
    changes: Callable[[Session, int], list[str] | str]
    words: str = ""
    count: Callable[[Sequence[StepOutput]], int] = len
    prepare: Callable[[Engine, Texts], None] = lambda engine, expected: None


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of the requests, and the steps that it took."""

    texts: Texts
    steps: list[StepOutput]


def outcome_of(engine: Engine, requests: Sequence[RecordedRequest]) -> Outcome:
    """Run the requests on an engine, all at once, and when they have ended once more."""
    texts: Texts = {}
    steps: list[StepOutput] = []
    for wave in range(WAVES):
        for request in requests:
            engine.add_request(request.prompt_token_ids, request.params, index=request.index)
        for step in engine.run():
            steps.append(step)
            for output in step.finished:
                if output.error is not None:
                    raise XinferError(f"request {output.index} failed: {output.error}")
                values = [each.logprob for each in output.logprobs or ()]
                texts[wave, output.index] = (list(output.token_ids), values)
    return Outcome(texts, steps)


def outcome_of_processes(requests: Sequence[RecordedRequest], overrides: Sequence[str], change: str) -> Outcome:
    """Run the requests by several processes together, started as a user starts them, and read what they recorded.

    `change` says how many: `parallel.tensor=2`.
    """
    texts: Texts = {}
    processes = change.rpartition("=")[2]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python"]
    kept = [word for word in overrides if word.partition("=")[0].partition(".")[0] not in ("task", "audit")]
    for greedy in (False, True):
        alike = [request for request in requests if request.params.greedy == greedy]
        if not alike:
            continue
        with tempfile.TemporaryDirectory() as folder:
            place = [f"hydra.run.dir={quote_text(f'{folder}/run')}", "record=default", change]
            words = [*kept, *place, *(f"sampling.{name}={getattr(alike[0].params, name)}" for name in _SAMPLING)]
            command = [
                *torchrun,
                f"--nproc-per-node={processes}",
                sys.executable,
                "-m",
                "xinfer",
                *words,
                "--requests",
                "-",
            ]
            lines = "".join(
                json.dumps({"prompt_token_ids": request.prompt_token_ids, "seed": request.params.seed}) + "\n"
                for request in alike
            )
            done = subprocess.run(command, input=lines, capture_output=True, text=True, check=False)
            if done.returncode:
                said = [line.removeprefix("xinfer: ") for line in done.stderr.splitlines() if line[:8] == "xinfer: "]
                raise UsageError("; ".join(said) or f"torchrun ended with exit code {done.returncode}")
            run = read_run(Path(folder, "run"))
        for number, request in enumerate(alike):
            output = run.outputs[number]
            texts[0, request.index] = (output["token_ids"], [each["logprob"] for each in output["logprobs"]])
    return Outcome(texts, [])


def _preemption(session: Session, longest: int) -> list[str] | str:
    """Leave room for two of the longest requests and a little more, whatever the runner's blocks are."""
    info = session.runner.info
    if not info.kv_token_bytes:
        return "the backend does not say how much memory a token takes"
    block = min(info.block_size, longest)
    return [f"engine.kv_memory={info.kv_token_bytes * (2 * longest + 3 * block)}"]


def _compiled(session: Session, longest: int) -> list[str] | str:
    if session.backend.name != "eager" or "compile" not in session.plugins.backends:
        return f"backend {session.backend.name} has no other form"
    if session.runner.info.device != "cpu":
        return "backend compile computes on the CPU only"
    return ["backend=compile"]


def _streamed(session: Session, longest: int) -> list[str] | str:
    if not session.backend.streams:
        return f"backend {session.backend.name} has all layers in memory"
    layers = len(session.model.spec.layers)
    if session.model.stream_layers is not None:
        return ["model.stream_layers=null"]
    return [f"model.stream_layers={min(2, layers - 1)}"] if layers > 1 else "the model has one layer"


def _shared_out(session: Session, longest: int) -> list[str] | str:
    if not session.backend.splits or sys.platform == "win32":
        return f"backend {session.backend.name} computes in one process"
    if count() > 1 or session.runner.info.device != "cpu":
        return "it is tried on a CPU, from one process"
    possible = [number for number in shares(session.model.spec) if 1 < number <= _MOST_PROCESSES]
    return [f"parallel.tensor={possible[0]}"] if possible else "what a layer has can't be shared out"


def _graphs(session: Session, longest: int) -> list[str] | str:
    device = session.runner.info.device
    if session.backend.name != "onnx" or not device.startswith("cuda"):
        return f"backend {session.backend.name} captures no graphs on {device}"
    return ["backend.providers=[{CUDAExecutionProvider:{enable_cuda_graph:'0'}}]"]


class _Quoting:
    """Guesses what came without guessing, every third token of it wrong: to see right ones kept and wrong ones not."""

    def __init__(self, expected: Texts) -> None:
        self._expected = {index: tokens for (wave, index), (tokens, _) in expected.items() if not wave}

    def propose(self, sequences: list[Tokens], count: int) -> list[list[int]]:
        """See `Proposer.propose`."""
        return [self._guess(sequence, count) for sequence in sequences]

    def _guess(self, sequence: Tokens, count: int) -> list[int]:
        done, expected = len(sequence.output_token_ids), self._expected[sequence.request.index]
        return [token if (done + i) % 3 else token ^ 1 for i, token in enumerate(expected[done : done + count])]

    def forget(self, sequence: Tokens) -> None:
        """See `Proposer.forget`."""


def _guess(engine: Engine, expected: Texts) -> None:
    if engine.speculator is not None:
        engine.speculator = Speculator(_Quoting(expected), always=True)


def _total(name: str) -> Callable[[Sequence[StepOutput]], int]:
    return lambda steps: sum(int(getattr(step.stats, name)) for step in steps)


def _prompt_steps(steps: Sequence[StepOutput]) -> int:
    return sum(step.stats.prefill_tokens > 0 for step in steps)


def _set(key: str, value: object) -> Callable[[Session, int], list[str] | str]:
    return lambda session, longest: [f"{key}={value}"]


def _other_cache(session: Session, longest: int) -> list[str] | str:
    return [f"engine.prefix_cache={str(not session.limits.prefix_cache).lower()}"]


ALL_TRIALS = (
    Trial("again", lambda session, longest: []),
    Trial("prefix_cache", _other_cache, "tokens found in it", _total("cached_tokens")),
    Trial("chunking", _set("engine.max_num_batched_tokens", 16), "steps with prompts", _prompt_steps),
    Trial("batch_size", _set("engine.max_num_seqs", 1), "steps"),
    Trial("preemption", _preemption, "times put aside", _total("preemptions")),
    Trial("speculation", _set("engine.speculation", "ngram"), "tokens guessed", _total("draft_tokens"), _guess),
    Trial("compile", _compiled),
    Trial("cuda_graphs", _graphs),
    Trial("streaming", _streamed),
    Trial("tensor_parallelism", _shared_out),
)
_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "max_tokens", "ignore_eos", "logprobs")
