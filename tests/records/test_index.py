"""The index tells what the folders hold, whatever state they and its own file are in."""

import json
import multiprocessing
import os
import shutil
import sqlite3
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from xinfer.errors import UsageError
from xinfer.records.index import RunIndex
from xinfer.records.summary import numbers


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


def found(root: Path, *words: str, **options) -> list[str]:
    """Return the folders that a search finds, as seen from the root."""
    with RunIndex(root) as index:
        return [Path(run.folder).relative_to(root).as_posix() for run in index.search(words, **options)]


def damaged(root: Path) -> dict[str, str]:
    with RunIndex(root) as index:
        return {Path(run.folder).name: run.problem or "" for run in index.damaged()}


def test_runs_and_jobs_of_sweeps_are_found_the_newest_first(root: Path, write_run):
    for name, day in (("2026-11-01/a", 1), ("sweeps/2026-11-03/s/0", 3), ("2026-11-02/b", 2)):
        write_run(root / name, started=f"2026-11-0{day}T00:00:00+00:00")
    assert found(root) == ["sweeps/2026-11-03/s/0", "2026-11-02/b", "2026-11-01/a"]
    assert found(root, limit=1) == ["sweeps/2026-11-03/s/0"]


def test_times_are_compared_whatever_their_zone(root: Path, write_run):
    write_run(root / "earlier", started="2026-11-01T12:00:00+05:00")
    write_run(root / "later", started="2026-11-01T08:00:00+00:00")
    write_run(root / "unknown", started="yesterday")
    assert found(root) == ["later", "earlier", "unknown"]


def test_a_run_is_what_its_record_says(root: Path, write_run):
    stats = {
        "tpot_ms": 20.0,
        "requests": 2,
        "seed": 7,
        "sampling": {"top_k": 40},
        "streaming": True,
        "roofline": {"share": 0.5},
        "stream": None,
        "broken": float("nan"),
    }
    command = ["sampling.seed=7", "backend.api_key=<redacted>"]
    write_run(root / "a", stats, command, seed=2**64 - 1, config={"backend": {"name": "onnx"}})
    with RunIndex(root) as index:
        (run,) = index.search()
    assert (run.model, run.model_name) == ("/models/Tiny-Llama/", "Tiny-Llama")
    assert (run.task, run.status, run.computes, run.seed) == ("generate", "completed", "onnx float32", str(2**64 - 1))
    assert run.overrides == ("sampling.seed=7", "backend.api_key=<redacted>")
    assert run.figures == {"tpot_ms": 20.0, "requests": 2, "roofline.share": 0.5, "tok_s": 50.0}


def test_the_file_can_be_asked_by_other_programs(root: Path, write_run):
    write_run(root / "a", {"tpot_ms": 4.0, "generated_tokens": 9})
    found(root)
    rows = sqlite3.connect(root / ".index.sqlite").execute("SELECT folder, generated_tokens, tok_s FROM runs")
    assert rows.fetchall() == [("a", 9.0, 250.0)]


def test_no_text_of_a_request_is_in_the_file(root: Path, write_run):
    folder = write_run(root / "a", {"tpot_ms": 1.0}, error="can't read swordfish")
    (folder / "requests.jsonl").write_text('{"event": "request", "index": 0, "prompt": "swordfish"}\n')
    found(root)
    assert b"swordfish" not in (root / ".index.sqlite").read_bytes()


SEARCHES = [
    ([], "abc"),
    (["model=llama"], "ab"),
    (["model=LLAMA"], "ab"),
    (["backend=onnx"], "b"),
    (["backend=on"], ""),
    (["status=failed"], "c"),
    (["seed=7"], "a"),
    (["since=2026-11-02"], "bc"),
    (["before=2026-11-02"], "a"),
    (["since=2026-11-01T12:00", "before=2026-11-03"], "ab"),
    (["tok_s>50"], "b"),
    (["tok_s>=50"], "ab"),
    (["tok_s<50"], ""),
    (["kl<=0.25"], "b"),
    (["roofline.share>0.1"], "a"),
    (["requests=3"], "a"),
    (["qwen"], "c"),
    (["QWEN", "failed"], "c"),
    (["qwen", "completed"], ""),
    (["engine.max_num_seqs=4"], "b"),
    (["max_num_seqs"], "b"),
    (["int4"], "b"),
    (["folder=b"], "b"),
    (["%"], ""),
    (["'; DROP TABLE runs; --"], ""),
]


