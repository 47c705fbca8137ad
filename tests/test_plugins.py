"""Plugins: found, checked, and kept from harming anybody else."""

import logging
import types
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path

import pluggy
import pytest
from hydra import compose, initialize_config_dir

from xinfer import hookspecs, plugins
from xinfer.backends import API_VERSION, Backend
from xinfer.composing import config_folder, register
from xinfer.config import Config, ModelConfig
from xinfer.engine.engine import Engine
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import PluginError, RequestError
from xinfer.hookspecs import hookimpl
from xinfer.inputs import Prompt
from xinfer.plugins import load_plugins
from xinfer.session import Session
from xinfer.testing.fake import FakeRunner


@dataclass
class Empty:
    """Keys of a backend that has none."""


def module(**functions):
    made = types.ModuleType("made")
    for name, function in functions.items():
        setattr(made, name, hookimpl(function))
    return made


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Pretend that modules are installed under the entry-point group; an exception stands for a broken import."""

    def install(**modules):
        def load(entry: EntryPoint):
            if isinstance(modules[entry.name], BaseException):
                raise modules[entry.name]
            return modules[entry.name]

        monkeypatch.setattr(EntryPoint, "load", load)
        found = [EntryPoint(name, name, "xinfer") for name in modules]
        monkeypatch.setattr(plugins, "entry_points", lambda group: found)
        monkeypatch.delenv("XINFER_PLUGINS", raising=False)
        logging.getLogger("xinfer").propagate = True

    return install


def backend(name: str) -> Backend:
    return Backend(name, Empty, lambda context: FakeRunner())


def test_built_in_backends_come_through_the_hook(install):
    install()
    loaded = load_plugins()
    assert "eager" in loaded.backends
    assert {"llama", "mistral", "qwen2", "qwen3"} <= set(loaded.families)
    assert any("xinfer_backends" in plugin.hooks for plugin in loaded.loaded)


def test_a_strangers_backend_is_there(install):
    install(good=module(xinfer_backends=lambda: [backend("mine")]))
    assert load_plugins().backend("mine").name == "mine"


@pytest.mark.parametrize(
    ("broken", "reason"),
    [
        (ImportError("no module named 'left_pad'"), "left_pad"),  # G04
        (SystemExit(3), "SystemExit"),
        (module(xinfer_backends=lambda configuration: []), "configuration"),  # G01: an argument that is not there
        (module(xinfer_bakends=lambda: [backend("x")]), "xinfer_bakends"),  # G02: a misspelt hook
        (module(xinfer_backends=lambda: 1 / 0), "ZeroDivisionError"),  # G04: raising when called
    ],
)
def test_a_broken_plugin_is_a_warning_and_its_neighbour_lives(install, caplog, broken, reason):
    install(broken=broken, good=module(xinfer_backends=lambda: [backend("mine")]))
    loaded = load_plugins()
    assert "mine" in loaded.backends
    assert reason in loaded.failed["broken"]
    assert "broken" in caplog.text
    with pytest.raises(PluginError, match="could not be loaded"):
        loaded.backend("broken")


def test_a_refused_plugin_leaves_no_hook_behind(install):
    both = module(xinfer_backends=lambda: [backend("half")], xinfer_no_such_hook=lambda: None)
    install(half=both)
    assert "half" not in load_plugins().backends


def test_two_plugins_with_one_name_are_an_error(install):
    install(a=module(xinfer_backends=lambda: [backend("same")]), b=module(xinfer_backends=lambda: [backend("same")]))
    with pytest.raises(PluginError, match="'same'"):
        load_plugins()


@pytest.mark.parametrize(
    ("written_for", "taken"), [(None, True), (API_VERSION, True), (API_VERSION + 1, False), (0, False)]
)
def test_a_backend_of_another_contract_is_refused_by_name_and_its_neighbour_is_not(install, written_for, taken):
    other = replace(backend("other"), api_version=written_for)
    install(other=module(xinfer_backends=lambda: [other, backend("mine")]))
    loaded = load_plugins()
    assert loaded.backend("mine").name == "mine"
    if taken:
        assert loaded.backend("other") is other
    else:
        with pytest.raises(
            PluginError, match=rf"'other' was written for version {written_for} .* has version {API_VERSION}"
        ):
            loaded.backend("other")


def test_an_unknown_backend_lists_those_there_are(install):
    install()
    with pytest.raises(PluginError, match="did you mean 'eager'"):
        load_plugins().backend("eagre")


def test_the_allow_list_limits_what_is_loaded(install, monkeypatch):
    install(a=module(xinfer_backends=lambda: [backend("a")]), b=module(xinfer_backends=lambda: [backend("b")]))
    monkeypatch.setenv("XINFER_PLUGINS", "b")
    assert {"a", "b"} & set(load_plugins().backends) == {"b"}
    monkeypatch.setenv("XINFER_PLUGINS", "")
    assert not {"a", "b"} & set(load_plugins().backends)
    monkeypatch.setenv("XINFER_PLUGINS", "c")
    with pytest.raises(PluginError, match="'c', which is not installed"):
        load_plugins()


def test_pluggy_refuses_double_registration_and_positional_calls():  # G05
    manager = pluggy.PluginManager("xinfer")
    manager.add_hookspecs(hookspecs)
    plugin = module(xinfer_on_step=lambda step: None)
    manager.register(plugin, "one")
    with pytest.raises(ValueError, match="already registered"):
        manager.register(plugin, "two")
    with pytest.raises(ValueError, match="already registered"):
        manager.register(module(), "one")
    with pytest.raises(TypeError):
        manager.hook.xinfer_on_step(1)


def test_observers_hear_of_everything_in_order_and_one_that_raises_is_silenced(install, caplog):
    heard = []

    def angry(step):
        heard.append("angry")
        raise RuntimeError("enough")

    quiet = module(
        xinfer_on_token=lambda sequence, token: heard.append(("token", sequence.index, token.token_id)),
        xinfer_on_request_finished=lambda output: heard.append(("finished", output.token_ids)),
    )
    install(quiet=quiet, angry=module(xinfer_on_step=angry))
    loaded = load_plugins()
    engine = Engine(FakeRunner(), None, Limits(), observers=loaded.observers())
    engine.add_request([1, 2], SamplingParams(max_tokens=3))
    tokens = [token.token_id for step in engine.run() for token in step.tokens]
    told = [entry for entry in heard if entry != "angry"]
    assert told == [*(("token", 0, token) for token in tokens), ("finished", tuple(tokens))]
    assert heard.count("angry") == 1
    assert loaded.silenced == {"angry": "RuntimeError: enough"}
    assert caplog.text.count("angry") == 1


def test_where_nobody_listens_nobody_is_called(install):
    install()
    observers = load_plugins().observers()
    assert observers.on_step == observers.on_token == observers.on_request_finished == ()


def test_run_hooks_get_the_run(install):
    seen = []
    install(tracker=module(xinfer_on_run_start=lambda run: seen.append(run)))
    load_plugins().tell("xinfer_on_run_start", "a run")
    assert seen == ["a run"]


def test_a_plugin_that_is_no_backend_brings_configs(install):
    @dataclass
    class Tracker:
        folder: str = "here"

    install(tracker=module(xinfer_configs=lambda: [("tracker", "local", Tracker)]))
    register(load_plugins())
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", overrides=["+plugin/tracker=local", "plugin.tracker.folder=there"])
    assert config.plugin.tracker.folder == "there"


def test_the_first_tokenizer_that_knows_the_model_is_taken(install, tiny_llama: Path):
    class Bytes:
        chat_template = None

        def encode(self, text: str) -> list[int]:
            return list(text.encode())

    answers = {"refuses": module(xinfer_tokenizer=lambda model: None)}
    answers["knows"] = module(xinfer_tokenizer=lambda model: Bytes() if model.family.name == "llama" else None)
    install(**answers)
    loaded = load_plugins()
    config = Config(task="generate", model=ModelConfig(reference=str(tiny_llama)))
    config.backend = types.SimpleNamespace(name="eager")
    assert Session(config, loaded).encode(Prompt("ab")) == ([97, 98], False)


def test_the_end_of_a_run_is_told_though_one_listener_raises(install):
    seen = []
    install(
        bad=module(xinfer_on_run_end=lambda run: 1 / 0), good=module(xinfer_on_run_end=lambda run: seen.append(run))
    )
    load_plugins().tell("xinfer_on_run_end", "a run")
    assert seen == ["a run"]


class Ban:
    """Forbids a token to the requests that ask for it."""

    name = "ban"

    def check(self, arguments):
        if not isinstance(arguments, int):
            raise RequestError(f"extra.ban={arguments!r}: a token id is expected")

    def apply(self, logits, sequences):
        for row, sequence in enumerate(sequences):
            if (token := sequence.request.params.extra.get("ban")) is not None:
                logits[row, token] = float("-inf")
        return logits


def test_a_logits_processor_changes_the_rows_that_ask_and_no_others(install):
    install(ban=module(xinfer_logits_processors=lambda info: [Ban()]))
    runner = FakeRunner()
    processors = load_plugins().logits_processors(runner.info)

    def first(extra) -> list[int]:
        engine = Engine(runner, None, Limits(), processors=processors)
        for arguments in extra:
            engine.add_request([5, 6], SamplingParams(temperature=0, max_tokens=1, extra=arguments))
        return [token.token_id for step in engine.run() for token in step.tokens]

    (likeliest,) = first([{}])
    banned, free = first([{"ban": likeliest}, {}])
    assert free == likeliest != banned


def test_arguments_of_a_logits_processor_are_checked_when_a_request_is_added(install):
    install(ban=module(xinfer_logits_processors=lambda info: [Ban()]))
    engine = Engine(FakeRunner(), None, Limits(), processors=load_plugins().logits_processors(FakeRunner().info))
    with pytest.raises(RequestError, match="a token id is expected"):
        engine.add_request([1], SamplingParams(extra={"ban": "x"}))
    with pytest.raises(RequestError, match=r"extra names 'bna'.*there are: ban"):
        engine.add_request([1], SamplingParams(extra={"bna": 1}))
    assert not engine.has_work


def test_two_logits_processors_of_one_name_are_an_error(install):
    install(
        a=module(xinfer_logits_processors=lambda info: [Ban()]), b=module(xinfer_logits_processors=lambda info: [Ban()])
    )
    with pytest.raises(PluginError, match="'ban'"):
        load_plugins().logits_processors(FakeRunner().info)
