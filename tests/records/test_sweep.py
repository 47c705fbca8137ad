"""A sweep's report tells of every job in its folder, and of nothing else."""

import csv
import json
from html.parser import HTMLParser
from pathlib import Path

import pytest

from xinfer.records.sweep import SweepJob, read_job, write_job, write_sweep_report


@pytest.fixture
def sweep(tmp_path: Path, write_run) -> Path:
    """Three jobs that ended in different ways, and one that has not ended."""
    for number, (backend, code, error, stats) in enumerate(
        [
            ("eager", 0, None, {"tpot_ms": 20.0, "peak_memory_bytes": 2 << 30, "perplexity": 9.5, "requests": 1}),
            ("onnx", 0, None, {"tpot_ms": 10.0, "peak_memory_bytes": 1 << 30, "perplexity": 9.75, "requests": 1}),
            ("<b>loud</b>", 3, "RuntimeError: a < b & c", {"tpot_ms": 1.0, "peak_memory_bytes": 1}),
            ("none", None, None, None),
        ]
    ):
        folder = tmp_path / "s" / str(number)
        overrides = (f"backend={backend}", "+x.y=1", "sampling.max_tokens=8")
        write_job(folder, SweepJob(number, "now", overrides, "work", code, error))
        if stats is not None:
            write_run(folder, stats, overrides, status="failed" if error else "completed")
    write_job(tmp_path / "s" / "earlier" / "0-abc", SweepJob(0, "then", ("backend=old",), None, 3, "old news"))
    (tmp_path / "s" / "4").mkdir()
    (tmp_path / "s" / "4" / "job.json").write_text('{"number": 4')
    return tmp_path / "s"


def test_keys_that_differ_are_columns_and_every_job_is_a_row(sweep: Path):
    report = write_sweep_report(sweep)
    assert report.keys == ["backend"]
    assert [row.job.number for row in report.rows] == [0, 1, 2, 3]
    assert [row.job.status for row in report.rows] == ["completed", "completed", "failed", "not finished"]
    with (sweep / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["backend"] for row in rows] == ["eager", "onnx", "<b>loud</b>", "none"]
    assert [row["tok_s"] for row in rows] == ["50.0", "100.0", "", ""]
    assert rows[2]["error"] == "RuntimeError: a < b & c"
    plain = json.loads((sweep / "sweep.json").read_text("utf-8"))
    assert plain["varying"] == ["backend"]
    assert plain["jobs"][0]["settings"] == {"backend": "eager", "x.y": "1", "sampling.max_tokens": "8"}
    assert plain["jobs"][1]["figures"]["perplexity"] == 9.75


def test_a_failed_job_is_listed_with_its_error_and_is_in_no_picture(sweep: Path):
    report = write_sweep_report(sweep)
    memory, quality = report.pictures
    assert [dot.label for dot in memory.dots] == ["0", "1"]
    assert [dot.unbeaten for dot in memory.dots] == [False, True]  # less memory, and faster
    assert [dot.unbeaten for dot in quality.dots] == [True, True]  # slower, but better
    assert quality.x_name == "perplexity"
    assert "perplexity" in report.figures


class Page(HTMLParser):
    """Collects a page's text, and checks that tags are closed in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag, attributes):
        self.seen.append(tag)
        if tag not in ("meta", "html"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.seen.append(tag)

    def handle_endtag(self, tag):
        if tag != "html":
            assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_is_whole_and_shows_texts_as_they_are(sweep: Path):
    write_sweep_report(sweep)
    page = Page()
    page.feed((sweep / "report.html").read_text("utf-8"))
    text = " ".join(page.text)
    assert page.open == []
    assert "b" not in page.seen and "script" not in page.seen
    assert page.seen.count("svg") == 2
    for expected in ("2 of 4 jobs completed", "<b>loud</b>", "RuntimeError: a < b & c", "not finished", "2.00 GiB"):
        assert expected in text
    assert "old news" not in text


def test_of_several_requests_the_speed_is_that_of_all_together(tmp_path: Path, write_run):
    for number, together in enumerate((100.0, 300.0)):
        folder = tmp_path / str(number)
        write_job(folder, SweepJob(number, "now", (f"engine.max_num_seqs={number}",), None, 0))
        write_run(folder, {"tpot_ms": 5.0, "requests": 4, "output_tok_s": together, "peak_memory_bytes": 1 << 30})
    (picture,) = write_sweep_report(tmp_path).pictures
    assert picture.y_name == "tokens/s, all requests"
    assert [dot.unbeaten for dot in picture.dots] == [False, True]


def test_a_sweep_without_jobs_or_with_one_has_a_report(tmp_path: Path):
    assert write_sweep_report(tmp_path).rows == []
    write_job(tmp_path / "0", SweepJob(0, "now", ("a=1",), None, 2, "wrong"))
    assert write_sweep_report(tmp_path).keys == ["a"]
    assert "wrong" in (tmp_path / "report.html").read_text("utf-8")


def test_a_jobs_file_is_read_as_it_was_written_and_a_damaged_one_is_none(tmp_path: Path):
    job = SweepJob(3, "now", ("a=1", "b='x y'"), "work", -1, "error", skipped=True, process=(7, 1.5))
    write_job(tmp_path, job)
    assert read_job(tmp_path) == job
    for content in ("{", "[]", "{}", '{"number": 1, "overrides": 3}', '{"number": "x", "overrides": [], "sweep": ""}'):
        (tmp_path / "job.json").write_text(content)
        assert read_job(tmp_path) is None
