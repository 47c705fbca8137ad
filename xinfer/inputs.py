"""What a user wants completed: prompts from flags, files and standard input, word for word."""

__all__ = ["Prompt", "read_prompts_file", "read_requests", "read_stdin"]

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from xinfer.errors import ConfigError

_LARGEST = 256 << 20  # bytes of one input
_FIELDS = {"prompt", "system", "stop", "bad_words", "seed", "chat", "prompt_token_ids"}


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's text.

    Attributes:
        text: what the user says, or the text to continue; None where `token_ids` are given.
        system: a system message before it.
        stop: strings that end the answer.
        seed: of this request; None derives it from the run's.
        chat: whether it is a message or a text to continue; None leaves it to the configuration.
        token_ids: the prompt as ids, as it is.
        bad_words: texts that can't be in the answer.
    """

    text: str | None = None
    system: str | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    chat: bool | None = None
    token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()

    def to_json(self) -> str:
        """Return the line that `read_requests` reads back."""
        named = {"prompt": self.text, "prompt_token_ids": self.token_ids, "seed": self.seed}
        others = {"system": self.system, "stop": self.stop, "bad_words": self.bad_words, "chat": self.chat}
        return json.dumps({name: value for name, value in (named | others).items() if value is not None})


def read_stdin() -> str:
    """Return all of standard input, less the newline that ends it."""
    return _decoded(sys.stdin.buffer, "standard input").removesuffix("\n")


def read_prompts_file(name: str) -> list[str]:
    """Return a file's prompts, one a line, empty lines left out; `-` is standard input."""
    prompts = [line for line in _text(name).splitlines() if line.strip()]
    if not prompts:
        raise ConfigError(f"--prompts-file {name}: no prompts in it (one a line)")
    return prompts


def read_requests(name: str) -> list[Prompt]:
    """Return requests from JSON lines, as a run's requests.jsonl has them; `-` is standard input.

    A line is an object with `prompt` or `prompt_token_ids`, and optionally `system`, `stop`, `bad_words`, `seed`,
    `chat`. In a
    run's file the lines that tell results are passed over.
    """
    prompts = []
    for number, line in enumerate(_text(name).splitlines(), 1):
        if not line.strip():
            continue
        where = f"--requests {name}, line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where}: not JSON ({error})") from error
        if not isinstance(entry, dict):
            raise ConfigError(f"{where}: an object is expected, not {type(entry).__name__}")
        if entry.get("event", "request") == "request":
            prompts.append(_prompt(entry, where))
    if not prompts:
        raise ConfigError(f"--requests {name}: no requests in it")
    return prompts


def _prompt(entry: dict[str, Any], where: str) -> Prompt:
    if "event" not in entry and (unknown := set(entry) - _FIELDS):
        raise ConfigError(f"{where}: unknown {', '.join(sorted(unknown))} (known: {', '.join(sorted(_FIELDS))})")
    text, ids = entry.get("prompt"), entry.get("prompt_token_ids")
    stop, bad_words = (
        [texts] if isinstance(texts := entry.get(name) or [], str) else texts for name in ("stop", "bad_words")
    )
    checks = {
        "prompt": isinstance(text, str) or (text is None and isinstance(ids, list)),
        "system": isinstance(entry.get("system"), str | None),
        "stop": _are_texts(stop),
        "bad_words": _are_texts(bad_words),
        "seed": isinstance(entry.get("seed"), int | None) and not isinstance(entry.get("seed"), bool),
        "chat": isinstance(entry.get("chat"), bool | None),
        "prompt_token_ids": ids is None or isinstance(ids, list),
    }
    for field, good in checks.items():
        if not good:
            raise ConfigError(f"{where}: {field} is missing or of the wrong type ({entry.get(field)!r:.80})")
    return Prompt(
        text=text,
        system=entry.get("system"),
        stop=tuple(stop),
        bad_words=tuple(bad_words),
        seed=entry.get("seed"),
        chat=entry.get("chat"),
        token_ids=tuple(ids) if text is None and ids is not None else None,
    )


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _text(name: str) -> str:
    if name == "-":
        return _decoded(sys.stdin.buffer, "standard input")
    try:
        with Path(name).expanduser().open("rb") as stream:
            return _decoded(stream, name)
    except OSError as error:
        raise ConfigError(f"{name}: can't be read ({error.strerror or error})") from error


def _decoded(stream: IO[bytes], name: str) -> str:
    content = stream.read(_LARGEST + 1)
    if len(content) > _LARGEST:
        raise ConfigError(f"{name}: larger than {_LARGEST >> 20} MiB")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{name}: not UTF-8 at byte {error.start}") from error
