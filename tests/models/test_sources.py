"""References become paths: what is local is used, what is not is fetched once, verified, and never half there."""

import base64
import hashlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from xinfer.errors import ConfigError, FetchError, ModelError
from xinfer.models import sources
from xinfer.models.cache import cache_folder, file_sha256
from xinfer.models.sources import is_here, resolve

CONTENT = b"GGUF" + bytes(range(256)) * 64
SHA256 = hashlib.sha256(CONTENT).hexdigest()
OTHER = "0" * 64
REFERENCE = "pypi:tiny-model==1.0/tiny_model/tiny.gguf"


def pinned(reference: str = REFERENCE, sha256: str | None = SHA256) -> str:
    return reference if sha256 is None else f"{reference}#sha256={sha256}"


Process: TypeAlias = "subprocess.Popen[str]"

# What a process of its own runs: signals and environment variables that libraries read once need a real one.
PROGRAM = """
import logging, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from xinfer.errors import XinferError
from xinfer.models.sources import resolve
print("ready", flush=True)
try:
    print(resolve(sys.argv[1], to_describe="describe" in sys.argv[2:]))
except XinferError as error:
    sys.exit(f"{type(error).__name__}: {error}")
"""


def make_wheel(folder: Path, content: bytes = CONTENT) -> Path:
    """Write a wheel with one model in it, and with a dependency that exists nowhere."""
    info = "tiny_model-1.0.dist-info"
    files = {
        "tiny_model/__init__.py": b"",
        "tiny_model/tiny.gguf": content,
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\nRequires-Dist: no-such-thing==9\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip('=')},{len(data)}\n"
        for name, data in files.items()
    )
    folder.mkdir(exist_ok=True)
    path = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, data in {**files, f"{info}/RECORD": f"{record}{info}/RECORD,,\n".encode()}.items():
            wheel.writestr(name, data)
    return path


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a pip whose whole index is the folder `links`."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_", "HF_", "HUGGING"))]:
        monkeypatch.delenv(name)
    (tmp_path / "tmp").mkdir()
    settings = {
        "XINFER_CACHE": tmp_path / "cache",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": 1,
        "PIP_FIND_LINKS": tmp_path / "links",
        "PIP_NO_CACHE_DIR": 1,
        "PIP_RETRIES": 0,
        "HF_HOME": tmp_path / "hub",
        "TMPDIR": tmp_path / "tmp",
        "NO_PROXY": "127.0.0.1",
        "PYTHONPATH": Path(sources.__file__).parents[2],
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, str(value))
    return tmp_path / "cache"


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    return make_wheel(tmp_path / "links")


def files_in(folder: Path) -> set[str]:
    """Return what was left in a folder; a lock may stay."""
    return {p.name for p in folder.rglob("*") if p.is_file() and p.suffix != ".lock"}


def start(*arguments: str, stderr: int = subprocess.PIPE, environment: dict[str, str] | None = None) -> Process:
    command = [sys.executable, "-c", PROGRAM, *arguments]
    variables = os.environ | (environment or {})
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=variables)


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes = b""


