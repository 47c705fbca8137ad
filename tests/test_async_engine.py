"""`AsyncEngine`: each request its own, however many there are, however slowly and however short anybody reads."""

import asyncio
import gc
import threading
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path

import pytest

from xinfer import LLM, AsyncEngine, FinishReason, SamplingParams
from xinfer.errors import ConfigError, EngineStoppedError, ModelError, OverloadedError, RequestError
from xinfer.testing.fake import FakeRunner

LONG = SamplingParams(max_tokens=400, ignore_eos=True)
SHORT = SamplingParams(max_tokens=5, ignore_eos=True)
PATIENCE = 120  # seconds until a test that waits in vain fails


def run(work) -> None:
    """Run a coroutine; afterwards no thread, block or runner is left."""
    threads = threading.active_count()

    async def limited():
        return await asyncio.wait_for(work, PATIENCE)

    asyncio.run(limited())
    gc.collect()
    assert threading.active_count() == threads


@pytest.fixture
def fake(fake_backend):
    """Make an engine on a `FakeRunner`."""

    def make(create: Callable[[], FakeRunner] = FakeRunner, *overrides: str, **options) -> AsyncEngine:
        fake_backend(create)
        return AsyncEngine(backend="fake", overrides=overrides, **({"seed": 3} | options))

    return make


async def whole(engine: AsyncEngine, prompt, params=LONG, **options):
    """A request's deltas, and its first sample's result."""
    deltas = [delta async for delta in engine.generate(prompt, params, **options)]
    (output,) = [delta.output for delta in deltas if delta.output is not None and delta.sample == 0]
    return deltas, output


async def until(true: Callable[[], bool]) -> None:
    """Wait for a condition."""
    while not true():
        await asyncio.sleep(0.001)


def used(engine: AsyncEngine) -> int:
    return engine._thread.engine.scheduler.pool.num_used


