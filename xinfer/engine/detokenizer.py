"""From token ids to text as they come: never half a character, never a piece of a stop string."""

__all__ = ["IncrementalDecoder", "StopMatcher", "TextStream"]

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HOLD = 3  # an unfinished UTF-8 character shows as one to three replacement characters, depending on the decoder
_CONTEXT = 8  # tokens before the window, so that the decoder sees a word's beginning as it would in the whole text
_WINDOW = 48  # tokens after which the window starts anew, so that a step costs the same however long the text


class IncrementalDecoder:
    """Turns tokens into the text that is certain, for any tokenizer that can decode a list of ids.

    The text so far is decoded again over a short window; what may still change (replacement characters at the end, at
    most three) is held back. The window begins with the prompt's last tokens, of which nothing is ever returned.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._ids = list(prompt[-_CONTEXT:])
        self._start = len(self._ids)
        self._settled = len(decode(self._ids).rstrip(_REPLACEMENT)) if self._ids else 0
        self._held = ""

    def push(self, token_id: int) -> str:
        """Take one token; return the text that has become certain, possibly empty."""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = min(_HOLD, len(text) - len(text.rstrip(_REPLACEMENT)))
        certain = max(len(text) - held, self._settled)
        delta, self._held, self._settled = text[self._settled : certain], text[certain:], certain
        if len(self._ids) > _WINDOW and (not self._held or len(self._ids) > 4 * _WINDOW):
            delta += self._held  # only where nothing but broken bytes came for so long
            self._restart()
        return delta

    def flush(self) -> str:
        """Return what is left at the end: one replacement character for an unfinished one, else nothing."""
        held, self._held = self._held, ""
        return _REPLACEMENT if held else ""

    def _restart(self) -> None:
        self._ids = self._ids[-_CONTEXT:]
        self._settled, self._held = len(self._decode(self._ids)), ""


class StopMatcher:
    """Finds the first stop string in a stream of text, holding back only what may become one."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._pending = ""
        self.matched: str | None = None

    def push(self, delta: str) -> str:
        """Take new text; return what can be shown. After a match `matched` is set and the text ends there."""
        if not self._stops:
            return delta
        text = self._pending + delta
        found = [(text.find(stop), stop) for stop in self._stops if stop in text]
        if found:
            at, self.matched = min(found)
            self._pending = ""
            return text[: at + len(self.matched)] if self._include else text[:at]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._pending = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """Return what was held back, now that no more text comes."""
        pending, self._pending = self._pending, ""
        return pending


class TextStream:
    """One sequence's text: decoding and stop strings together; `text` is always the deltas joined."""

    def __init__(self, decode: Decode, prompt: Sequence[int], stops: Sequence[str], include_stop: bool) -> None:
        self._decoder = IncrementalDecoder(decode, prompt)
        self._stops = StopMatcher(stops, include_stop)
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        """All text returned so far."""
        return "".join(self._pieces)

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found."""
        return self._stops.matched is not None

    def push(self, token_id: int) -> str:
        """Take one token; return the text to show for it."""
        return self._keep(self._stops.push(self._decoder.push(token_id)))

    def finish(self) -> str:
        """Return the rest of the text."""
        if self.stopped:
            return ""
        tail = self._stops.push(self._decoder.flush())
        return self._keep(tail if self.stopped else tail + self._stops.flush())

    def _keep(self, delta: str) -> str:
        if delta:
            self._pieces.append(delta)
        return delta


def _overlap(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
