"""Options and fixtures of the conformance kit; `xinfer_pytest` loads it."""

__all__ = ["alone", "checked", "fill", "invariant", "main_model", "models", "one_thread", "report", "runner", "subject"]

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from xinfer import API_VERSION, __version__
from xinfer.engine.runner import ModelRunner
from xinfer.errors import XinferError, nearest
from xinfer.models.families import xinfer_model_families
from xinfer.testing.conformance.checked import Alone, Checked
from xinfer.testing.conformance.subject import LONGEST, Models, Subject, configured, judge
from xinfer.testing.shapes import SHAPES
from xinfer.testing.stepper import Stepper

_SUBJECT = pytest.StashKey[Subject]()
_FIGURES = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the kit's options."""
    group = parser.getgroup("xinfer", "conformance of an xinfer backend")
    group.addoption("--backend", metavar="NAME", help="the backend, built-in or a plugin's; or fake")
    group.addoption(
        "--backend-key", action="append", default=[], metavar="KEY=VALUE", help="one of its keys: device=cpu"
    )
    group.addoption("--model-family", action="append", default=[], metavar="NAME", help="only models of this family")
    group.addoption("--model-dtype", default="float32", metavar="DTYPE", help="precision to ask for (float32)")
    group.addoption(
        "--tolerance",
        type=float,
        metavar="X",
        help="how far rows may be off, root mean square, in shares of their spread",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Find the backend; without one nothing can be tested."""
    config.addinivalue_line("markers", "quick: for a first verdict, within half a minute")
    name, option = config.getoption("--backend"), config.getoption
    if option("help"):
        return
    if name is None:
        raise pytest.UsageError("the conformance kit needs --backend NAME: `python -m xinfer plugins` lists them")
    for family in option("--model-family"):
        if family not in SHAPES:
            raise pytest.UsageError(f"--model-family {family}: there is no tiny model of it{nearest(family, SHAPES)}")
    try:
        found = configured(name, option("--backend-key"), option("--model-dtype"), option("--tolerance"))
    except XinferError as error:
        raise pytest.UsageError(str(error)) from error
    config.stash[_SUBJECT], config.stash[_FIGURES] = found, []


def pytest_report_header(config: pytest.Config) -> str:
    """Say what is tested, against which version of the contract."""
    backend = config.stash[_SUBJECT].backend
    return f"xinfer {__version__}, contract with backends {API_VERSION}, backend {backend.name}: {backend.summary}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Put quick tests first, and leave out families that nobody asked for."""
    wanted = config.getoption("--model-family")
    family = {item: item.callspec.params.get("family") for item in items if hasattr(item, "callspec")}
    out = [item for item in items if wanted and family.get(item) not in (None, *wanted)]
    config.hook.pytest_deselected(items=out)
    items[:] = sorted(
        (item for item in items if item not in out), key=lambda item: item.get_closest_marker("quick") is None
    )


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was measured."""
    for line in config.stash[_FIGURES]:
        terminalreporter.write_line(line)


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """Compute on one thread: with several tiny products only take longer."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def subject(pytestconfig: pytest.Config) -> Subject:
    """The backend under test."""
    return pytestconfig.stash[_SUBJECT]


@pytest.fixture
def report(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Print a figure when all is done."""
    return pytestconfig.stash[_FIGURES].append


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Tiny models of every family."""
    return Models(tmp_path_factory.mktemp("models"), {family.name: family for family in xinfer_model_families()})


@pytest.fixture(scope="session")
def main_model(subject: Subject, models: Models, pytestconfig: pytest.Config) -> Path | None:
    """The model that most tests are about; None for a backend that brings its own."""
    return models.main(subject, pytestconfig.getoption("--model-family"))


@pytest.fixture(scope="session")
def runner(subject: Subject, main_model: Path | None) -> Iterator[ModelRunner]:
    """A runner whose blocks hold what others have left."""
    session = subject.session(main_model)
    fill(session.runner)
    yield session.runner
    session.close()


@pytest.fixture(scope="session")
def invariant(subject: Subject, main_model: Path | None) -> Iterator[ModelRunner]:
    """A runner with `engine.determinism=invariant`."""
    session = subject.session(main_model, determinism="invariant")
    yield session.runner
    session.close()


@pytest.fixture(scope="session")
def alone(subject: Subject, main_model: Path | None) -> Iterator[Alone]:
    """What rows should be: eager's, or, where there is no checkpoint, those of the backend with nothing else to do."""
    session = (judge() if subject.computes_checkpoints else subject).session(main_model)
    yield Alone(session.runner)
    session.close()


@pytest.fixture
def checked(subject: Subject, runner: ModelRunner, alone: Alone) -> Checked:
    """A stepper on the runner that compares every row."""
    return Checked(runner, alone, subject.tolerance_of(runner))


def fill(runner: ModelRunner, longest: int = LONGEST) -> None:
    """Compute texts in as many of the blocks as a test may come to, and forget them."""
    info, stepper = runner.info, Stepper(runner)
    length = min(info.max_model_len, longest)
    texts = min(info.kv_tokens // length, info.num_blocks // -(-length // info.block_size), 64)
    for text in range(texts):
        stepper.step([stepper.start([(text + i) % info.vocab_size for i in range(length)])], [length])