class Gated(FakeRunner):
    """Computes a step only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = threading.Semaphore(0)
        self.arrived = 0

    def forward(self, batch):
        self.arrived += 1
        assert self.gate.acquire(timeout=PATIENCE)
        return super().forward(batch)


# ---- what comes out


def test_many_requests_at_once_are_each_as_if_alone(fake, fake_backend):
    prompts = [f"request {i}" * (1 + i % 5) for i in range(100)]
    params = [SamplingParams(max_tokens=10 + i % 30, seed=i, n=1 + i % 2, ignore_eos=True) for i in range(100)]

    async def work():
        async with fake(lambda: FakeRunner(num_blocks=40)) as engine:
            found = await asyncio.gather(*(whole(engine, p, q) for p, q in zip(prompts, params, strict=True)))
            assert used(engine) == 0
        with LLM(backend="fake") as llm:
            for place, (deltas, output) in enumerate(found):
                (alone,) = llm.generate(prompts[place], params[place])
                assert output.token_ids == alone.outputs[0].token_ids
                for sample in alone.outputs:
                    own = [delta for delta in deltas if delta.sample == sample.sample]
                    assert "".join(delta.text for delta in own) == sample.text
                    assert tuple(t for delta in own for t in delta.token_ids) == sample.token_ids

    run(work())


def test_a_prompt_may_be_text_ids_or_messages(tiny_llama: Path):
    messages = [{"role": "user", "content": "the cat"}]
    greedy = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)

    async def work():
        async with AsyncEngine(tiny_llama, backend="eager") as engine:
            _, text = await whole(engine, "the cat", greedy)
            _, ids = await whole(engine, list(text.prompt_token_ids), greedy)
            _, chat = await whole(engine, messages, greedy)
        assert ids.token_ids == text.token_ids
        with LLM(tiny_llama) as llm:
            (expected,) = llm.chat(messages, greedy)
        assert (chat.prompt_token_ids, chat.token_ids) == (expected.prompt_token_ids, expected.outputs[0].token_ids)

    run(work())


def test_what_a_slow_reader_misses_is_put_together(fake):
    params = SamplingParams(max_tokens=300, ignore_eos=True, n=2, logprobs=0, seed=1)

    async def work():
        async with fake() as engine:
            _, expected = await whole(engine, "slow", params)
            slow = engine.generate("slow", params)
            first = await anext(slow)
            await whole(engine, "others go on")
            await until(lambda: not used(engine))
            rest = [delta async for delta in slow]
            assert len(rest) <= 2 * 2  # of what had been taken, and of all that came since
            own = [delta for delta in [first, *rest] if delta.sample == 0]
            assert own[-1].output.token_ids == tuple(t for delta in own for t in delta.token_ids) == expected.token_ids
            assert "".join(delta.text for delta in own) == expected.text
            assert [p for delta in own for p in delta.logprobs or ()] == list(expected.logprobs)

    run(work())


def test_text_that_may_become_a_stop_string_is_held_back(fake):
    script = dict(enumerate(b"DEFGHIJKL", 3))

    async def work():
        async with fake(lambda: FakeRunner(script=script)) as engine:
            deltas, output = await whole(engine, "ABC", SamplingParams(temperature=0, max_tokens=9, stop="DEFGHIJ"))
            assert "".join(delta.text for delta in deltas) == output.text == ""
            assert output.finish_reason is FinishReason.STOP

    run(work())


def test_the_urgent_overtake_where_the_policy_says_so(fake):
    async def work():
        async with fake(Gated, "engine.policy=priority", "engine.max_num_seqs=1") as engine:
            ended = []

            async def ask(name: str, priority: int) -> None:
                await whole(engine, name, SHORT, priority=priority)
                ended.append(name)

            tasks = [asyncio.create_task(ask("first", 0))]
            await until(lambda: engine._service.session.runner.arrived == 1)
            for name, priority in (("late", 5), ("soon", 0)):
                tasks.append(asyncio.create_task(ask(name, priority)))
                await asyncio.sleep(0)  # so that it is left with the engine before the next
            await asyncio.sleep(0.01)
            engine._service.session.runner.gate.release(100)
            await asyncio.gather(*tasks)
            assert ended == ["first", "soon", "late"]

    run(work())


# ---- ends before the end


@pytest.mark.parametrize("how", ["cancel", "close", "let go"])
def test_a_request_that_nobody_reads_any_more_ends_within_a_step(fake, how: str):
    async def work():
        async with fake(Gated) as engine:
            runner = engine._service.session.runner
            reading = asyncio.Event()

            async def read():
                async with aclosing(engine.generate("read", LONG)) as stream:
                    async for _ in stream:
                        reading.set()
                        if how == "close":
                            await until(second)
                            break

            async def leave():
                async for _ in engine.generate("left", LONG):
                    reading.set()
                    await until(second)
                    break

            def second() -> bool:
                return runner.arrived == 2  # the engine computes its second step

            task = asyncio.create_task(leave() if how == "let go" else read())
            runner.gate.release()
            await reading.wait()
            await until(second)
            if how == "cancel":
                task.cancel()
            await asyncio.wait([task])
            await asyncio.sleep(0.01)
            runner.gate.release()
            await until(lambda: not engine._thread.engine.has_work)
            assert used(engine) == 0
            assert runner.arrived == 2, "a step was computed for nobody"

    run(work())


def test_a_request_may_be_cancelled_before_it_runs(fake):
    async def work():
        async with fake(Gated) as engine:
            runner = engine._service.session.runner
            busy = asyncio.create_task(whole(engine, "busy", SHORT))
            await until(lambda: runner.arrived == 1)
            task = asyncio.create_task(whole(engine, "never", LONG))
            await asyncio.sleep(0.01)
            task.cancel()
            await asyncio.wait([task])
            runner.gate.release(100)
            _, output = await busy
            assert len(output.token_ids) == 5
            assert runner.arrived == 5

    run(work())


def test_a_request_ends_when_its_time_is_over(fake):
    endless = SamplingParams(max_tokens=None, ignore_eos=True)

    async def work():
        async with fake(lambda: FakeRunner(max_model_len=1 << 20, num_blocks=1 << 16)) as engine:
            late, other = await asyncio.gather(
                whole(engine, "late", endless, timeout_s=0.05), whole(engine, "other", SHORT, timeout_s=PATIENCE)
            )
            assert late[1].finish_reason is FinishReason.TIMEOUT
            assert other[1].finish_reason is FinishReason.LENGTH

    run(work())


def test_closing_ends_what_runs_and_refuses_what_comes(fake):
    async def work():
        engine = fake(Gated)
        await engine.start()
        runner = engine._service.session.runner
        tasks = [asyncio.create_task(whole(engine, f"{i}", LONG)) for i in range(3)]
        runner.gate.release(2)
        await until(lambda: runner.arrived == 3)
        closing = asyncio.create_task(engine.close())
        await asyncio.sleep(0)
        runner.gate.release()
        for _, output in await asyncio.gather(*tasks):
            assert output.finish_reason is FinishReason.ABORT
            assert len(output.token_ids) in (2, 3)
        await closing
        assert runner.closed
        await engine.close()
        with pytest.raises(EngineStoppedError, match="closed"):
            await anext(engine.generate("late"))
        with pytest.raises(EngineStoppedError):
            await engine.start()

    run(work())


def test_one_that_never_started_closes_too(fake):
    async def work():
        engine = fake()
        await engine.close()
        with pytest.raises(EngineStoppedError):
            await anext(engine.generate("late"))

    run(work())


# ---- what goes wrong


def test_a_refused_request_raises_before_anything_and_harms_nobody(fake):
    async def work():
        async with fake() as engine:
            good = asyncio.create_task(whole(engine, "good"))
            for prompt, params, message in [
                ("", LONG, "no tokens"),
                ([1, 999], LONG, "999 is not an id"),
                ("x", SamplingParams(max_tokens=512), "the context holds 512"),
                ("x", SamplingParams(extra={"nobody": 1}), "no such logits processor"),
                ([{"role": "user", "content": "x"}], LONG, "chat template"),
                (7, LONG, "is no prompt"),
            ]:
                with pytest.raises(RequestError, match=message):
                    await anext(engine.generate(prompt, params))
            with pytest.raises(RequestError, match="timeout_s"):
                await anext(engine.generate("x", LONG, timeout_s=0))
            assert len((await good)[1].token_ids) == 400

    run(work())


def test_a_full_queue_refuses(fake):
    async def work():
        async with fake(Gated, "engine.max_queue=2", "engine.max_num_seqs=1") as engine:
            runner = engine._service.session.runner
            tasks = [asyncio.create_task(whole(engine, "running", SHORT))]
            await until(lambda: runner.arrived == 1)
            tasks += [asyncio.create_task(whole(engine, "waiting", SHORT)) for _ in range(3)]
            runner.gate.release(100)
            results = await asyncio.gather(*tasks, return_exceptions=True)
            assert [isinstance(result, OverloadedError) for result in results] == [False, False, False, True]

    run(work())


class Failing(FakeRunner):
    def forward(self, batch):
        if self.steps == 3:
            raise ZeroDivisionError("nothing left")
        return super().forward(batch)


def test_a_crash_ends_all_requests_and_closing_still_works(fake):
    async def work():
        async with fake(Failing) as engine:
            results = await asyncio.gather(*(whole(engine, f"{i}") for i in range(5)), return_exceptions=True)
            for result in results:
                assert isinstance(result, EngineStoppedError)
                assert "ZeroDivisionError: nothing left" in str(result)
                assert isinstance(result.__cause__, ZeroDivisionError)
            with pytest.raises(EngineStoppedError, match="nothing left"):
                await anext(engine.generate("late"))

    run(work())


def test_what_came_before_a_crash_is_read_first(fake):
    async def work():
        async with fake(Failing) as engine:
            stream = engine.generate("a", LONG)
            tokens = []

            async def read():
                async for delta in stream:
                    tokens.extend(delta.token_ids)
                    await asyncio.wrap_future(engine._thread.ended)

            with pytest.raises(EngineStoppedError):
                await read()
            assert len(tokens) == 3

    run(work())


def test_a_model_that_cannot_be_loaded_is_said_when_it_starts(tmp_path: Path):
    async def work():
        engine = AsyncEngine(tmp_path)
        for _ in range(2):
            with pytest.raises(ModelError):
                await engine.start()
        await engine.close()
        with pytest.raises(ConfigError, match="did you mean"):
            AsyncEngine(overrides=["engin.policy=fcfs"])

    run(work())


def test_a_request_ends_when_its_loop_is_gone(fake):
    engine = fake(Gated)

    async def begin():
        await engine.start()
        engine._service.session.runner.gate.release()
        stream = engine.generate("left", LONG)
        await anext(stream)
        return stream

    loop = asyncio.new_event_loop()
    left = loop.run_until_complete(begin())
    loop.close()

    async def others_go_on():
        runner = engine._service.session.runner
        await until(lambda: runner.arrived == 2)
        runner.gate.release()
        await until(lambda: not engine._thread.engine.has_work)
        assert runner.arrived == 2
        runner.gate.release(5)
        _, output = await whole(engine, "good", SHORT)
        assert len(output.token_ids) == 5
        await engine.close()

    asyncio.run(others_go_on())
    del left


def test_several_engines_and_loops_at_once(fake):
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=1)
    engines = [fake(), fake()]
    found = {}

    def ask(place: int) -> None:
        async def work():
            found[place] = (await whole(engines[place % 2], f"{place // 2}", params))[1].token_ids

        asyncio.run(work())

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(found[place] == found[place + 1] for place in (0, 2, 4))
    assert len(set(found.values())) == 3

    async def close():
        await asyncio.gather(*(engine.close() for engine in engines))

    asyncio.run(close())
