"""The command: words to configuration, plugins, Hydra, and on to a task. Errors end here, one line each."""

__all__ = ["main", "run"]

import gc
import io
import logging
import os
import secrets
import signal
import sys
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from time import sleep
from typing import Any, NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from xinfer import composing
from xinfer.errors import ConfigError, DeviceError, UsageError, XinferError
from xinfer.flags import CommandLine, flags_help, parse
from xinfer.logs import configure
from xinfer.plugins import Plugins, load_plugins
from xinfer.processes import count, rank
from xinfer.tasks import Job
from xinfer.tasks.sweep import JOB_ERROR, Sweep

log = logging.getLogger(__name__)

INTERRUPTED = 130
_WITH_JSON = ("inspect", "runs", "why")
_PATIENCE_S = 60  # in which the first of several processes has read a command line and a model's headers
USAGE = """usage: python -m xinfer [TASK] [WORD ...] [--flag value] [--dotted.key value] [key=value ...] [-m] [-]

Generates text: on standard output what the model says, on standard error everything else. - reads the prompt from
standard input; -m runs every combination of values separated by commas. A value with = , : # or spaces in it goes in
quotes twice, "key='a=b'"; --dotted.key takes it as it is. README.md tells more."""


def main() -> NoReturn:
    """Run the command line and exit: 0 done, 1 a check failed, 2 wrong usage, 3 failed at run time, 130 interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # whatever the locale says: a model may say anything
    code = run(sys.argv[1:])
    gc.freeze()  # else Python looks through all of torch for garbage on its way out: 0.4 s
    sys.exit(code)


def run(argv: list[str]) -> int:
    """Run a command line and return its exit code; every error has been said on standard error."""
    configure()
    return _answered(lambda: _run(argv))


def _interrupt(number: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def _answered(work: Any) -> int:
    """Return the exit code of some work; an error becomes one line on standard error."""
    try:
        return int(work())
    except XinferError as error:
        alike = isinstance(error, UsageError) and not isinstance(error, DeviceError)
        if not rank() or not alike or not _ended_by_the_first():
            _say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        if not rank():
            _say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:  # whoever read the text has enough of it
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return INTERRUPTED
    except OSError as error:  # a full disk, a folder that can't be written
        _say(f"{error}")
        return XinferError.exit_code
    except Exception as error:
        log.debug("internal error", exc_info=True)
        _say(f"internal error, please report it: {type(error).__name__}: {error} (XINFER_LOG=debug shows where)")
        return XinferError.exit_code


def _ended_by_the_first() -> bool:
    """Wait for the first process to refuse the same and end all others; if it does not, this one is alone with it.

    Whoever leaves first is the reason for torchrun to end the others, which then could not say why.
    """
    try:
        sleep(_PATIENCE_S)
    except KeyboardInterrupt:
        return True
    return False


def _say(message: str) -> None:
    message = " ".join(message.split())
    print(f"xinfer: {message}", file=sys.stderr)
    if path := os.environ.get(JOB_ERROR):
        Path(path).write_text(message, "utf-8")


def _run(argv: list[str]) -> int:
    line = parse(argv, texts=not rank())  # of several processes the first has the requests
    if line.sweep and count() > 1:
        raise ConfigError(
            "a sweep can't be run by several processes: start its jobs with torchrun one by one, without -m"
        )
    plugins = load_plugins()
    composing.register(plugins)
    OmegaConf.register_new_resolver("xinfer_id", lambda: secrets.token_hex(3), use_cache=True, replace=True)
    OmegaConf.register_new_resolver("xinfer_help", lambda: _help(plugins), replace=True)
    codes: list[int] = []
    sweep = Sweep(line)

    def run_here(config: DictConfig) -> None:
        codes.append(_answered(lambda: _job(config, line, plugins)))

    # Hydra reads the command line itself; with this it also lets us word the errors.
    sys.argv = [sys.argv[0], *line.hydra, *line.overrides]
    os.environ["HYDRA_FULL_ERROR"] = "1"
    task = sweep.job if line.sweep else run_here
    try:
        hydra.main(version_base="1.3", config_path=str(composing.config_folder()), config_name="config")(task)()
    except (HydraException, OmegaConfBaseException, ValueError) as error:
        raise composing.worded(error, line.overrides, plugins) from error
    finally:
        codes.append(sweep.finish())
    return max(codes)


def _job(config: DictConfig, line: CommandLine, plugins: Plugins) -> int:
    """Run the task that the configuration names; return its exit code."""
    hydra_config = HydraConfig.get()
    folder = Path(hydra_config.runtime.output_dir)
    if hydra_config.mode == RunMode.MULTIRUN:  # as a file may say, which each job would read again
        raise ConfigError("hydra.mode=MULTIRUN is not taken from a file: a sweep is asked for with -m")
    typed = composing.typed(config)
    if typed.json and typed.task not in _WITH_JSON:
        raise ConfigError(
            f"json=true is of the tasks {', '.join(_WITH_JSON)}: for the figures of a run give --json-stats"
        )
    configure("error" if rank() else typed.log.level, typed.log.json)
    resolved: Any = OmegaConf.to_container(config, resolve=True)
    plain: Any = OmegaConf.to_container(OmegaConf.create({"hydra": hydra_config}), resolve=False)
    job = Job(plugins, tuple(line.prompts), folder, tuple(hydra_config.overrides.task), resolved, plain)
    try:
        code: int = import_module(f"xinfer.tasks.{'follow' if rank() else typed.task}").run(typed, job)
        return code
    finally:
        if folder != Path.cwd():  # which a task without a record has instead of a folder of its own
            with suppress(OSError):  # a run that came to nothing leaves no empty folder
                folder.rmdir()


def _help(plugins: Plugins) -> str:
    """Return the part of --help that is ours: usage, flags, groups with the choices of plugins among them."""
    groups: dict[str, set[str]] = {"backend": set(plugins.backends)}
    for path in composing.config_folder().glob("*/*.yaml"):
        groups.setdefault(path.parent.name, set()).add(path.stem)
    groups |= {f"plugin/{group}": {name} for group, name, _ in plugins.configs}
    lines = [f"  {group}: {', '.join(sorted(choices))}" for group, choices in sorted(groups.items())]
    return "\n".join([USAGE, "", "Flags:", flags_help(), "", "Groups (group=choice):", *lines])