@pytest.fixture
def three(root: Path, write_run) -> Path:
    write_run(root / "a", {"tpot_ms": 20.0, "requests": 3, "roofline": {"share": 0.4}}, started="2026-11-01T18:00")
    quantized = {"backend": {"name": "onnx"}, "model": {"quantization": "int4"}}
    write_run(
        root / "b",
        {"tpot_ms": 10.0, "kl": 0.25},
        ["engine.max_num_seqs=4"],
        started="2026-11-02T18:00",
        config=quantized,
        seed=17,
    )
    write_run(root / "c", started="2026-11-03T18:00", status="failed", model={"reference": "hf:q/Qwen3"}, seed=None)
    return root


@pytest.mark.parametrize(("words", "expected"), SEARCHES, ids=[" ".join(words) for words, _ in SEARCHES])
def test_every_word_of_a_search_must_hold(three: Path, words: list[str], expected: str):
    assert sorted(found(three, *words)) == list(expected)


def test_a_folder_can_be_searched_as_it_is_shown(root: Path, write_run):
    for name in ("08-15-00-1f", "08-15-00-2e"):
        write_run(root / name)
    with RunIndex(root) as index:
        for run in index.search():
            for word in (run.folder, f"folder={run.folder}"):
                assert [one.folder for one in index.search([word])] == [run.folder]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tok>50"], "no run has a figure 'tok' (did you mean 'tok_s'?)"),
        (["modell=x"], "no run has a figure 'modell' (did you mean 'model'?)"),
        (["since=soon"], "'since=soon' is no date"),
        (["tok_s>fast"], "'fast' is no number"),
        (["model>x"], "no run has a figure 'model'"),
    ],
)
def test_a_search_that_means_nothing_is_refused(three: Path, words: list[str], message: str):
    with pytest.raises(UsageError) as refused, RunIndex(three) as index:
        index.search(words)
    assert message in str(refused.value)


def test_runs_are_sorted_by_any_field_or_figure_and_those_without_it_come_last(three: Path):
    assert found(three, sort="tok_s") == ["a", "b", "c"]
    assert found(three, sort="-tok_s") == ["b", "a", "c"]
    assert found(three, sort="started") == ["a", "b", "c"]
    assert found(three, sort="-kl")[0] == "b"
    with pytest.raises(UsageError, match=r"sorted by 'tok' \(did you mean 'tok_s'"):
        found(three, sort="-tok")


def test_the_index_follows_its_folders(root: Path, write_run):
    folder = write_run(root / "a", status="running")
    assert found(root, "status=running") == ["a"]
    write_run(folder, {"tpot_ms": 1.0}, status="completed")
    assert found(root, "status=completed", "tok_s=1000") == ["a"]
    write_run(folder, {"tpot_ms": 12.5})
    assert found(root, "tok_s=80") == ["a"]
    (root / "moved").mkdir()
    folder.rename(root / "moved" / "b")
    assert found(root) == ["moved/b"]
    shutil.rmtree(root / "moved")
    assert found(root) == []


def test_only_what_has_changed_is_read_again(root: Path, write_run, monkeypatch: pytest.MonkeyPatch):
    for name in "abc":
        write_run(root / name)
    found(root)
    read = []
    text = Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path, *rest: read.append(path.parent.name) or text(path, *rest))
    found(root)
    assert read == []
    write_run(root / "b", status="failed")
    found(root)
    assert read == ["b"]


def test_damaged_and_half_written_folders_are_named_and_the_others_found(root: Path, write_run):
    write_run(root / "good")
    for name, content in [("cut", '{"status": '), ("list", "[]"), ("deep", "[" * 100_000), ("empty", "")]:
        (root / name).mkdir()
        (root / name / "run.json").write_text(content)
    (root / "begun").mkdir()
    (root / "begun" / "requests.jsonl").write_text("")
    (write_run(root / "figures") / "stats.json").write_text("{")
    for name in ("strange", "types"):
        write_run(root / name, started=5, command="x", config=[], model="\ud800", runner=3, seed=[1], task={})
    (root / "types" / "stats.json").write_text(json.dumps({"requests": 10**400, "tpot_ms": "fast", "ttft_ms": 0}))
    assert set(found(root)) == {"good", "figures", "strange", "types"}
    problems = damaged(root)
    assert set(problems) == {"cut", "list", "deep", "empty", "begun", "figures"}
    assert "stats.json is damaged" in problems["figures"] and "run.json is damaged" in problems["cut"]
    assert "run.json can't be read" in problems["begun"]
    write_run(root / "cut")
    assert "cut" in found(root) and "cut" not in damaged(root)


