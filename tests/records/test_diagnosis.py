"""Runs that really suffer from one thing each: it is found first, and the setting that is named really cures it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from xinfer.engine.engine import Engine, Observers
from xinfer.engine.stats import percentile
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import UsageError
from xinfer.records import RunRecord
from xinfer.records.diagnosis import diagnose
from xinfer.records.evidence import Evidence, Finding
from xinfer.records.prefixes import reuse
from xinfer.records.reader import RecordedRun, read_run
from xinfer.testing.fake import FakeTokenizer
from xinfer.testing.timed import TimedRunner, VirtualClock

TOKEN_BYTES = 1024


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Arrival:
    """A request: when it comes, what it says, how much it wants."""

    at_ms: float
    prompt: list[int]
    tokens: int
    salt: str = ""


class Slow:
    """A logits processor that takes its time."""

    name = "slow"

    def __init__(self, clock: VirtualClock, milliseconds: float) -> None:
        self.clock, self.milliseconds = clock, milliseconds

    def check(self, arguments: Any) -> None:
        pass

    def apply(self, logits, sequences):
        if any("slow" in s.request.params.extra for s in sequences):
            self.clock.advance(self.milliseconds)
        return logits


@dataclass(frozen=True)
class Work:
    """What is run, on what: settings may replace what stands in the last two fields."""

    arrivals: list[Arrival]
    runner: dict[str, Any] = field(default_factory=dict)
    blocks: int = 1024
    senders: int | None = None  # each sends a request when the one before has ended; None: at their times
    observer_ms: float = 0.0
    memory: float = float("inf")  # bytes, for the cache and a step's tokens
    threads: int = 2
    full: bool = False  # whether the cache has all the memory that there is
    plugins: tuple[dict[str, Any], ...] = ()
    engine: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)

    def changed(self, setting: str) -> "Work":
        """The same work with the settings that a finding names."""
        engine, sampling, other = dict(self.engine), dict(self.sampling), {}
        for word in setting.split():
            key, _, text = word.partition("=")
            value = OmegaConf.create({"v": text}).v if not text else OmegaConf.from_dotlist([f"v={text}"]).v
            group, _, name = key.partition(".")
            match group:
                case "engine":
                    engine[name] = value
                case "sampling":
                    sampling[name] = value or {}
                case "model":
                    other |= {"blocks": 2 * self.blocks, "runner": self.runner | {"dtype": value}}
                case "backend":
                    other[name] = value
                case "XINFER_PLUGINS":
                    other |= {"observer_ms": 0.0, "plugins": ()}
                case _:  # "32 requests at once"
                    other["senders"] = int(key.split()[0])
                    break
        return Work(**vars(self) | {"engine": engine, "sampling": sampling} | other)


class Machine(TimedRunner):
    """A runner with so much memory, on whose threads other work lies when they are as many as its two cores."""

    def __init__(self, clock: VirtualClock, work: Work, blocks: int) -> None:
        options = {"max_model_len": 4096, "token_bytes": TOKEN_BYTES} | work.runner
        if work.threads < 2:
            options.pop("stall", None)
        dtype = options.pop("dtype", "float32")
        super().__init__(clock, num_blocks=blocks, **options)
        self.info = replace(self.info, dtype=dtype)
        self._memory = work.memory

    def forward(self, batch):
        if self.info.kv_cache_bytes + len(batch.token_ids) * TOKEN_BYTES * 16 > self._memory:
            raise MemoryError("out of memory: tried to allocate what a step needs")
        return super().forward(batch)


def play(work: Work, folder: Path, status: str = "completed", **record: Any) -> RecordedRun:
    """Run the work on the real engine, recorded by the real record, by a clock of its own."""
    clock = VirtualClock()
    kv_memory = work.engine.get("kv_memory")
    runner = Machine(clock, work, int(kv_memory // (16 * TOKEN_BYTES)) if kv_memory else work.blocks)
    kept = RunRecord(folder, clock=clock, **record)
    observers = Observers(
        on_step=(kept.step, lambda _: clock.advance(work.observer_ms)), on_request_finished=(kept.output,)
    )
    limits = Limits(**work.engine)
    engine = Engine(runner, FakeTokenizer(), limits, observers=observers, processors=[Slow(clock, 15.0)], clock=clock)
    kept.update(
        config={"engine": asdict(limits), "backend": {"threads": work.threads}, "record": record},
        runner=asdict(runner.info) | {"levels": [], "capabilities": []},
        plugins=list(work.plugins),
        hardware={"memory": runner.info.kv_cache_bytes if work.full else None},
    )
    coming, running = sorted(work.arrivals, key=lambda a: a.at_ms), 0
    try:
        while coming or engine.has_work:
            while coming and (running < work.senders if work.senders else coming[0].at_ms <= clock() * 1e3):
                one = coming.pop(0)
                params = SamplingParams(max_tokens=one.tokens, ignore_eos=True, **work.sampling)
                kept.request(engine.add_request(one.prompt, params, cache_salt=one.salt), {"prompt": "…"})
                running += 1
            if engine.has_work:
                running -= len(engine.step().finished)
            else:
                clock.advance(max(0.0, coming[0].at_ms - clock() * 1e3))
    except MemoryError as error:
        kept.update(error=f"{type(error).__name__}: {error}")
        status = "failed"
    kept.finish(status, {})
    return read_run(folder)


def prompt(length: int, number: int, start: int = 0) -> list[int]:
    """A prompt of which the first `start` tokens are everybody's."""
    own = np.random.default_rng(number).integers(0, 256, length - start).tolist()
    return [*np.random.default_rng(10**6).integers(0, 256, start).tolist(), *own]


