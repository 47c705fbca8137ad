"""The command line: from words to Hydra overrides and to text, which Hydra must not touch.

    xinfer [TASK] [WORD ...] [--flag value] [--dotted.path value] [key=value ...] [-m] [-]

The first bare word is the task, and some tasks take more; `-` reads the prompt from standard input. Hydra's own flags
stay Hydra's.
"""

__all__ = ["CommandLine", "flags_help", "parse", "quote", "quote_text"]

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from xinfer.errors import ConfigError, nearest
from xinfer.inputs import Prompt, read_prompts_file, read_requests, read_stdin


@dataclass(frozen=True, slots=True)
class Flag:
    """A short word for a key, or, without a key, for text.

    Attributes:
        value: what the flag stands for when it is given none; None where it needs one.
        optional: whether one that has a `value` may be given another, as `--flag=other`.
    """

    name: str
    meaning: str
    key: str | None = None
    value: str | None = None
    optional: bool = False


FLAGS = (
    Flag("--prompt", "text to answer, word for word; several times for several prompts; - reads standard input"),
    Flag("--prompts-file", "a file with one prompt a line; - reads standard input"),
    Flag("--requests", "a file of JSON lines, such as a run's requests.jsonl; - reads standard input"),
    Flag("--system", "system message before each prompt"),
    Flag("--stop", r"text that ends the answer; \n, \t and \\ are understood; may be repeated"),
    Flag("--bad-word", "text that can't be in the answer; may be repeated"),
    Flag("--model", "a folder, a .gguf file, hf:org/name[@revision], or pypi:...", "model.reference"),
    Flag("--max-tokens", "tokens to generate at most", "sampling.max_tokens"),
    Flag("--temperature", "0 always takes the likeliest token", "sampling.temperature"),
    Flag("--top-k", "keep this many of the likeliest tokens; 0 keeps all", "sampling.top_k"),
    Flag("--top-p", "of these, keep the fewest whose probability reaches this", "sampling.top_p"),
    Flag("--min-p", "drop tokens less likely than this share of the likeliest", "sampling.min_p"),
    Flag("--seed", "makes sampling reproducible", "sampling.seed"),
    Flag("--no-chat", "continue the prompt's text instead of answering it", "chat", "false"),
    Flag(
        "--json-stats",
        "print the figures as one line of JSON on standard error (=FILE: there)",
        "json_stats",
        "-",
        True,
    ),
    Flag("--json", "of inspect, runs and why: JSON instead of the page", "json", "true"),
    Flag("--bench-only", "print the figures, not the text", "bench_only", "true"),
    Flag("--resume", "a sweep's folder: run what of the same sweep is not completed there", "hydra.sweep.dir"),
    Flag("--bench", "of bench: measure each test so many times", "bench.repeats"),
    Flag("--against", "of bench: another backend, measured in turns", "bench.against"),
    Flag("--stream-layers", "have only N layers in memory at once", "model.stream_layers"),
    Flag("--request", "of replay and why: this request of the run", "request"),
    Flag("--sample", "of replay and why: this sample of it", "sample"),
    Flag("--from", "of replay: go on from this token of its answer", "replay.first"),
    Flag("--token", "of why: this token of its answer, counted from 0", "why.token"),
    Flag("--no-stream", "have all layers in memory", "model.stream_layers", "null"),
)
WORDS = {  # of tasks that take words: the keys that they stand for, in order
    "diff": ("diff.a", "diff.b"),
    "explain": ("run",),
    "export": ("model.reference", "export.out"),
    "inspect": ("model.reference",),
    "replay": ("run",),
    "why": ("run",),
    "plugins": ("plugins.action", "plugins.name"),
}
WORDS_OF_ANY_NUMBER = {"runs": "runs.words"}  # of tasks that also take words with = in them: the key of the list
_BY_NAME = {flag.name: flag for flag in FLAGS}

_HYDRA_PLAIN = {"--help", "-h", "--hydra-help", "--version", "--resolve", "--run", "-r", "--multirun", "-m"}
_HYDRA_VALUE = {
    *("--cfg", "-c", "--package", "-p", "--config-path", "-cp", "--config-name", "-cn", "--config-dir", "-cd"),
    *("--experimental-rerun", "--info", "-i", "--shell-completion", "-sc"),
}
# What Hydra takes for the text it is: whole numbers as they are usually written, words that mean nothing to it, paths.
_PLAIN = re.compile(r"0|[1-9][0-9]{0,17}|[A-Za-z/][A-Za-z0-9_/.-]*")
_WORDS = {"true", "false", "null", "nan", "inf", "infinity"}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "\\": "\\"}


@dataclass
class CommandLine:
    """A command line, taken apart.

    Attributes:
        hydra: Hydra's own flags.
        overrides: Hydra overrides, the task among them; nothing of what people wrote as text.
        prompts: texts to complete; empty where none was given.
    """

    hydra: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    prompts: list[Prompt] = field(default_factory=list)

    @property
    def sweep(self) -> bool:
        """Whether several jobs were asked for."""
        return not {"-m", "--multirun"}.isdisjoint(self.hydra) or "hydra.mode=MULTIRUN" in self.overrides


