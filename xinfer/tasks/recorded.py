"""A recorded run, for running it again: its configuration with some things changed, and its requests."""

__all__ = ["RecordedRequest", "configuration_of", "find_run", "requests_of"]

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from xinfer.composing import composed, typed
from xinfer.config import Config
from xinfer.engine.types import SamplingParams
from xinfer.errors import UsageError
from xinfer.inputs import Prompt
from xinfer.plugins import Plugins
from xinfer.records.index import RunIndex
from xinfer.records.reader import Entry, RecordedRun
from xinfer.records.record import HIDDEN

_RUNS = Path("outputs")


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """A request of a recorded run.

    Attributes:
        index: its number in the run.
        prompt_token_ids: its prompt.
        params: how its tokens were chosen, its own seed among them.
        samples: what came of each of its samples, as far as they ended: the lines of requests.jsonl.
        prompt, chat: its texts, and whether they were a message.
    """

    index: int
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    samples: dict[int, Entry]
    prompt: Prompt
    chat: bool

    @property
    def one_sample(self) -> SamplingParams:
        """How the tokens of one of its samples were chosen."""
        return replace(self.params, n=1)

    @property
    def unfinished(self) -> set[int]:
        """Those of its samples that had not come to their end."""
        ended = {number for number, sample in self.samples.items() if sample["finish_reason"] in ("stop", "length")}
        return set(range(self.params.n)) - ended

    def tokens(self, sample: int) -> list[int]:
        """Return what a sample had generated, as far as it is recorded."""
        return list((self.samples.get(sample) or {}).get("token_ids") or ())


def find_run(name: str) -> Path:
    """Return the folder of a run, under outputs/ or elsewhere; see `RunIndex.find`. `latest` is one with requests."""
    if Path(name).expanduser().joinpath("run.json").is_file():
        return Path(name).expanduser()
    with RunIndex(_RUNS) as index:
        return index.find(name, _had_requests)


def _had_requests(folder: Path) -> bool:
    path = folder / "requests.jsonl"
    return path.is_file() and path.stat().st_size > 0


def requests_of(run: RecordedRun) -> list[RecordedRequest]:
    """Return a run's requests; a record without texts is a `UsageError`, for it holds no prompts."""
    kept = (run.info.get("config") or {}).get("record", {}).get("text", "full")
    if kept != "full":
        raise UsageError(f"{run.folder} was recorded with record.text={kept}: there are no prompts to run again")
    if not run.requests:
        raise UsageError(f"{run.folder} has no requests: the run ended before there were any (status {run.status})")
    return [_request(run, entry) for _, entry in sorted(run.requests.items())]


def _request(run: RecordedRun, entry: Entry) -> RecordedRequest:
    known = {field.name for field in fields(SamplingParams)}
    params: dict[str, Any] = {name: value for name, value in entry["params"].items() if name in known}
    params |= {name: tuple(entry.get(name) or ()) for name in ("stop", "bad_words")}
    return RecordedRequest(
        index=entry["index"],
        prompt_token_ids=tuple(entry["prompt_token_ids"]),
        params=SamplingParams(**params, seed=entry["seed"]),
        samples={int(sample.get("sample", 0)): sample for sample in run.samples_of(entry["index"])},
        prompt=Prompt(entry.get("prompt"), entry.get("system"), params["stop"], bad_words=params["bad_words"]),
        chat=bool(entry.get("chat")),
    )


def configuration_of(run: RecordedRun, changes: Sequence[str], plugins: Plugins) -> tuple[Config, list[str]]:
    """Return a run's configuration with these overrides over it, and the keys of it that no longer mean anything.

    A group that is named (`backend=onnx`) counts as a whole, whatever the run had of it.
    """
    recorded = run.info.get("config") or {}
    backend = (recorded.get("backend") or {}).get("name")
    if backend is None:
        raise UsageError(f"{run.folder} does not say what was configured: its run.json names no backend")
    named = [word.lstrip("+~").partition("=")[0] for word in changes]
    if "experiment" in named:
        raise UsageError("experiment=… can't be laid over a recorded run: name the keys that are to be different")
    config = composed([*changes, *([] if "backend" in named else [f"backend={backend}"])], plugins)
    unknown = []
    for key, value in _leaves(recorded, config):
        if value == HIDDEN or any(key == name or key.startswith(f"{name}.") for name in named):
            continue
        if _has(config, key):
            OmegaConf.update(config, key, value, merge=False)
        else:
            unknown.append(key)
    return typed(config), unknown


def _leaves(values: dict[str, Any], config: DictConfig, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield by dotted key what has no keys of its own that the configuration knows."""
    for name, value in values.items():
        key = f"{prefix}{name}"
        node = OmegaConf.select(config, key) if _has(config, key) else None
        kind = OmegaConf.get_type(node) if isinstance(node, DictConfig) else None
        if isinstance(value, dict) and is_dataclass(kind):
            yield from _leaves(value, config, f"{key}.")
        elif isinstance(value, dict) and isinstance(node, DictConfig) and node._metadata.key_type is int:
            yield key, {int(number): each for number, each in value.items()}  # JSON has them as texts
        else:
            yield key, value


def _has(config: DictConfig, key: str) -> bool:
    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(config, parent) if parent else config
    return isinstance(node, DictConfig) and name in node
