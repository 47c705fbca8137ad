"""What a person sees: text on standard output as it comes, progress and tables on standard error."""

__all__ = ["Progress", "TextWriter", "console", "show_summary"]

import sys
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import rich.box
import rich.console
import rich.progress
import rich.table
from rich.markup import escape

from xinfer.hardware import gibibytes


def console(stderr: bool = False, width: int = 160) -> rich.console.Console:
    """Return a console on standard output or standard error; where that is no terminal, lines have so much room."""
    stream = sys.stderr if stderr else sys.stdout
    return rich.console.Console(
        stderr=stderr, soft_wrap=True, highlight=False, width=None if stream.isatty() else width
    )


class TextWriter:
    """Writes texts one after the other: that of the earliest request live, later ones when their turn comes."""

    def __init__(self, stream: IO[str], silent: bool = False) -> None:
        self._stream, self._silent = stream, silent
        self._current = 0
        self._held: dict[int, list[str]] = {}
        self._done: set[int] = set()

    def write(self, index: int, text: str) -> None:
        """Take new text of a request."""
        if self._silent or not text:
            return
        if index == self._current:
            self._stream.write(text)
            self._stream.flush()
        else:
            self._held.setdefault(index, []).append(text)

    def finish(self, index: int, tail: str) -> None:
        """Take the end of a request's text, and go on to those that wait for their turn."""
        self.write(index, tail)
        self._done.add(index)
        while self._current in self._done and not self._silent:
            self._stream.write("\n")
            self._current += 1
            self._stream.write("".join(self._held.pop(self._current, [])))
            self._stream.flush()


class Progress:
    """A spinner or a bar on standard error, where that is a terminal and the text is not on the same one."""

    def __init__(self, what: str, total: int | None = None) -> None:
        busy = total is not None and sys.stdout.isatty()
        columns: list[rich.progress.ProgressColumn] = [
            rich.progress.SpinnerColumn(),
            rich.progress.TextColumn("{task.description}"),
            rich.progress.TimeElapsedColumn(),
        ]
        if total is not None:
            columns += [
                rich.progress.BarColumn(),
                rich.progress.TextColumn("{task.completed} tokens, at most {task.total}"),
            ]
        enabled = sys.stderr.isatty() and not busy
        self._bar = rich.progress.Progress(*columns, console=console(stderr=True), transient=True, disable=not enabled)
        self._task = self._bar.add_task(what, total=total)

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def advance(self, count: int) -> None:
        """Count tokens."""
        self._bar.advance(self._task, count)


def show_summary(figures: dict[str, Any], replay: str | None, folder: Path | None) -> None:
    """Print a run's figures as a small table, and the command that runs it again."""
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(style="dim")
    for name, value, unit in _rows(figures):
        table.add_row(name, value, unit)
    page = console(stderr=True)
    page.print(table)
    if folder is not None:
        page.print(f"record  {escape(str(folder))}")
    if replay is not None:
        page.print(f"replay  {escape(replay)}")


def _rows(figures: dict[str, Any]) -> list[tuple[str, str, str]]:
    many = figures["requests"] > 1
    median = ", median" if many else ""
    rows = [("requests", f"{figures['requests']}", "")] if many else []
    rows += [
        ("prompt", f"{figures['prompt_tokens']}", f"tokens{_cached(figures['cached_tokens'])}"),
        (
            "generated",
            f"{figures['generated_tokens']}",
            f"tokens, {figures['sampling']['summary']}, seed {figures['seed']}",
        ),
        ("prefill", _number(figures["prefill_ms"]), f"ms, {_number(figures['prefill_tok_s'])} tokens/s"),
        ("decode", _number(figures["decode_ms"]), f"ms, {_number(figures['decode_tok_s'])} tokens/s"),
        ("time to first token", _number(figures["ttft_ms"]), f"ms{median}"),
        ("time per token", _number(figures["tpot_ms"]), f"ms{median}"),
    ]
    if guesses := figures.get("speculation"):
        share = f", {guesses['acceptance_rate']:.0%} of them right" if guesses["proposed_tokens"] else ""
        off = f", switched off in {guesses['steps_switched_off']} of {guesses['decode_steps']} steps"
        rows.append(("guessed", f"{guesses['proposed_tokens']}", f"tokens{share}{off}"))
    if many:
        rows.append(("all together", _number(figures["output_tok_s"]), "generated tokens/s"))
    rows += [
        ("weights", gibibytes(figures["resident_weight_bytes"]), f"{figures['dtype']} on {figures['device']}"),
        ("KV cache", gibibytes(figures["kv_cache_bytes"]), "capacity"),
        ("peak memory", gibibytes(figures["peak_memory_bytes"]), "of the process"),
    ]
    if stream := figures.get("stream"):
        each = "-" if stream["bytes_per_token"] is None else gibibytes(stream["bytes_per_token"])
        waited = f"{stream['wait_share']:.0%} of the time spent waiting for it"
        rows.append(("brought in", each, f"a token, with {stream['slots']} layers in memory; {waited}"))
    if roofline := figures.get("roofline"):
        share, bandwidth = roofline["share"], roofline["read_bandwidth_bytes_s"] / 1e9
        rows.append(("roofline", f"{share:.0%}", f"of what reading weights and cache at {bandwidth:.0f} GB/s allows"))
    return rows


def _cached(tokens: int) -> str:
    return f", {tokens} of them in the prefix cache" if tokens else ""


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"
