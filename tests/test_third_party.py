"""A backend from a package of its own, really installed by pip, is as good as a built-in one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from xinfer.engine.engine import Engine
from xinfer.engine.types import FinishReason, Limits, SamplingParams
from xinfer.records.reader import read_run

PLUGIN = Path(__file__).parent.parent / "plugins" / "xinfer-bigram"
CORPUS = "abcabcabd" * 20


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder into which pip installed the plugin."""
    target = tmp_path_factory.mktemp("site")
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--target",
        str(target),
    ]
    done = subprocess.run([*pip, str(PLUGIN)], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def bigram(xinfer, installed: Path, tmp_path: Path):
    """Run the command with the plugin installed and a corpus at hand."""
    (tmp_path / "corpus.txt").write_text(CORPUS)

    def run(*words: str):
        path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
        return xinfer("backend=bigram", "backend.corpus=corpus.txt", *words, PYTHONPATH=path, XINFER_CACHE="cache")

    return run


def test_it_generates_what_its_text_suggests(bigram, tmp_path: Path):
    done = bigram("--prompt", "a", "--prompt", "b", "--temperature", "0", "--max-tokens", "5", "--stop", "cac")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "bcabc\n" + "cabca\n"
    run = read_run(next((tmp_path / "outputs").glob("*/*")))
    assert {run.outputs[i]["finish_reason"] for i in (0, 1)} == {"length"}
    assert any(plugin["name"] == "bigram" for plugin in run.info["plugins"])
    assert not (tmp_path / "cache").exists() or not list((tmp_path / "cache").rglob("*.gguf")), "no model was needed"


def test_its_texts_end_at_a_stop_string(bigram):
    done = bigram("--prompt", "a", "--temperature", "0", "--max-tokens", "50", "--stop", "ca")
    assert done.stdout == "b\n"


def test_help_shows_it_and_its_config_is_checked(bigram, xinfer, installed: Path):
    shown = xinfer("--help", PYTHONPATH=str(installed))
    assert "bigram" in shown.stdout
    for words, message in [
        (["backend.smoothing=much"], "could not be converted to Float"),
        (["backend.corpse=x"], "did you mean 'backend.corpus'"),
        (["backend.smoothing=-1"], "backend.smoothing=-1.0 is out of range"),
        (["backend.corpus=nowhere.txt"], "backend.corpus='nowhere.txt' is no file"),
    ]:
        done = bigram(*words)
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr


def test_it_is_batched_and_aborted_like_any_other(installed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(installed))
    from xinfer_bigram import BigramConfig, BigramRunner, ByteTokenizer

    from xinfer import BackendContext

    corpus = tmp_path / "corpus.txt"
    corpus.write_text(CORPUS)
    limits = Limits(max_num_seqs=4)
    runner = BigramRunner(BackendContext(None, BigramConfig(str(corpus)), limits))
    params = SamplingParams(max_tokens=20, temperature=1.0)

    def texts(prompts: list[str]) -> dict[int, str]:
        engine = Engine(runner, ByteTokenizer(), limits, seed=3, eos_token_ids=(256,))
        for prompt in prompts:
            engine.add_request(list(prompt.encode()), params)
        return {output.index: output.text for step in engine.run() for output in step.finished}

    together = texts(["a", "b", "c", "a", "b", "a"])
    assert together[0] == texts(["a"])[0]
    assert len(set(together.values())) > 1

    engine = Engine(runner, ByteTokenizer(), limits)
    request = engine.add_request([97], SamplingParams(max_tokens=1000, ignore_eos=True))
    engine.step()
    engine.abort(request.request_id)
    (output,) = engine.step().finished
    assert output.finish_reason is FinishReason.ABORT
    assert engine.scheduler.pool.num_used == 0


def test_its_own_tests_pass(installed: Path):
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(PLUGIN / "tests")]
    path = os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | {"PYTHONPATH": path})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_it_keeps_the_contract(bigram):
    done = bigram("plugins", "check")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "backend bigram computes no checkpoint" in done.stdout


def test_it_is_short():
    assert len((PLUGIN / "xinfer_bigram" / "__init__.py").read_text().splitlines()) <= 80
