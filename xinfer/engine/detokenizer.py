"""From token ids to text as they come: never half a character, never a piece of a stop string."""

__all__ = ["Decode", "IncrementalDecoder", "StopMatcher", "TextStream", "remembering"]

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_HOLD = 3  # tokens an unfinished UTF-8 character can have, and replacement characters as which it shows
_CONTEXT = 8  # tokens of the prompt, so that the decoder sees a word's beginning as it would in the whole text
_WINDOW = 64  # tokens after which nothing but broken bytes is cut, so that a step costs the same however long the text


class IncrementalDecoder:
    """Turns tokens into the text that is certain, for any tokenizer that can decode a list of ids.

    Decoded are only the tokens since the text last ended in a whole character, and for context those that made the text
    before. What may still change is held back: replacement characters at the end, at most three.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._context, self._pending = _split(decode, prompt)
        self._before = decode(self._context) if self._context else ""
        tail = decode(self._pending) if self._pending else ""
        self._shown = len(tail) - _unfinished(tail)  # characters of the pending tokens that are not to come (again)
        self._foreign = _unfinished(tail)  # replacement characters that, should they stay, are the prompt's
        self._held = 0

    def push(self, token_id: int) -> str:
        """Take one token; return the text that has become certain, possibly empty."""
        self._pending.append(token_id)
        text = self._decode(self._context + self._pending)
        self._held = _unfinished(text)
        if not self._held and not self._shown and not self._foreign and text.startswith(self._before):
            delta = text[len(self._before) :]  # nearly always: whole characters after whole characters
            if delta:
                self._context, self._before, self._pending = self._pending, self._decode(self._pending), []
            elif self._before:
                self._pending = []
            return delta
        if not text.startswith(self._before):  # byte fallback: one bad byte spoils the whole run of bytes
            if self._held and len(self._pending) <= _HOLD:
                return ""
            self._context, self._before = [], ""
            text = self._decode(self._pending)
        delta = text[len(self._before) + self._shown : len(text) - self._held]
        self._shown += len(delta)
        self._forget()
        return self._own(delta)

    def flush(self) -> str:
        """Return what is left at the end: one replacement character for an unfinished one, else nothing."""
        held, self._held = self._held, 0
        return _REPLACEMENT if held > self._foreign else ""

    def _forget(self) -> None:
        """Let go of tokens that no longer matter."""
        if not self._held and self._shown:
            self._context, self._before = self._pending, self._decode(self._pending)
            self._pending, self._shown = [], 0
        elif not self._held and self._before:
            self._pending = []  # tokens without text
        elif len(self._pending) > _WINDOW:
            self._context, self._before, self._pending = [], "", self._pending[-_CONTEXT:]
            text = self._decode(self._pending)
            self._shown = len(text) - _unfinished(text)

    def _own(self, delta: str) -> str:
        """Take off the replacement characters of the prompt's own unfinished end."""
        if not self._foreign or not delta:
            return delta
        own = delta.lstrip(_REPLACEMENT)
        lost = min(len(delta) - len(own), self._foreign)
        self._foreign = 0 if own else self._foreign - lost
        return delta[lost:]


def _unfinished(text: str) -> int:
    """Return how many characters at the end may still change."""
    if not text.endswith(_REPLACEMENT):
        return 0
    return min(_HOLD, len(text) - len(text.rstrip(_REPLACEMENT)))


def remembering(decode: Decode) -> Decode:
    """Return `decode` with a memory for single tokens, which are asked for again and again."""
    alone: dict[int, str] = {}

    def remembered(ids: list[int]) -> str:
        if len(ids) != 1:
            return decode(ids)
        text = alone.get(ids[0])
        if text is None:
            text = alone[ids[0]] = decode(ids)
        return text

    return remembered


def _split(decode: Decode, prompt: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the prompt's last tokens: those that make whole characters, and those of an unfinished one after them."""
    for end in range(len(prompt), max(len(prompt) - _HOLD - 1, 0), -1):
        for start in [*(max(end - _CONTEXT - extra, 0) for extra in range(_HOLD + 1)), 0]:
            text = decode(list(prompt[start:end]))
            if text and not text.startswith(_REPLACEMENT) and not text.endswith(_REPLACEMENT):
                return list(prompt[start:end]), list(prompt[end:])
    return [], list(prompt[-_HOLD:])


class StopMatcher:
    """Finds the stop string that is whole first, wherever token borders lie; holds back only what may become one."""

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self._stops, self._include = tuple(stops), include
        self._firsts = {stop[0] for stop in stops}
        self._pending = ""
        self.matched: str | None = None

    def push(self, delta: str, may_stop: bool = True) -> str:
        """Take new text; return what can be shown. After a match `matched` is set and the text ends there.

        Only a stop string that this text completes counts, and only if it may.
        """
        if not self._pending and self._firsts.isdisjoint(delta):
            return delta  # no stop string begins here
        text, before = self._pending + delta, len(self._pending)
        found = [(text.find(stop, max(0, before + 1 - len(stop))), stop) for stop in self._stops if may_stop]
        if found := [match for match in found if match[0] >= 0]:
            at, self.matched = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
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

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take one token; return the text to show for it. It completes a stop string only if it may stop the text."""
        return self._keep(self._stops.push(self._decoder.push(token_id), may_stop))

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
