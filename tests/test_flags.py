"""The command line's words: text stays text, keys reach Hydra as they were meant."""

import io
import json
from pathlib import Path

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hypothesis import example, given
from hypothesis import strategies as st
from omegaconf import OmegaConf

from xinfer.errors import ConfigError
from xinfer.flags import FLAGS, flags_help, parse, quote
from xinfer.inputs import Prompt, read_requests

NASTY = [
    "a, b",
    'say "hi"',
    "it's",
    "x=y",
    "${oc.env:HOME}",
    "# no comment",
    "line\nbreak",
    "你好",
    "🦙 {a: 1}",
    "-m",
    "a\\",
    "",
]


@given(st.text(st.sampled_from(list("ab'\"\\${}=,: \n#[]日😀~+()"))) | st.text())
@example("\\\n")
@example("\\'${x}\\")
@example("007")
@example("1e3")
@example("true")
@example("/a/b.c")
def test_a_quoted_value_reaches_a_text_key_as_it_is(value: str):
    if value == "null" or value.startswith(("[", "{")) or "\0" in value:
        return
    parsed = OverridesParser.create().parse_override("key=" + quote(value)).value()
    config = OmegaConf.create({"key": ""})
    config.key = parsed
    assert config.key == value


@pytest.mark.parametrize("text", NASTY)
def test_a_prompt_is_taken_word_for_word_and_never_reaches_hydra(text: str):
    line = parse(["--prompt", text, "sampling.seed=3"])
    assert [p.text for p in line.prompts] == [text]
    assert line.overrides == ["sampling.seed=3"]
    assert parse([f"--prompt={text}"]).prompts[0].text == text


def test_bad_words_count_for_every_prompt_word_for_word():
    line = parse(["--prompt", "a", "--prompt", "b", "--bad-word", "x,y", "--bad-word", "${z}"])
    assert [(p.text, p.bad_words) for p in line.prompts] == [(text, ("x,y", "${z}")) for text in "ab"]


def test_system_and_stop_count_for_every_prompt():
    line = parse(["--stop", r"\n", "--prompt", "a", "--prompt", "b", "--system", "be brief", "--stop", r"\\n"])
    assert [(p.text, p.system, p.stop) for p in line.prompts] == [(t, "be brief", ("\n", "\\n")) for t in "ab"]


def test_the_first_bare_word_is_the_task_and_a_second_is_refused():
    assert parse(["device", "-m", "a=1"]).overrides == ["task=device", "a=1"]
    assert parse(["-m", "device"]).sweep
    with pytest.raises(ConfigError, match="unexpected word 'twice'"):
        parse(["device", "twice"])


@pytest.mark.parametrize(
    ("words", "override"),
    [
        (["explain", "outputs/a=b"], "run='outputs/a=b'"),
        (["inspect", "a/b=c"], "model.reference='a/b=c'"),
        (["inspect", "hf:org/name@v1"], "model.reference='hf:org/name@v1'"),
        (["inspect", "pypi:d==1/m.gguf#sha256=0"], "model.reference='pypi:d==1/m.gguf#sha256=0'"),
        (["inspect", "engine.max_num_seqs=1"], "engine.max_num_seqs=1"),
        (["inspect", "--json"], "json='true'"),
    ],
)
def test_some_tasks_take_a_word_more(words: list[str], override: str):
    assert parse(words).overrides == [f"task={words[0]}", override]


@pytest.mark.parametrize(
    ("words", "override"),
    [
        (["--max-tokens", "5"], "sampling.max_tokens=5"),
        (["--model=/a,b/c=d"], "model.reference='/a,b/c=d'"),
        (["--no-chat"], "chat='false'"),
        (["--json-stats"], "json_stats='-'"),
        (["--json-stats=stats.json"], "json_stats=stats.json"),
        (["--engine.max_num_seqs", "4"], "engine.max_num_seqs=4"),
        (["--engine.max_model_len=null"], "engine.max_model_len=null"),
        (["+experiment=x"], "+experiment=x"),
        (["~sampling.seed"], "~sampling.seed"),
    ],
)
def test_a_flag_is_its_key(words: list[str], override: str):
    assert parse(words).overrides == [override]


def test_hydras_flags_stay_hydras():
    line = parse(["--cfg", "job", "-m", "--config-dir=x", "task=device"])
    assert line.hydra == ["--cfg", "job", "-m", "--config-dir=x"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--promt", "x"], r"unknown flag --promt \(did you mean '--prompt'"),
        (["--prompt"], "--prompt needs a value"),
        (["--no-chat=1"], "--no-chat takes no value"),
        (["--prompts-file", "/nowhere"], "/nowhere: can't be read"),
    ],
)
def test_a_word_that_means_nothing_is_named(words: list[str], message: str):
    with pytest.raises(ConfigError, match=message):
        parse(words)


def test_the_last_word_on_streaming_counts():
    assert parse(["--stream-layers", "4"]).overrides == ["model.stream_layers=4"]
    assert parse(["--stream-layers", "4", "--no-stream"]).overrides[-1] == "model.stream_layers=null"


def test_every_flag_of_the_older_command_line_is_known():
    older = "model prompt system max-tokens temperature top-k top-p seed stream-layers no-stream no-chat json-stats"
    assert {f"--{word}" for word in [*older.split(), "bench-only"]} <= {flag.name for flag in FLAGS}
    assert all(flag.name in flags_help() for flag in FLAGS)


def test_prompts_come_from_files_and_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "prompts.txt"
    file.write_text("one, two\n\n三 = ${x}\n", "utf-8")
    assert [p.text for p in parse(["--prompts-file", str(file)]).prompts] == ["one, two", "三 = ${x}"]
    for words in (["-"], ["--prompt", "-"]):
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"a\nb\n")))
        assert [p.text for p in parse(words).prompts] == ["a\nb"]


def test_requests_survive_being_written_and_read(tmp_path: Path):
    prompts = [Prompt("a\n", "s", ("x",), 7, False), Prompt(token_ids=(1, 2)), Prompt("${}", bad_words=("y", "z"))]
    file = tmp_path / "r.jsonl"
    file.write_text("".join(p.to_json() + "\n" for p in prompts), "utf-8")
    assert read_requests(str(file)) == prompts


@pytest.mark.parametrize(
    "entry",
    ["{", "[]", '{"prompt": 1}', '{"promt": "a"}', '{"prompt": "a", "seed": true}', '{"prompt": "a", "stop": [1]}', ""],
)
def test_a_bad_request_line_is_named(tmp_path: Path, entry: str):
    file = tmp_path / "r.jsonl"
    file.write_text(entry + "\n", "utf-8")
    with pytest.raises(ConfigError, match="--requests"):
        read_requests(str(file))


def test_lines_that_tell_results_are_passed_over(tmp_path: Path):
    file = tmp_path / "requests.jsonl"
    lines = [{"event": "request", "prompt": "a", "seed": 5, "index": 0, "time": 0.1}, {"event": "output", "text": "b"}]
    file.write_text("\n".join(json.dumps(line) for line in lines), "utf-8")
    assert read_requests(str(file)) == [Prompt("a", seed=5)]