def at_once(count: int, length: int, tokens: int, **options: Any) -> list[Arrival]:
    return [Arrival(0, prompt(length, i, **options), tokens) for i in range(count)]


def one_by_one(count: int, every_ms: float, length: int, tokens: int, **options: Any) -> list[Arrival]:
    return [Arrival(i * every_ms, prompt(length, i, **options), tokens) for i in range(count)]


def ttft(run: RecordedRun) -> float:
    return percentile((s["stats"]["ttft_ms"] for s in run.samples), 50)


def last_end(run: RecordedRun) -> float:
    return Evidence(run).span_ms


def longest_gap(run: RecordedRun) -> float:
    return percentile((gap for s in run.samples for gap in s["stats"]["itl_ms"]), 99)


def total(run: RecordedRun) -> float:
    return sum(s["stats"]["e2e_ms"] for s in run.samples)


def unfinished(run: RecordedRun) -> float:
    return len(run.requests) - len(run.samples)


PLUGINS = (
    {"name": "xinfer.backends.torch", "distribution": "xinfer", "version": "", "hooks": ["xinfer_backends"]},
    {"name": "tracker", "distribution": "xinfer-tracker", "version": "1", "hooks": ["xinfer_on_step"]},
)
STALLS: Callable[[int], float] = lambda step: 400.0 if step % 25 == 0 else 0.0  # noqa: E731
LONG = at_once(8, 480, 32)
SHARED = one_by_one(24, 400, 400, 12, start=384)

# What is run, what is found first, the beginning of the setting, the figure that must become smaller, to what share.
AILMENTS = {
    "preemption": (Work(at_once(16, 32, 160), blocks=64), "engine.kv_memory=", total, 0.8),
    "cache_full": (Work(at_once(16, 480, 32), blocks=128, runner={"token_ms": 0.02}), "engine.kv_memory=", ttft, 0.8),
    "queueing": (Work(at_once(24, 32, 64), engine={"max_num_seqs": 8}), "engine.max_num_seqs=24", ttft, 0.3),
    "long_prefill": (
        Work(one_by_one(8, 2500, 1500, 12), engine={"max_num_batched_tokens": 32}),
        "engine.max_num_batched_tokens=",
        ttft,
        0.7,
    ),
    "cache_misses": (Work(SHARED, engine={"prefix_cache": False}), "engine.prefix_cache=true", ttft, 0.5),
    "interference": (
        Work([*at_once(8, 32, 400), *one_by_one(20, 700, 700, 4)]),
        "engine.max_num_batched_tokens=",
        longest_gap,
        0.5,
    ),
    "decode_outliers": (Work(at_once(4, 32, 200), runner={"stall": STALLS}), "backend.threads=1", longest_gap, 0.5),
    "host_bound": (Work(at_once(4, 32, 64), sampling={"extra": {"slow": 1}}), "sampling.extra={}", last_end, 0.7),
    "small_batch": (Work(one_by_one(24, 0, 32, 24), senders=1), "32 requests at once", last_end, 0.3),
    "out_of_memory": (
        Work(
            [Arrival(0, prompt(64, 99), 64), *(Arrival(900, prompt(64, i), 64) for i in range(16))],
            memory=(1024 + 800) * 16 * TOKEN_BYTES,
        ),
        "engine.kv_memory=",
        unfinished,
        0.0,
    ),
}
# The same ailments from other causes.
VARIANTS = {
    "preemption": (
        Work(at_once(16, 128, 128), blocks=100, runner={"token_ms": 3.0, "dtype": "bfloat16"}, full=True),
        "engine.max_num_seqs=",
        total,
        0.9,
    ),
    "cache_full": (Work(LONG, blocks=128, runner={"token_ms": 0.02}, full=True), "model.dtype=bfloat16", ttft, 0.8),
    "queueing": (
        Work(at_once(24, 64, 192), blocks=150, engine={"max_num_seqs": 8}),
        "engine.max_num_seqs=24 engine.kv_memory=",
        ttft,
        0.2,
    ),
    "cache_misses": (
        Work([Arrival(i * 600, prompt(640, i % 6), 8) for i in range(36)], blocks=64),
        "engine.kv_memory=",
        ttft,
        0.5,
    ),
    "host_bound": (Work(at_once(4, 32, 64), observer_ms=15, plugins=PLUGINS), "XINFER_PLUGINS=", last_end, 0.7),
    "small_batch": (Work(one_by_one(40, 0, 32, 24), senders=4), "32 requests at once", last_end, 0.4),
}