def parse(argv: list[str], *, texts: bool = True) -> CommandLine:
    """Take a command line apart; a word that means nothing is a `ConfigError` that names the nearest one.

    Without `texts` none is read, from standard input or a file, and there are no prompts.
    """
    line, words, found = CommandLine(), iter(argv), _Texts()
    task: str | None = None
    keys: Iterator[str] = iter(())
    sides: dict[str, list[str]] = {"a": [], "b": []}
    rest: list[str] = []
    for word in words:
        name, equals, value = word.partition("=")
        if word == "-":
            if texts:
                found.prompts.append(Prompt(read_stdin()))
        elif name in _HYDRA_PLAIN or name in _HYDRA_VALUE:
            line.hydra.append(word)
            if name in _HYDRA_VALUE and not equals:
                line.hydra.append(_next(words, name))
        elif flag := _BY_NAME.get(name):
            value = _value(flag, value if equals else None, words)
            if flag.key is not None:
                line.overrides.append(f"{flag.key}={quote(value)}")
            elif texts:
                found.take(flag.name, value)
        elif name.startswith("--") and "." in name:
            line.overrides.append(f"{name[2:]}={quote(value if equals else _next(words, name))}")
        elif word.startswith("-"):
            close = nearest(name, [*_BY_NAME, *_HYDRA_PLAIN, *_HYDRA_VALUE])
            raise ConfigError(f"unknown flag {name}{close}: --help lists them, and any key works as --dotted.key value")
        elif task is None and word.isidentifier():
            task, keys = word, iter(WORDS.get(word, ()))
            line.overrides.insert(0, f"task={word}")
        elif task == "diff" and name[:2] in ("a.", "b.") and equals:
            sides[name[0]].append(f"{name[2:]}={value}")
        elif task in WORDS_OF_ANY_NUMBER and not name.startswith(("+", "~", f"{task}.", "log.", "hydra")):
            rest.append(quote_text(word))
        elif (not equals or "/" in name or name.startswith(("hf:", "pypi:"))) and (key := next(keys, None)):
            line.overrides.append(f"{key}={quote(word)}")
        elif not equals and not word.startswith("~"):
            raise ConfigError(f"unexpected word {word!r}: a key is set as key=value, and a prompt goes after --prompt")
        else:
            line.overrides.append(word)
    line.overrides += [
        f"diff.{side}_overrides=[{','.join(map(quote_text, own))}]" for side, own in sides.items() if own
    ]
    if rest:
        line.overrides.append(f"{WORDS_OF_ANY_NUMBER[task or '']}=[{','.join(rest)}]")
    line.prompts = found.all()
    return line


def _value(flag: Flag, given: str | None, words: Iterator[str]) -> str:
    if flag.value is None:
        return _next(words, flag.name) if given is None else given
    if given is not None and not flag.optional:
        raise ConfigError(f"{flag.name} takes no value, but was given {given!r}")
    return flag.value if given is None else given


def _next(words: Iterator[str], name: str) -> str:
    value = next(words, None)
    if value is None:
        raise ConfigError(f"{name} needs a value")
    return value


@dataclass
class _Texts:
    """Texts as they are found on the command line; --system, --stop and --bad-word count for all of them."""

    prompts: list[Prompt] = field(default_factory=list)
    system: str | None = None
    stop: list[str] = field(default_factory=list)
    bad_words: list[str] = field(default_factory=list)

    def take(self, flag: str, value: str) -> None:
        """Keep what a flag says."""
        match flag:
            case "--prompt":
                self.prompts.append(Prompt(read_stdin() if value == "-" else value))
            case "--prompts-file":
                self.prompts += [Prompt(text) for text in read_prompts_file(value)]
            case "--requests":
                self.prompts += read_requests(value)
            case "--system":
                self.system = value
            case "--stop":
                self.stop.append(re.sub(r"\\([ntr\\])", lambda match: _ESCAPES[match[1]], value))
            case "--bad-word":
                self.bad_words.append(value)
            case _:
                raise AssertionError(flag)

    def all(self) -> list[Prompt]:
        """Return the prompts, or one without a text where only texts that count for all were given."""
        prompts = self.prompts or ([Prompt()] if self.system is not None or self.stop or self.bad_words else [])
        return [
            replace(
                p,
                system=self.system if p.system is None else p.system,
                stop=p.stop or tuple(self.stop),
                bad_words=p.bad_words or tuple(self.bad_words),
            )
            for p in prompts
        ]


def quote(value: str) -> str:
    """Return a Hydra value that means exactly this text, whatever is in it; null, a list or an object stays one."""
    if value == "null" or value.startswith(("[", "{")) or (_PLAIN.fullmatch(value) and value.lower() not in _WORDS):
        return value
    return quote_text(value)


def quote_text(value: str) -> str:
    """Return a Hydra value that is this text, whatever is in it."""
    # In quotes a backslash counts only before a quote, and before ${, which would be looked up.
    text = re.sub(r"(\\*)('|\Z)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), value)
    return "'" + re.sub(r"(\\*)\$\{", r"\1\1\\${", text) + "'"


def flags_help() -> str:
    """Return the table of flags for --help."""
    width = max(len(flag.name) for flag in FLAGS)
    return "\n".join(f"  {flag.name:{width}}  {flag.meaning}" for flag in FLAGS)