@contextmanager
def serving(answer: Callable[[str], Answer]) -> Iterator[str]:
    """Serve what `answer` says for a path, on this machine alone."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = answer(self.path)
            self.send_response(found.status)
            for name, value in ({"Content-Length": str(len(found.body))} | found.headers).items():
                self.send_header(name, value)
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(found.body)

        do_HEAD = do_GET

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def serving_wheel(wheel: Path, before: Callable[[], None]) -> Iterator[str]:
    """Serve a page of links to one wheel, which is sent after `before` has returned."""

    def answer(path: str) -> Answer:
        if not path.endswith(".whl"):
            return Answer(200, {"Content-Type": "text/html"}, f'<a href="/{wheel.name}">{wheel.name}</a>'.encode())
        before()
        return Answer(200, {"Content-Type": "application/octet-stream"}, wheel.read_bytes())

    with serving(answer) as url:
        yield url


class TestLocalPaths:
    def test_a_folder_is_used_where_it_lies(self, tmp_path: Path) -> None:
        assert resolve(str(tmp_path)) == tmp_path

    def test_a_gguf_file_is_used_where_it_lies(self, tmp_path: Path) -> None:
        file = tmp_path / "m.gguf"
        file.touch()
        assert resolve(str(file)) == file

    def test_relative_paths_start_where_the_user_stands(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "m.gguf").touch()
        monkeypatch.chdir(tmp_path)
        assert resolve("m.gguf") == tmp_path / "m.gguf"

    def test_a_tilde_is_the_home_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "m.gguf").touch()
        monkeypatch.setenv("HOME", str(tmp_path))
        assert resolve("~/m.gguf") == tmp_path / "m.gguf"

    @pytest.mark.parametrize("name", ["model.bin", "model.pt", "model.PTH"])
    def test_pickles_are_refused_since_they_can_run_code(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).touch()
        with pytest.raises(ModelError, match=f"{name}.*can run code"):
            resolve(str(tmp_path / name))

    def test_other_files_are_refused(self, tmp_path: Path) -> None:
        (tmp_path / "model.onnx").touch()
        with pytest.raises(ModelError, match=r"not a \.gguf file"):
            resolve(str(tmp_path / "model.onnx"))

    def test_a_config_by_itself_only_describes(self, tmp_path: Path) -> None:
        file = tmp_path / "config.json"
        file.touch()
        assert resolve(str(file), to_describe=True) == file
        with pytest.raises(ModelError, match=r"not a \.gguf file"):
            resolve(str(file))

    def test_a_safetensors_file_is_given_by_its_folder(self, tmp_path: Path) -> None:
        (tmp_path / "model.safetensors").touch()
        with pytest.raises(ModelError, match="give the folder"):
            resolve(str(tmp_path / "model.safetensors"))

    @pytest.mark.parametrize("reference", ["", "nowhere", "/no/where.gguf", "~nobody/x", "a\0b", "x" * 5000])
    def test_a_path_that_does_not_exist_is_told_with_the_forms_there_are(self, reference: str) -> None:
        with pytest.raises(ModelError) as raised:
            resolve(reference)
        assert repr(reference) in str(raised.value)
        for form in ("folder", ".gguf file", "hf:org/name", "pypi:dist==version/"):
            assert form in str(raised.value)

    def test_a_name_that_looks_like_one_of_the_hub_is_suggested(self) -> None:
        with pytest.raises(ModelError, match="did you mean hf:org/name"):
            resolve("org/name")

    @given(st.text())
    def test_any_text_may_be_no_path(self, text: str) -> None:
        with pytest.raises(ModelError, match="no such file or folder"):
            resolve(f"/no/where/{text}")


class TestBadReferences:
    @pytest.mark.parametrize(
        "reference",
        [
            "pypi:",
            "pypi:tiny-model",
            "pypi:tiny-model==1.0",
            "pypi:tiny-model==1.0/",
            "pypi:tiny-model/m.gguf",
            "pypi:tiny-model>=1.0/m.gguf",
            "pypi:tiny-model==1.*/m.gguf",
            "pypi:tiny-model[extra]==1.0/m.gguf",
            "pypi:--index-url==1.0/m.gguf",
            "pypi:tiny-model==--pre/m.gguf",
            "pypi:tiny-model== 1.0/m.gguf",
            "pypi:../../x==1.0/m.gguf",
            "pypi:tiny-model==1.0//etc/m.gguf",
            "pypi:tiny-model==1.0/../m.gguf",
            "pypi:tiny-model==1.0/a/../../m.gguf",
            "pypi:tiny-model==1.0/a\\..\\m.gguf",
        ],
    )
    def test_a_malformed_pypi_reference_is_shown_the_right_form(self, reference: str) -> None:
        with pytest.raises(ConfigError, match="pypi:dist==version/path/in/wheel"):
            resolve(pinned(reference))

    @pytest.mark.parametrize(
        "reference",
        [
            "hf:",
            "hf:name",
            "hf:org/",
            "hf:org/name/more",
            "hf:org/name@",
            "hf:org/name@a/../b",
            "hf:../name",
            "hf:org/na me",
            "hf:org/name.",
            "hf:org/a--b",
        ],
    )
    def test_a_malformed_hub_reference_is_shown_the_right_form(self, reference: str) -> None:
        with pytest.raises(ConfigError, match="hf:org/name or hf:org/name@revision"):
            resolve(reference)

    @pytest.mark.parametrize("sha256", [None, "", "abc", "g" * 64, SHA256 + "0"])
    def test_a_wheel_is_never_trusted_without_a_hash(self, sha256: str | None) -> None:
        with pytest.raises(ConfigError, match="sha256"):
            resolve(pinned(REFERENCE, sha256))

    def test_a_pickle_in_a_wheel_is_refused_before_it_is_fetched(self) -> None:
        with pytest.raises(ModelError, match="can run code"):
            resolve(pinned("pypi:tiny-model==1.0/tiny_model/model.bin"))

    @given(st.text())
    def test_any_text_after_pypi_is_refused_cleanly(self, text: str) -> None:
        with pytest.raises(ConfigError):
            resolve(f"pypi:{text}")


class TestInstalledDistribution:
    @pytest.fixture(autouse=True)
    def installed(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """The distribution is installed; the index is empty."""
        site = tmp_path / "site"
        with zipfile.ZipFile(make_wheel(tmp_path)) as wheel:
            wheel.extractall(site)
        monkeypatch.syspath_prepend(site)
        return site / "tiny_model" / "tiny.gguf"

    @pytest.mark.parametrize("sha256", [SHA256, SHA256.upper()])
    def test_it_is_used_in_place(self, installed: Path, cache: Path, sha256: str) -> None:
        assert resolve(pinned(REFERENCE, sha256)) == installed
        assert files_in(cache) == {"hashes.json"}

    def test_a_wrong_hash_is_told_with_both(self) -> None:
        with pytest.raises(FetchError, match=f"expected sha256 {OTHER}, got {SHA256}"):
            resolve(pinned(REFERENCE, OTHER))

    @pytest.mark.parametrize("other", ["pypi:tiny-model==1.1/tiny_model/tiny.gguf", "pypi:tiny-model==1.0/no.gguf"])
    def test_another_version_or_file_is_not_taken_for_it(self, other: str) -> None:
        with pytest.raises(FetchError, match="could not fetch"):
            resolve(pinned(other))


@pytest.mark.usefixtures("wheel")
class TestFetching:
    def test_the_file_comes_into_the_cache(self, cache: Path) -> None:
        path = resolve(pinned())
        assert path == cache / "pypi" / "tiny-model==1.0" / SHA256[:16] / "tiny.gguf"
        assert path.read_bytes() == CONTENT
        assert files_in(cache) == {"tiny.gguf"}

    def test_the_second_time_nothing_is_fetched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        path = resolve(pinned())
        monkeypatch.setenv("PIP_FIND_LINKS", "")
        assert resolve(pinned()) == path

    def test_a_damaged_file_in_the_cache_is_fetched_again(self) -> None:
        path = resolve(pinned())
        path.write_bytes(b"damaged")
        assert resolve(pinned()).read_bytes() == CONTENT

    def test_what_a_killed_process_left_is_cleared_away(self, cache: Path) -> None:
        left = cache / "pypi" / "tiny-model==1.0" / f"{SHA256[:16]}.partial" / "wheel" / "tiny_model-1.0.whl"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"half a wheel")
        assert resolve(pinned()).read_bytes() == CONTENT
        assert files_in(cache) == {"tiny.gguf"}

    def test_a_wrong_hash_is_told_with_both_and_leaves_nothing(self, cache: Path) -> None:
        with pytest.raises(FetchError, match=f"expected sha256 {OTHER}, got {SHA256}"):
            resolve(pinned(REFERENCE, OTHER))
        assert files_in(cache) == set()

    def test_a_file_that_the_wheel_lacks_is_named(self, cache: Path) -> None:
        with pytest.raises(FetchError, match=r"tiny_model/no\.gguf: no such file in the wheel"):
            resolve(pinned("pypi:tiny-model==1.0/tiny_model/no.gguf"))
        assert files_in(cache) == set()

    def test_a_damaged_wheel_is_told(self, wheel: Path, cache: Path) -> None:
        wheel.write_bytes(wheel.read_bytes().replace(CONTENT, CONTENT[::-1]))
        with pytest.raises(FetchError, match="the wheel is damaged"):
            resolve(pinned())
        assert files_in(cache) == set()

    def test_a_file_of_absurd_size_is_refused(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sources, "_MAX_MEMBER", len(CONTENT) - 1)
        with pytest.raises(FetchError, match=f"{len(CONTENT)} bytes are more than"):
            resolve(pinned())
        assert files_in(cache) == set()

    def test_off_a_terminal_it_logs_two_lines_and_prints_none(
        self, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
    ) -> None:
        with caplog.at_level(logging.INFO, sources.__name__):
            resolve(pinned())
        assert capfd.readouterr() == ("", "")
        before, after = (r for r in caplog.records if r.name == sources.__name__)
        assert before.getMessage() == f"fetching {REFERENCE}"
        assert after.getMessage().startswith(f"fetched {REFERENCE}")
        assert after.__dict__["bytes"] == len(CONTENT)
        assert after.__dict__["seconds"] > 0

    def test_on_a_terminal_pip_is_seen_on_standard_error_alone(self) -> None:
        terminal, end = os.openpty()
        process = start(pinned(), stderr=end)
        os.close(end)
        seen = b""
        try:
            while chunk := os.read(terminal, 4096):
                seen += chunk
        except OSError:  # how Linux tells that the other end is closed
            pass
        os.close(terminal)
        out, _ = process.communicate()
        assert b"Successfully downloaded tiny-model" in seen
        assert out.splitlines() == ["ready", str(resolve(pinned()))]

    def test_two_processes_at_once_fetch_it_once(self, wheel: Path) -> None:
        requests, both_ready, fetched_twice = [], threading.Event(), threading.Event()

        def before() -> None:
            requests.append(1)
            if len(requests) > 1:
                fetched_twice.set()
            both_ready.wait(60)
            fetched_twice.wait(0.5)  # time for a second process that does not wait to show itself

        with serving_wheel(wheel, before) as url:
            processes = [start(pinned(), environment={"PIP_FIND_LINKS": url}) for _ in range(2)]
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "ready\n"
            both_ready.set()
            ends = [process.communicate() for process in processes]
        assert [p.returncode for p in processes] == [0, 0], ends
        assert {out.strip() for out, _ in ends} == {str(resolve(pinned()))}
        assert len(requests) == 1

    def test_an_interrupt_leaves_nothing(self, wheel: Path, cache: Path, tmp_path: Path) -> None:
        asked, over = threading.Event(), threading.Event()

        def before() -> None:
            asked.set()
            over.wait(60)

        with serving_wheel(wheel, before) as url:
            process = start(pinned(), environment={"PIP_FIND_LINKS": url})
            assert asked.wait(60)
            process.send_signal(signal.SIGINT)
            process.communicate()
            over.set()
        assert process.returncode != 0
        assert files_in(cache) == set()
        assert list(cache.rglob("*.partial")) == list((tmp_path / "tmp").iterdir()) == []

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "file").touch()
        monkeypatch.setenv("XINFER_CACHE", str(tmp_path / "file" / "cache"))
        with pytest.raises(FetchError, match=f"{tmp_path}/file/cache.*XINFER_CACHE"):
            resolve(pinned())


class TestFetchingFails:
    def test_what_the_index_lacks_is_told_in_one_line(self, cache: Path) -> None:
        with pytest.raises(FetchError) as raised:
            resolve(pinned())
        message = str(raised.value)
        assert "tiny-model==1.0 (No matching distribution found for tiny-model==1.0)" in message
        assert "network" in message
        assert "model.reference=PATH" in message
        assert "\n" not in message
        assert files_in(cache) == set()

    def test_an_unreachable_index_is_told_without_its_password(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("PIP_NO_INDEX")
        monkeypatch.setenv("PIP_INDEX_URL", f"http://user:hunter2@127.0.0.1:{closed_port()}/simple")
        with pytest.raises(FetchError, match="check the network or the proxy") as raised:
            resolve(pinned())
        assert "hunter2" not in str(raised.value)

    def test_a_source_distribution_is_not_built(self, tmp_path: Path) -> None:
        marker = tmp_path / "ran"
        (tmp_path / "setup.py").write_text(f"open({str(marker)!r}, 'w')")
        (tmp_path / "links").mkdir()
        with tarfile.open(tmp_path / "links" / "tiny-model-1.0.tar.gz", "w:gz") as archive:
            archive.add(tmp_path / "setup.py", "tiny-model-1.0/setup.py")
        with pytest.raises(FetchError):
            resolve(pinned())
        assert not marker.exists()


def test_a_file_of_the_index_is_here_once_it_was_fetched(wheel: Path, cache: Path, tmp_path: Path) -> None:
    assert not is_here(pinned())
    resolve(pinned())
    assert is_here(pinned())
    assert not is_here(pinned(sha256=OTHER))
    assert is_here(str(tmp_path))
    with pytest.raises(ConfigError):
        is_here("pypi:tiny-model")


def test_torch_can_compile_after_a_model_was_fetched(wheel: Path, cache: Path) -> None:
    program = "import sys; from xinfer.models.sources import resolve; resolve(sys.argv[1])\n"
    program += "assert 'setuptools' not in sys.modules; import torch.utils.cpp_extension"
    done = subprocess.run([sys.executable, "-c", program, pinned()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


class TestWithoutPip:
    @pytest.fixture(autouse=True)
    def programs(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """pip can't be imported, and PATH is this folder."""
        monkeypatch.setitem(sys.modules, "pip", None)
        folder = tmp_path / "bin"
        folder.mkdir()
        monkeypatch.setenv("PATH", str(folder))
        return folder

    def put_uv(self, folder: Path, program: str) -> None:
        uv = folder / "uv"
        uv.write_text(f"#!{sys.executable}\n{program}")
        uv.chmod(0o755)

    def test_uv_fetches_it(self, programs: Path, wheel: Path, cache: Path) -> None:
        self.put_uv(
            programs,
            "import sys, zipfile\n"
            "assert sys.argv[1:3] == ['pip', 'install'] and sys.argv[-1] == 'tiny-model==1.0', sys.argv\n"
            "assert '--no-deps' in sys.argv and '--only-binary' in sys.argv, sys.argv\n"
            f"zipfile.ZipFile({str(wheel)!r}).extractall(sys.argv[sys.argv.index('--target') + 1])\n",
        )
        assert resolve(pinned()).read_bytes() == CONTENT
        assert files_in(cache) == {"tiny.gguf"}
        with pytest.raises(FetchError, match="no such file in the wheel"):
            resolve(pinned("pypi:tiny-model==1.0/tiny_model/no.gguf"))

    def test_what_uv_says_is_told_without_secrets(self, programs: Path) -> None:
        url = "https://user:hunter2@example.org/simple/tiny-model/?token=hunter3"
        self.put_uv(programs, f"import sys; sys.exit('error: Request failed\\n  cause: Failed to fetch: {url}')")
        with pytest.raises(FetchError, match=r"Failed to fetch: https://example\.org/simple/tiny-model/") as raised:
            resolve(pinned())
        assert "hunter" not in str(raised.value)

    @pytest.mark.usefixtures("programs")
    def test_without_uv_too_it_says_what_to_do(self) -> None:
        with pytest.raises(FetchError, match=r"install pip .* model\.reference=PATH"):
            resolve(pinned())