def cases() -> list[Any]:
    return [
        pytest.param(name, *case, id=f"{name}{suffix}")
        for suffix, table in (("", AILMENTS), ("-other", VARIANTS))
        for name, case in table.items()
    ]


@pytest.mark.parametrize(("name", "work", "setting", "figure", "at_most"), cases())
def test_an_ailment_is_found_and_the_setting_that_is_named_cures_it(
    tmp_path: Path, name: str, work: Work, setting: str, figure: Callable[[RecordedRun], float], at_most: float
):
    suffering = play(work, tmp_path / "before")
    first, *others = diagnose(suffering)
    assert first.name == name
    assert first.setting.startswith(setting)
    assert not others, [finding.name for finding in others]
    cured = play(work.changed(first.setting), tmp_path / "after")
    assert name not in [finding.name for finding in diagnose(cured)]
    assert figure(cured) <= at_most * figure(suffering)


HEALTHY = {
    "one user": Work(at_once(1, 64, 128)),
    "one user who reads the answers": Work(one_by_one(8, 4000, 64, 64)),
    "busy": Work(one_by_one(60, 100, 96, 48)),
    "all at once, as many as may run": Work(at_once(32, 64, 64)),
}


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_run(tmp_path: Path, name: str):
    run = play(HEALTHY[name], tmp_path)
    assert diagnose(run) == []
    assert "until the first token" in Evidence(run).figures()


def names(run: RecordedRun) -> list[str]:
    return [finding.name for finding in diagnose(run)]


def test_what_follows_from_a_cause_is_not_said(tmp_path: Path):
    crowded = at_once(16, 32, 160) + one_by_one(12, 600, 480, 4)
    assert "interference" in names(play(Work(crowded), tmp_path / "roomy"))
    assert names(play(Work(crowded, blocks=64), tmp_path / "tight")) == ["preemption"]


def test_of_too_few_places_and_too_little_memory_the_one_that_cost_more_is_said(tmp_path: Path):
    crowd = at_once(24, 64, 160)
    places = play(Work(crowd, blocks=100, engine={"max_num_seqs": 8}), tmp_path / "places")
    (finding,) = diagnose(places)
    assert finding.name == "queueing" and Evidence(places).waiting["memory"] > 0
    assert finding.setting.startswith("engine.max_num_seqs=24 engine.kv_memory=")
    assert names(play(Work(crowd, blocks=100, engine={"max_num_seqs": 20}), tmp_path / "memory")) == ["preemption"]


def test_prompts_that_begin_alike_but_carry_different_salts_have_no_setting(tmp_path: Path):
    salted = [Arrival(a.at_ms, a.prompt, a.tokens, salt=str(i)) for i, a in enumerate(SHARED)]
    (finding,) = diagnose(play(Work(salted), tmp_path / "salted"))
    assert (finding.name, finding.setting) == ("cache_misses", None)
    assert "cache_salt" in finding.text
    alike = [Arrival(a.at_ms, a.prompt, a.tokens, salt="all") for a in SHARED]
    assert names(play(Work(alike), tmp_path / "alike")) == []


def test_what_could_have_been_reused_is_counted(tmp_path: Path):
    run = play(Work(one_by_one(5, 2000, 100, 4, start=64), engine={"prefix_cache": False}), tmp_path / "off")
    told = reuse(run, 16)
    assert (told.prompt, told.possible, told.reused) == (500, 4 * 64, 0)
    told = reuse(play(Work(one_by_one(5, 2000, 100, 4, start=64)), tmp_path / "on"), 16)
    assert (told.possible, told.reused) == (4 * 64, 4 * 64)
    together = play(Work(at_once(5, 100, 4, start=64), engine={"prefix_cache": False}), tmp_path / "together")
    assert reuse(together, 16).possible == 0  # computed side by side, none could have used another's
    private = play(Work(SHARED, engine={"prefix_cache": False}), tmp_path / "private", text="hash")
    assert reuse(private, 16).prompt == 0
    assert "cache_misses" not in names(private)


