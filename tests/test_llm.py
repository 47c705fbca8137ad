"""`LLM`: what the command line does, from Python, and nothing of the host program is touched."""

import gc
import logging
import os
import random
import signal
import subprocess
import sys
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.singleton import Singleton

import xinfer
from xinfer import LLM, FinishReason, SamplingParams, composing
from xinfer.config import Config
from xinfer.engine.random import derive
from xinfer.errors import ConfigError, EngineStoppedError, OverloadedError, PluginError, RequestError
from xinfer.inputs import Prompt
from xinfer.plugins import load_plugins
from xinfer.session import Session
from xinfer.testing.fake import FakeRunner
from xinfer.testing.tiny import tiny_config, write_folder

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(max_tokens=400, ignore_eos=True)
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "the sky, 'the' <sea>?"}]


@pytest.fixture(scope="module")
def llm(tiny_llama: Path):
    with LLM(tiny_llama, backend="eager", seed=5) as made:
        yield made


@pytest.fixture
def fake(fake_backend):
    """Make an `LLM` on a `FakeRunner`; all are closed in the end, with no block in use."""
    made = []

    def make(create=FakeRunner, overrides=(), **options) -> LLM:
        fake_backend(create)
        made.append(LLM(backend="fake", overrides=overrides, **({"seed": 3} | options)))
        return made[-1]

    yield make
    for one in made:
        one.close()


def used(llm: LLM) -> int:
    engine = llm._thread.engine
    return engine.scheduler.pool.num_used


# ---- what comes out


def test_greedy_tokens_are_those_of_transformers(llm: LLM, tiny_llama: Path):
    from transformers import AutoModelForCausalLM

    reference = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32).eval()
    prompts = ["the cat", "a", "the the the"]
    outputs = llm.generate(prompts, GREEDY)
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([output.prompt_token_ids])
        padding = list(range(llm.tokenizer.max_token_id + 1, reference.config.vocab_size))
        lengths = {"max_new_tokens": 12, "min_new_tokens": 12}
        expected = reference.generate(ids, do_sample=False, **lengths, pad_token_id=0, suppress_tokens=padding)
        assert output.prompt == prompt
        assert output.outputs[0].token_ids == tuple(expected[0, ids.shape[1] :].tolist())
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
        assert output.outputs[0].stats.generated_tokens == 12


def test_a_prompt_may_be_text_or_ids_one_or_several(llm: LLM):
    (text,) = llm.generate("the cat", GREEDY)
    ids = text.prompt_token_ids
    for prompts in (["the cat"], list(ids), [list(ids)], np.array(ids), [np.array(ids)], ("the cat",)):
        (same,) = llm.generate(prompts, GREEDY)
        assert (same.prompt_token_ids, same.outputs[0].token_ids) == (ids, text.outputs[0].token_ids)
    assert llm.generate(list(ids), GREEDY)[0].prompt is None
    assert llm.generate([]) == []


def test_each_prompt_may_have_its_own_parameters(llm: LLM):
    outputs = llm.generate(["a", "b"], [SamplingParams(max_tokens=2, n=2, ignore_eos=True), GREEDY])
    assert [[len(o.token_ids) for o in output.outputs] for output in outputs] == [[2, 2], [12]]


def test_without_parameters_they_are_the_defaults_of_the_class(llm: LLM):
    (output,) = llm.generate("a")
    assert output.outputs[0].params == SamplingParams()
    assert llm.configured_params.temperature == 0.8  # what the command line takes


def test_logprobs_of_prompt_and_output(llm: LLM):
    params = SamplingParams(temperature=0, max_tokens=4, logprobs=2, prompt_logprobs=0, ignore_eos=True)
    (output,) = llm.generate("the cat", params)
    assert len(output.prompt_logprobs) == len(output.prompt_token_ids)
    assert output.prompt_logprobs[0] is None
    assert [entry.token_id for entry in output.outputs[0].logprobs] == list(output.outputs[0].token_ids)