def closed_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return int(bound.getsockname()[1])


class TestHub:
    """Against a hub of our own; each in a process, since the library reads its environment when imported."""

    commit = "0123456789abcdef0123456789abcdef01234567"
    files = ("config.json", "model.safetensors", "chat_template.jinja", "tokenizer.model")
    unwanted = ("pytorch_model.bin", "modeling_x.py", "README.md", "onnx/config.json", "original/model.safetensors")

    def resolve(self, reference: str, *words: str, **environment: str) -> tuple[int, str, str]:
        process = start(reference, *words, environment=environment)
        out, err = process.communicate()
        return process.returncode, out.removeprefix("ready\n").strip(), err.strip()

    def hub(self, path: str) -> Answer:
        """Answer as the hub does for one model."""
        headers = {"X-Repo-Commit": self.commit}
        names = [*self.files, *self.unwanted]
        if "/resolve/" in path:
            name = path.split(f"/resolve/{self.commit}/")[1]
            return Answer(200, headers | {"ETag": f'"{hashlib.sha1(name.encode()).hexdigest()}"'}, name.encode())
        if "/tree/" in path:
            entries = [{"type": "file", "path": n, "size": len(n), "oid": "0" * 40} for n in names]
            return Answer(200, headers | {"Content-Type": "application/json"}, json.dumps(entries).encode())
        model = {"id": "org/name", "sha": self.commit, "siblings": [{"rfilename": n} for n in names]}
        return Answer(200, headers | {"Content-Type": "application/json"}, json.dumps(model).encode())

    @pytest.mark.parametrize("reference", ["hf:org/name", "hf:org/name@v1.0"])
    def test_weights_and_texts_are_fetched_but_no_pickles_and_no_code(self, reference: str) -> None:
        with serving(self.hub) as url:
            code, out, err = self.resolve(reference, HF_ENDPOINT=url)
        assert code == 0, err
        assert {str(p.relative_to(out)) for p in Path(out).rglob("*") if p.is_file()} == set(self.files)
        code, again, err = self.resolve(reference, HF_HUB_OFFLINE="1")
        assert (code, again) == (0, out), err

    def test_to_describe_a_model_no_weights_are_fetched_until_it_runs(self) -> None:
        with serving(self.hub) as url:
            code, out, err = self.resolve("hf:org/name", "describe", HF_ENDPOINT=url)
            assert code == 0, err
            assert files_in(Path(out)) == {"config.json", "README.md"}
            code, whole, err = self.resolve("hf:org/name", HF_ENDPOINT=url)
        assert (code, whole) == (0, out), err
        assert files_in(Path(out)) == {*self.files, "README.md"}

    def test_offline_and_not_cached(self) -> None:
        code, _, err = self.resolve("hf:org/name", HF_HUB_OFFLINE="1")
        assert code == 1
        assert err.startswith("FetchError: could not fetch hf:org/name: HF_HUB_OFFLINE is set and it is not in the")
        assert "\n" not in err

    @pytest.mark.parametrize(
        ("status", "code", "told"),
        [
            (404, "RepoNotFound", "there is no such model"),
            (403, "GatedRepo", "it is gated"),
            (404, "RevisionNotFound", "the model has no such revision"),
        ],
    )
    def test_what_the_hub_refuses(self, status: int, code: str, told: str) -> None:
        with serving(lambda _: Answer(status, {"X-Error-Code": code})) as url:
            _, _, err = self.resolve("hf:org/name@v2", HF_ENDPOINT=url, HF_TOKEN="hf_hunter2")
        assert err.startswith(f"FetchError: could not fetch hf:org/name@v2: {told}")
        assert "\n" not in err
        assert "hunter2" not in err

    def test_a_hub_that_cannot_be_reached(self) -> None:
        _, _, err = self.resolve("hf:org/name", HF_ENDPOINT=f"http://127.0.0.1:{closed_port()}")
        assert err.startswith("FetchError: could not fetch hf:org/name: ")
        assert "refused: check network, proxy" in err
        assert "\n" not in err


