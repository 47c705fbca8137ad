"""A run's settings come from the request, else the configuration, else the model's maker, else they are built in."""

import json
import logging
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from xinfer.config import Config, EngineConfig, ModelConfig, SamplingConfig
from xinfer.engine.observers import Observers
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import ConfigError
from xinfer.inputs import Prompt
from xinfer.plugins import load_plugins
from xinfer.session import Session
from xinfer.testing.tiny import tiny_config, write_folder

MAKERS = {"temperature": 0.1, "top_k": 1, "top_p": 0.001, "repetition_penalty": 1.05}
UNSET = {"temperature": None, "top_k": None, "top_p": None, "min_p": None, "repetition_penalty": None}


@pytest.fixture
def session(tmp_path: Path):
    """Return a session of a tiny model whose generation_config.json says this, with this sampling."""

    def make(generation_config: dict[str, object], **sampling: object) -> Session:
        folder = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
        (folder / "generation_config.json").write_text(json.dumps(generation_config))
        plugins = load_plugins()
        config = Config(
            model=ModelConfig(reference=str(folder)),
            backend=replace(plugins.backends["eager"].config(), device="cpu"),
            sampling=SamplingConfig(**{**UNSET, **sampling}),
        )
        config.backend.name = "eager"
        return Session(config, plugins)

    return make


def chosen(params: SamplingParams) -> dict[str, object]:
    return {name: getattr(params, name) for name in MAKERS}


def test_what_nobody_gives_is_what_the_models_maker_says(session, caplog):
    """Case S14."""
    caplog.set_level(logging.INFO, "xinfer")
    opened = session(MAKERS)
    params = opened.params
    opened.engine(0, Observers())
    assert chosen(params) == MAKERS
    assert params.min_p == SamplingParams().min_p
    (said,) = [record for record in caplog.records if record.message == "sampling"]
    assert said.from_generation_config == list(MAKERS)
    assert said.effective == "greedy, repetition penalty 1.05"


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_configured_goes_first(session, name):
    params = session(MAKERS, **{name: 1}).params
    assert chosen(params) == MAKERS | {name: 1}


def test_the_makers_values_can_be_switched_off_as_a_whole(session):
    params = session(MAKERS, temperature=0.8, top_k=40, top_p=0.95, min_p=0.0, repetition_penalty=1.0).params
    assert chosen(params) == {"temperature": 0.8, "top_k": 40, "top_p": 0.95, "repetition_penalty": 1.0}


def test_a_penalty_of_ones_own_changes_nothing_else(session):
    params = session(MAKERS, presence_penalty=0.5).params
    assert (chosen(params), params.presence_penalty) == (MAKERS, 0.5)


def test_what_a_request_brings_goes_before_all(session):
    params = session(MAKERS, seed=3).params_of(Prompt("a", stop=("b",), bad_words=("x",), seed=5))
    assert (params.seed, params.stop, params.bad_words, params.top_k) == (5, ("b",), ("x",), 1)


@pytest.mark.parametrize("zero", [0, -1])
def test_no_top_k_is_off_from_the_makers_file_too(session, zero):
    """Case S05."""
    params = session({"top_k": zero, "temperature": 0.5}).params
    assert not params.greedy
    assert params.top_k == zero


def test_null_and_other_keys_of_the_file_say_nothing(session):
    params = session({"temperature": None, "do_sample": True, "max_length": 20, "eos_token_id": 258}).params
    assert chosen(params) == chosen(SamplingParams())
    assert params.max_tokens == 256


def test_a_makers_value_out_of_range_is_refused_with_the_files_name(session):
    with pytest.raises(ConfigError, match=r"generation_config.json: top_p=7 is out of range.*give the key a value"):
        _ = session({"top_p": 7}).params


def test_the_configuration_of_the_engine_has_the_limits_own_defaults():
    built_in, configured = Limits(), EngineConfig()
    assert {f.name: getattr(configured, f.name) for f in fields(Limits)} == asdict(built_in)


def test_the_configuration_of_sampling_has_the_parameters_own_defaults_but_for_lengths_and_texts():
    built_in, configured = SamplingParams(), SamplingConfig()
    for name, value in vars(configured).items():
        if value is not None and name != "max_tokens":
            assert value == (list(value) if isinstance(value, list) else getattr(built_in, name)), name
    texts = {"stop", "bad_words"}  # which bypass the configuration
    assert {f.name for f in fields(SamplingParams)} == set(vars(configured)) | texts