def test_a_stop_string_that_is_a_special_token_ends_the_text(llm: LLM):
    (free,) = llm.generate("a", SamplingParams(temperature=0, logit_bias={257: 100}, max_tokens=3))
    assert len(free.outputs[0].token_ids) == 3
    (output,) = llm.generate("a", SamplingParams(temperature=0, logit_bias={257: 100}, stop="<|im_start|>"))
    assert output.outputs[0].token_ids == (257,)
    assert (output.outputs[0].text, output.outputs[0].finish_reason) == ("", FinishReason.STOP)


def test_chat_gives_the_ids_that_the_command_line_gives(llm: LLM, tiny_llama: Path):
    plugins = load_plugins()
    session = Session(composing.compose([f"model.reference='{tiny_llama}'"], plugins), plugins)
    ids, chat = session.encode(Prompt(MESSAGES[1]["content"], system=MESSAGES[0]["content"]))
    assert chat
    one, other = llm.chat([MESSAGES, MESSAGES[1:]], GREEDY)
    assert one.prompt_token_ids == tuple(ids) != other.prompt_token_ids
    assert llm.chat(MESSAGES, GREEDY)[0].outputs[0].token_ids == one.outputs[0].token_ids


def test_it_draws_what_the_command_line_draws(llm: LLM, tiny_llama: Path, xinfer):
    done = xinfer("--model", str(tiny_llama), "record=none", "--seed", "9", "--max-tokens", "20", "--prompt", "the sky")
    with LLM(tiny_llama, seed=9) as again:
        (output,) = again.chat(
            [{"role": "user", "content": "the sky"}], replace(again.configured_params, max_tokens=20)
        )
    assert done.stdout.rstrip("\n") == output.outputs[0].text.rstrip("\n")


# ---- seeds


def test_requests_are_counted_over_calls(fake):
    llm = fake()
    first, second = (llm.generate("same", LONG)[0].outputs[0] for _ in range(2))
    assert first.token_ids != second.token_ids
    assert (first.seed, second.seed) == (3, derive(3, 1))
    again = fake()
    together = again.generate(["same", "same"], LONG)
    assert [o.outputs[0].token_ids for o in together] == [first.token_ids, second.token_ids]
    fixed = SamplingParams(max_tokens=400, ignore_eos=True, seed=3)
    assert llm.generate("same", fixed)[0].outputs[0].token_ids == first.token_ids


def test_the_seed_is_given_configured_or_drawn(fake):
    assert fake(seed=0).seed == 0
    assert fake(overrides=["sampling.seed=8"], seed=None).seed == 8
    assert fake(overrides=["sampling.seed=8"], seed=np.int64(4)).seed == 4
    assert fake(seed=None).seed != fake(seed=None).seed
    with pytest.raises(RequestError, match="seed=-1"):
        fake(seed=-1)


# ---- streaming


def test_samples_keep_their_own_in_deltas_and_results(fake):
    params = SamplingParams(n=2, max_tokens=32, ignore_eos=True, logprobs=0)
    (whole,) = fake().generate("hello", params)
    deltas = list(fake().stream("hello", params))
    assert whole.outputs[0].token_ids != whole.outputs[1].token_ids
    for sample, output in enumerate(whole.outputs):
        own = [delta for delta in deltas if delta.sample == sample]
        assert output.sample == sample
        assert "".join(delta.text for delta in own) == output.text
        assert [delta.token_id for delta in own] == [*output.token_ids, None]
        assert [entry.token_id for delta in own for entry in delta.logprobs or ()] == list(output.token_ids)
        assert own[-1].output.token_ids == output.token_ids
        assert own[-1].finish_reason is FinishReason.LENGTH
        assert all(delta.finish_reason is None for delta in own[:-1])


def _says(text: str):
    return lambda: FakeRunner(script=dict(enumerate(text.encode(), 3)))