class TestRememberedHashes:
    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        path = tmp_path / "weights"
        path.write_bytes(CONTENT)
        return path

    def test_it_is_the_sha256(self, file: Path) -> None:
        assert file_sha256(file) == file_sha256(file) == SHA256

    def test_a_file_of_the_same_size_and_time_is_not_read_again(self, file: Path) -> None:
        file_sha256(file)
        before = file.stat()
        file.write_bytes(CONTENT[::-1])
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file_sha256(file) == SHA256

    def test_a_file_of_another_time_is_read_again(self, file: Path) -> None:
        file_sha256(file)
        before = file.stat()
        file.write_bytes(CONTENT[::-1])
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns + 1_000_000_000))
        assert file_sha256(file) == hashlib.sha256(CONTENT[::-1]).hexdigest()

    def test_a_file_of_another_size_is_read_again(self, file: Path) -> None:
        file_sha256(file)
        before = file.stat()
        file.write_bytes(b"short")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        assert file_sha256(file) == hashlib.sha256(b"short").hexdigest()

    @pytest.mark.parametrize("memory", [b"", b"{", b"[]", b"3", b"\xff", b"[" * 100_000, b'{"a": 1, "b": []}'])
    def test_a_damaged_memory_is_begun_anew(self, file: Path, cache: Path, memory: bytes) -> None:
        cache.mkdir()
        (cache / "hashes.json").write_bytes(memory)
        assert file_sha256(file) == SHA256
        assert str(file) in json.loads((cache / "hashes.json").read_text())

    @pytest.mark.parametrize("damage", [[], ["abc"], [0], [None], {}, "x"])
    def test_a_damaged_entry_is_not_believed(self, file: Path, cache: Path, damage: object) -> None:
        state = [file.stat().st_size, file.stat().st_mtime_ns]
        cache.mkdir()
        entry = state + damage if isinstance(damage, list) else damage
        (cache / "hashes.json").write_text(json.dumps({str(file): entry}))
        assert file_sha256(file) == SHA256

    def test_files_that_are_gone_are_forgotten(self, file: Path, tmp_path: Path, cache: Path) -> None:
        file_sha256(file)
        other = tmp_path / "other"
        file.rename(other)
        file_sha256(other)
        assert set(json.loads((cache / "hashes.json").read_text())) == {str(other)}

    def test_without_a_cache_it_is_computed(self, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("XINFER_CACHE", str(file / "cache"))
        assert file_sha256(file) == SHA256

    def test_threads_do_not_damage_the_memory(self, tmp_path: Path, cache: Path) -> None:
        paths = [tmp_path / str(i) for i in range(16)]
        for path in paths:
            path.write_bytes(path.name.encode())
        with ThreadPoolExecutor(8) as pool:
            found = list(pool.map(file_sha256, paths * 4))
        assert found == [hashlib.sha256(p.name.encode()).hexdigest() for p in paths * 4]
        json.loads((cache / "hashes.json").read_text())
        assert files_in(cache) == {"hashes.json"}


def test_the_cache_lies_in_the_home_folder_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XINFER_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "xinfer"
