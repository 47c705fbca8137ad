"""Why a token came: its stages, its draw and its margin, and which tokens of a text another precision would change."""

import json
import re
from pathlib import Path

import pytest

from xinfer.engine.engine import Observers
from xinfer.plugins import load_plugins
from xinfer.records.reader import read_run
from xinfer.session import Session
from xinfer.tasks.recorded import configuration_of, requests_of
from xinfer.tasks.why import explained


@pytest.fixture
def recorded(say, tiny_llama: Path, tmp_path: Path):
    """Record a run of two prompts with penalties, and return its folder."""
    prompts = ["--prompt", "abc", "--prompt", "hello", "--max-tokens", "12", "--seed", "5", "--no-chat"]
    more = ["sampling.repetition_penalty=1.5", "sampling.top_k=20", "sampling.min_p=0.01", "sampling.ignore_eos=true"]
    code, _, said = say("--model", str(tiny_llama), *prompts, *more, "sampling.n=2")
    assert code == 0, said
    (folder,) = (tmp_path / "outputs").glob("*/*")
    return folder


def engine_of(folder: Path, *changes: str):
    run, plugins = read_run(folder), load_plugins()
    config, _ = configuration_of(run, changes, plugins)
    session = Session(config, plugins)
    return session.engine(0, Observers()), requests_of(run)


def test_every_token_of_every_sample_is_the_one_that_is_explained(recorded: Path):
    engine, requests = engine_of(recorded)
    for request in requests:
        for sample in (0, 1):
            found = list(explained(engine, request, sample, {"float32": None}))
            assert [each.at for each in found] == list(range(12))
            assert [each.decision.token_id for each in found] == request.tokens(sample)
            assert all(each.decision.interval[0] <= each.decision.u < each.decision.interval[1] for each in found)
            assert all(each.decision.instead not in (None, each.token_id) for each in found)


def test_tokens_that_another_precision_changes_are_those_of_small_margins(recorded: Path):
    engine, requests = engine_of(recorded)
    other, _ = engine_of(recorded, "model.dtype=bfloat16")
    for request in requests:
        margins = list(explained(engine, request, 0, {"bfloat16": None}))
        there = list(explained(other, request, 0, {}))
        for mine, theirs in zip(margins, there, strict=True):
            if theirs.decision.token_id != mine.token_id:
                assert mine.decision.margin < 0.1  # of logits that are about as large as one


def test_a_token_is_shown_stage_by_stage(say, recorded: Path):
    code, out, _ = say("why", str(recorded), "--request", "1", "--sample", "1", "--token", "3", "why.top=2")
    assert code == 0
    token = read_run(recorded).samples_of(1)[1]["token_ids"][3]
    assert re.match(rf"request 1, token 3: '.*' \({token}\), after '", out)
    stages = re.findall(r"^ (model|penalties, bias, masks|temperature 0.8|min-p 0.01|top-k 20|top-p 0.95) ", out, re.M)
    assert stages == ["model", "penalties, bias, masks", "temperature 0.8", "min-p 0.01", "top-k 20", "top-p 0.95"]
    low, high = (float(each) for each in re.search(r"interval is (\S+) to (\S+)", out).groups())
    assert low <= float(re.search(r"u = ([\d.]+)", out)[1]) <= high
    assert re.search(r"^margin \S+: if no logit changes by more, it stays; then '.*' \(\d+\) may come$", out, re.M)
    assert len(re.findall(r"survives? (?:float32|float16|bfloat16|int8|int4), ", out)) == 5


def test_of_a_text_the_weakest_tokens_are_listed(say, recorded: Path):
    code, out, _ = say("why", "latest", "why.noise=1000")
    assert code == 0
    assert out.startswith("12 tokens\n12 of them may not survive a change of 1000: 0, 1, 2, 3,")
    code, out, _ = say("why", "latest", "why.noise=0")
    assert "0 of them may not survive a change of 0\n" in out
    margins = [float(row) for row in re.findall(r"^ \d+ +['\"].*?['\"] +([\d.e-]+) ", out, re.M)]
    assert len(margins) == 12 and margins == sorted(margins)


def test_json_has_the_same_for_programs(say, recorded: Path):
    code, out, _ = say("why", "latest", "--json")
    found = json.loads(out)
    assert code == 0
    assert [each["token_id"] for each in found] == read_run(recorded).outputs[0]["token_ids"]
    assert all(each["decision"]["token_id"] == each["token_id"] for each in found)
    assert json.loads(say("why", "latest", "--json", "--token", "3")[1]) == found[3:4]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--request", "2"], "--request 2: the run has the requests 0 to 1"),
        (["--token", "12"], "--token 12: of request 0 12 tokens are recorded"),
        (["--sample", "2"], "--request 0 --sample 2: no tokens of it are recorded"),
        (["why.noise=int3"], "why.noise='int3' is neither a number nor one of float32"),
    ],
)
def test_what_can_not_be_explained_is_said(say, recorded: Path, words: list[str], message: str):
    code, out, said = say("why", str(recorded), *words)
    assert code == 2 and out == ""
    assert re.search(message, said), said