def test_text_that_may_become_a_stop_string_is_held_back(fake):
    params = SamplingParams(temperature=0, max_tokens=50, stop="DEFGHIJ")
    *tokens, end = fake(_says("DEFGHIJKL")).stream("ABC", params)
    assert [delta.text for delta in tokens] == [""] * 7
    assert (end.text, end.output.text, end.finish_reason) == ("", "", FinishReason.STOP)
    *tokens, end = fake(_says("DEFGHxyz")).stream("ABC", SamplingParams(temperature=0, max_tokens=8, stop="DEFGHIJ"))
    assert "".join(delta.text for delta in tokens) + end.text == "DEFGHxyz"
    *tokens, end = fake(_says("xyDE")).stream("ABC", SamplingParams(temperature=0, max_tokens=4, stop="DEFGHIJ"))
    assert ("".join(delta.text for delta in tokens), end.text) == ("xy", "DE")  # held back until the end


def test_closing_a_stream_frees_its_blocks(fake):
    llm = fake()
    stream = llm.stream("hello", LONG)
    next(stream)
    assert used(llm) > 0
    stream.close()
    assert used(llm) == 0
    for _ in llm.stream("hello", LONG):
        break
    gc.collect()
    assert used(llm) == 0


def test_calls_within_a_stream_share_the_engine(fake):
    llm, params = fake(), SamplingParams(max_tokens=40, ignore_eos=True, seed=1)
    alone = llm.generate("inner", params)[0].outputs[0].token_ids
    pieces = []
    for delta in llm.stream("outer", params):
        if len(pieces) < 3:
            assert llm.generate("inner", params)[0].outputs[0].token_ids == alone
        pieces.append(delta.text)
    assert "".join(pieces) == llm.generate("outer", params)[0].outputs[0].text


def test_threads_may_call_at_once(fake):
    llm, params = fake(), SamplingParams(max_tokens=60, ignore_eos=True, seed=1)
    prompts = [f"prompt {i}" for i in range(8)]
    expected = [o.outputs[0].token_ids for o in llm.generate(prompts, params)]
    found: dict[int, tuple[int, ...]] = {}

    def ask(place: int) -> None:
        found[place] = llm.generate(prompts[place], params)[0].outputs[0].token_ids

    threads = [threading.Thread(target=ask, args=(place,)) for place in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[place] for place in range(8)] == expected


# ---- what goes wrong


def test_a_refused_request_runs_nothing_and_harms_nothing(fake):
    llm = fake()
    with pytest.raises(RequestError, match=r"prompts\[1\]: the prompt has no tokens"):
        llm.generate(["a", "", "c"], LONG)
    assert used(llm) == 0
    with pytest.raises(RequestError, match=r"prompts\[0\]: prompt token 260 is not an id"):
        llm.generate([[260], [1]], LONG)
    with pytest.raises(RequestError, match="chat template"):
        llm.chat(MESSAGES)
    with pytest.raises(RequestError, match="2 params for 1 prompts"):
        llm.generate("a", [LONG, LONG])
    with pytest.raises(RequestError, match="SamplingParams are expected"):
        llm.generate("a", {"temperature": 0})
    for nonsense in (b"bytes", [None], [{"role": "user", "content": "a"}], [3.5]):
        with pytest.raises(RequestError):
            llm.generate(nonsense, LONG)
    with pytest.raises(RequestError, match="timeout_s=-1"):
        next(llm.stream("a", LONG, timeout_s=-1))
    assert len(llm.generate("a", LONG)[0].outputs[0].token_ids) == 400


def test_too_many_at_once_are_refused(fake):
    llm = fake(overrides=["engine.max_queue=2"])
    with pytest.raises(OverloadedError, match="max_queue"):
        llm.generate(["a", "b", "c"], LONG)
    assert len(llm.generate(["a", "b"], LONG)) == 2


def test_a_request_that_fails_leaves_its_neighbours_alone(fake):
    llm = fake(lambda: FakeRunner(nan_rows=lambda context: context[0] == ord("x") and len(context) > 5))
    bad, good = llm.generate(["x", "y"], LONG)
    assert bad.outputs[0].finish_reason is FinishReason.ERROR
    assert "finite" in bad.outputs[0].error
    assert len(good.outputs[0].token_ids) == 400