def test_a_stall_that_no_setting_changes_is_told_without_one(tmp_path: Path):
    run = play(AILMENTS["decode_outliers"][0], tmp_path)
    run.info["config"]["backend"]["threads"] = 1
    (finding,) = diagnose(run)
    assert (finding.name, finding.setting) == ("decode_outliers", None)


def test_longer_contexts_and_larger_batches_are_no_outliers(tmp_path: Path):
    costs = {"fixed_ms": 1.0, "token_ms": 1.0, "context_ms": 0.05}
    work = Work([Arrival(i * 150, prompt(16, i), 400 + 20 * i) for i in range(12)], runner=costs)
    run = play(work, tmp_path)
    steps = [step["step_ms"] for step in Evidence(run).decodes]
    assert max(steps) > 10 * min(steps)
    assert "decode_outliers" not in names(run)


def test_a_sampled_record_is_diagnosed_alike(tmp_path: Path):
    work = AILMENTS["queueing"][0]
    whole, sampled = (diagnose(play(work, tmp_path / steps, steps=steps)) for steps in ("all", "sample"))
    assert [f.name for f in whole] == [f.name for f in sampled] == ["queueing"]
    assert sampled[0].share == pytest.approx(whole[0].share, abs=0.15)


def test_a_run_that_was_killed_is_diagnosed_by_what_is_there(tmp_path: Path):
    run = play(AILMENTS["queueing"][0], tmp_path)
    (tmp_path / "stats.json").unlink()
    steps = (tmp_path / "steps.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "steps.jsonl").write_text("".join(steps[:60]) + steps[60][:100])
    requests = (tmp_path / "requests.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "requests.jsonl").write_text("".join(requests[:24]) + '{"event": "output"}x\n')
    killed = read_run(tmp_path)
    assert (len(killed.steps), len(killed.samples)) == (60, 0)
    (finding,) = diagnose(killed)
    assert (finding.name, finding.setting) == ("queueing", "engine.max_num_seqs=24")
    assert "of which 0 ended" in Evidence(killed).figures()
    (tmp_path / "steps.jsonl").write_text("".join([*steps[:3], "oops\n", *steps[3:]]))
    with pytest.raises(UsageError, match="line 4 is damaged"):
        read_run(tmp_path)
    assert run.steps


def test_a_failure_before_the_first_step_is_told_if_memory_was_the_reason(tmp_path: Path):
    record = RunRecord(tmp_path / "a")
    record.update(error="OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB")
    record.finish("failed", {})
    (finding,) = diagnose(read_run(tmp_path / "a"))
    assert (finding.name, finding.setting) == ("out_of_memory", "model.dtype=bfloat16")
    record = RunRecord(tmp_path / "b")
    record.update(error="RuntimeError: the wire was cut")
    record.finish("failed", {})
    with pytest.raises(UsageError, match=r"has no steps: the run computed nothing \(status failed\)"):
        diagnose(read_run(tmp_path / "b"))


def test_too_little_to_say_is_said(tmp_path: Path):
    short = play(Work(at_once(1, 16, 12)), tmp_path / "short")
    with pytest.raises(UsageError, match=r"has 12 steps, too few to say anything: at least 20 are needed"):
        diagnose(short)
    with pytest.raises(UsageError, match=r"record\.steps=off"):
        diagnose(play(Work(at_once(1, 16, 40)), tmp_path / "off", steps="off"))


@pytest.mark.parametrize("seed", range(6))
def test_shares_are_shares_and_settings_can_be_read(tmp_path: Path, seed: int):
    rng = np.random.default_rng(seed)
    arrivals = [
        Arrival(
            float(rng.exponential(100 * i)),
            prompt(int(rng.integers(8, 300)), i),
            int(rng.integers(1, 60)),
        )
        for i in range(20)
    ]
    engine = {"max_num_seqs": int(rng.integers(1, 16)), "max_num_batched_tokens": int(rng.integers(16, 256))}
    sampling = {"n": int(rng.integers(1, 4)), "temperature": 1.0}
    for finding in diagnose(play(Work(arrivals, blocks=40, engine=engine, sampling=sampling), tmp_path)):
        assert isinstance(finding, Finding)
        assert 0 <= finding.share <= 1
        assert "  " not in finding.text and finding.text.endswith(".")
        assert finding.setting is None or "=" in finding.setting or "at once" in finding.setting