def test_a_record_without_bounds_is_not_read(root: Path):
    (root / "huge").mkdir(parents=True)
    with (root / "huge" / "run.json").open("wb") as file:
        file.truncate(17 << 20)
    assert "larger than 16 MiB" in damaged(root)["huge"]


def test_links_are_not_followed(root: Path, write_run):
    write_run(root / "a")
    (root / "a-loop").symlink_to(root, target_is_directory=True)
    assert found(root) == ["a"]


@pytest.mark.parametrize("content", [b"this is no database " * 400, b""], ids=["damaged", "empty"])
def test_a_damaged_file_is_made_anew(root: Path, write_run, content: bytes):
    write_run(root / "a")
    (root / ".index.sqlite").write_bytes(content)
    assert found(root) == ["a"]
    assert sqlite3.connect(root / ".index.sqlite").execute("SELECT folder FROM runs").fetchall() == [("a",)]


def test_a_file_that_breaks_off_is_made_anew(root: Path, write_run):
    for number in range(60):
        write_run(root / f"{number}", {f"figure_{i}": i for i in range(100)})
    found(root)
    path = root / ".index.sqlite"
    os.truncate(path, path.stat().st_size // 2 // 4096 * 4096)
    assert len(found(root)) == 60


def test_a_file_of_another_version_is_made_anew(root: Path, write_run):
    write_run(root / "a")
    with sqlite3.connect(root / ".index.sqlite") as other:
        other.execute("CREATE TABLE runs (id INTEGER, folder TEXT)")
        other.execute("INSERT INTO runs VALUES (1, 'gone')")
        other.execute("PRAGMA user_version = 99")
    other.close()
    assert found(root) == ["a"]


def test_where_no_file_can_be_written_the_index_is_in_memory(root: Path, write_run):
    write_run(root / "a")
    (root / ".index.sqlite").mkdir()
    assert found(root) == ["a"]
    assert list((root / ".index.sqlite").iterdir()) == []


def test_without_a_folder_there_are_no_runs_and_none_is_made(root: Path):
    assert found(root) == []
    assert not root.exists()


def churn(root: Path, name: str, turns: int, results) -> None:
    """Add, change and remove runs of one's own, looking after each turn whether the index tells of it."""
    wrong = []
    for turn in range(turns):
        folder = root / name / str(turn)
        folder.mkdir(parents=True)
        (folder / "run.json").write_text(json.dumps({"status": "completed", "seed": turn}))
        wrong += [f"{name}/{turn} is missing"] * (f"{name}/{turn}" not in found(root, f"seed={turn}"))
        if turn % 3 == 2:
            shutil.rmtree(folder)
            wrong += [f"{name}/{turn} is still there"] * (f"{name}/{turn}" in found(root))
    results.put(wrong)


def test_two_processes_use_one_index_at_a_time(root: Path):
    root.mkdir()
    copies = multiprocessing.get_context("fork")  # which need not import everything again
    results = copies.Queue()
    processes = [copies.Process(target=churn, args=(root, name, 9, results)) for name in ("a", "b")]
    for process in processes:
        process.start()
    assert [results.get(timeout=120) for _ in processes] == [[], []]
    for process in processes:
        process.join()
    expected = sorted(f"{name}/{turn}" for name in "ab" for turn in range(9) if turn % 3 != 2)
    assert sorted(found(root)) == expected
    assert sqlite3.connect(root / ".index.sqlite").execute("PRAGMA integrity_check").fetchone() == ("ok",)


trees = st.recursive(
    st.one_of(st.integers(-(10**6), 10**6), st.floats(), st.booleans(), st.none(), st.text(max_size=3)),
    lambda inner: st.dictionaries(st.sampled_from("xyz"), inner, max_size=3),
)


@settings(max_examples=30)
@given(st.dictionaries(st.sampled_from("abc"), trees))
def test_figures_are_the_finite_numbers_by_their_paths(stats: dict):
    def walk(tree, path):
        if isinstance(tree, dict):
            for name, value in tree.items():
                yield from walk(value, [*path, name])
        elif type(tree) in (int, float) and abs(tree) < float("inf"):
            yield ".".join(path), tree

    assert numbers(stats) == dict(walk(stats, []))