def test_a_request_ends_when_its_time_is_over(fake):
    def endless():
        return FakeRunner(max_model_len=1 << 20, num_blocks=1 << 16)

    endlessly = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = fake(endless).generate("a", endlessly, timeout_s=0.05)
    assert output.outputs[0].finish_reason is FinishReason.TIMEOUT
    (output,) = fake(endless, ["engine.timeout_s=0.05"]).generate("a", endlessly)
    assert output.outputs[0].finish_reason is FinishReason.TIMEOUT


class _Interrupting(FakeRunner):
    """Sends this process what Ctrl-C sends, in its third step."""

    def forward(self, batch):
        if self.steps == 2:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
        return super().forward(batch)


@pytest.fixture
def interruptible():
    """As a program in the foreground; what a shell starts in the background never hears of Ctrl-C."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_calls_requests(fake):
    llm = fake(_Interrupting)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], LONG)
    assert used(llm) == 0
    assert len(llm.generate("c", LONG)[0].outputs[0].token_ids) == 400


class _Failing(FakeRunner):
    def forward(self, batch):
        if self.steps == 2:
            raise RuntimeError("out of order")
        return super().forward(batch)


def test_after_the_backend_has_failed_every_call_says_so(fake):
    llm = fake(_Failing)
    for _ in range(2):
        with pytest.raises(EngineStoppedError, match="RuntimeError: out of order") as caught:
            llm.generate(["a", "b"], LONG)
        assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(EngineStoppedError):
        next(llm.stream("a"))
    llm.close()


def test_a_closed_one_takes_no_more_requests(fake_backend):
    (runners, threads) = (fake_backend(), threading.active_count())
    with LLM(backend="fake") as llm:
        stream = llm.stream("a", LONG)
        next(stream)
    assert runners[0].closed
    assert list(stream)[-1].finish_reason in (FinishReason.ABORT, FinishReason.LENGTH)
    assert threading.active_count() == threads
    with pytest.raises(EngineStoppedError, match="closed"):
        llm.generate("a")
    llm.close()


def test_closing_gives_back_memory(tiny_llama: Path):
    llm = LLM(tiny_llama)
    llm.generate("a", GREEDY)
    runner = weakref.ref(llm._service.session.runner)
    llm.close()
    gc.collect()
    assert runner() is None


def test_one_whose_engine_is_refused_gives_back_its_runner(fake_backend):
    class Modest(FakeRunner):
        def __init__(self) -> None:
            super().__init__()
            self.info = replace(self.info, levels=frozenset({"rerun"}))

    runners = fake_backend(Modest)
    with pytest.raises(ConfigError, match="does not promise"):
        LLM(backend="fake", overrides=["engine.determinism=invariant"])
    assert runners[0].closed


def test_one_that_is_let_go_ends_by_itself(fake_backend):
    (runners, threads) = (fake_backend(), threading.active_count())
    llm = LLM(backend="fake")
    llm.generate("a")
    del llm
    gc.collect()
    assert runners[0].closed
    assert threading.active_count() == threads


def test_several_in_one_process(fake):
    one, other = fake(), fake(overrides=["engine.max_num_seqs=2"])
    assert (one.config.engine.max_num_seqs, other.config.engine.max_num_seqs) == (32, 2)
    assert one.generate("a", LONG)[0].outputs[0].token_ids == other.generate("a", LONG)[0].outputs[0].token_ids


# ---- configuration


@pytest.mark.parametrize("name", ["a=b, c", 'it\'s "quoted"', "[list]", "{of: things}", "null", "${home} \\", "ü 1e3"])
def test_a_models_path_is_taken_word_for_word(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str):
    write_folder(tmp_path / name, tiny_config("llama", num_hidden_layers=1), seed=0)
    monkeypatch.chdir(tmp_path)
    for model in (name, Path(name), tmp_path / name):
        with LLM(model, overrides=["model.load_format=dummy"]) as llm:
            assert llm.config.model.reference == str(model)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"overrides": ["engine.max_num_seq=1"]}, ConfigError, "did you mean 'engine.max_num_seqs'"),
        ({"overrides": ["engine.max_num_seqs=many"]}, ConfigError, "could not be converted to Integer"),
        ({"overrides": ["engine.max_num_seqs=-1"]}, ConfigError, "is out of range"),
        ({"overrides": ["engine.policy"]}, ConfigError, "can't read engine.policy"),
        ({"overrides": "engine.max_num_seqs=1"}, ConfigError, "a list of them is expected"),
        ({"backend": "eagr"}, ConfigError, "did you mean 'eager'"),
        ({"backend": "a=b,c"}, ConfigError, "backend=a=b,c is unknown"),
        ({"model": "/nowhere/at all"}, xinfer.XinferError, "/nowhere/at all"),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options, error, message: str):
    with pytest.raises(error, match=message) as caught:
        LLM(**options)
    assert "\n" not in str(caught.value)


def test_a_backend_whose_plugin_failed_says_why(monkeypatch: pytest.MonkeyPatch, fake_backend):
    fake_backend()

    def load(entry):
        raise ImportError("no such driver")

    monkeypatch.setattr("importlib.metadata.EntryPoint.load", load)
    with pytest.raises(PluginError, match="no such driver"):
        LLM(backend="fake")


def test_an_application_that_uses_hydra_itself_is_not_disturbed(fake, tmp_path: Path):
    (tmp_path / "app.yaml").write_text("defaults:\n  - backend: none\n  - _self_\n")
    ConfigStore.instance().store(group="backend", name="none", node={"mine": 1})
    try:
        with initialize_config_dir(str(tmp_path), job_name="app", version_base="1.2"):
            before, instances = GlobalHydra.instance(), dict(Singleton._instances)
            store = set(ConfigStore.instance().repo), set(ConfigStore.instance().repo["backend"])
            llm = fake()
            with pytest.raises(ConfigError):
                fake(overrides=["no.such=1"])
            assert GlobalHydra.instance() is before
            assert Singleton._instances == instances
            assert (set(ConfigStore.instance().repo), set(ConfigStore.instance().repo["backend"])) == store
            assert compose("app") == {"backend": {"mine": 1}}
        assert not GlobalHydra.instance().is_initialized()
        assert llm.generate("a")
    finally:
        del ConfigStore.instance().repo["backend"]["none.yaml"]


def test_compose_gives_what_the_command_line_gives():
    composed = composing.compose(["engine.max_num_seqs=7"], load_plugins())
    assert isinstance(composed, Config)
    assert composed.engine.max_num_seqs == 7
    assert (composed.task, composed.model.reference) == ("generate", composing.default_model())
    with pytest.raises(ConfigError, match=r"model.reference must be given"):
        composing.compose(["model=custom"], load_plugins())


# ---- the host program


def test_the_host_keeps_its_generators_signals_and_logging(tiny_llama: Path):
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers = [list(logging.getLogger(name).handlers) for name in (None, "xinfer")]
    environment = dict(os.environ)
    with LLM(tiny_llama) as llm:
        llm.generate("a")
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    assert {number: signal.getsignal(number) for number in signals} == signals
    assert [list(logging.getLogger(name).handlers) for name in (None, "xinfer")] == handlers
    assert dict(os.environ) == environment


def test_it_prints_nothing_writes_nothing_and_may_be_left_open(tiny_llama: Path, tmp_path: Path):
    program = f"""
import sys
import xinfer
assert "hydra" not in sys.modules, "importing xinfer became slower"
llm = xinfer.LLM({str(tiny_llama)!r})
llm.generate("a")
stream = llm.stream("a", xinfer.SamplingParams(max_tokens=200, ignore_eos=True))
next(stream)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert not list(tmp_path.iterdir())
