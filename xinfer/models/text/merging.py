"""SentencePiece's merging, for vocabularies in which the library's would differ."""

__all__ = ["MergeSplit"]

import re
from collections.abc import Iterator, Mapping
from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

import tokenizers

_MOST_KEPT = 1 << 16  # words whose pieces are remembered
_BLOCK = 64  # pieces that are cut out of a long text together, since a cut costs the length of the text before it


class MergeSplit:
    """A pre-tokenizer that cuts texts into pieces as SentencePiece's BPE does.

    The library ranks pairs, of which no two are equal. SentencePiece compares the scores of what pairs make, and takes
    the leftmost of equals; pieces of the user are never merged, and unused ones are taken apart again.

    Args:
        scores: of pieces that can be merged to.
        unused: those of them that must not remain.
        frozen: pieces that are taken whole wherever they stand.
        known: all texts that have an id. Characters without one are left together.
    """

    def __init__(
        self, scores: Mapping[str, float], unused: frozenset[str], frozen: list[str], known: frozenset[str]
    ) -> None:
        self._scores, self._unused, self._known = scores, unused, known
        longest = sorted(frozen, key=len, reverse=True)
        self._frozen = re.compile("|".join(map(re.escape, longest))) if frozen else None
        self._kept: dict[str, tuple[str, ...]] = {}
        # Where no piece reaches over the beginning of a word, words are merged one by one.
        self._words = not frozen and not any(re.search("[^▁]▁", piece) for piece in scores)

    def settings(self) -> str:
        """Return all that decides how texts are cut."""
        frozen = self._frozen.pattern if self._frozen else ""
        return repr((sorted(self._scores.items()), sorted(self._unused), frozen))

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        """Split a text; what `tokenizers` calls."""
        text.split(self._split)

    def _split(self, _: int, text: Any) -> list[Any]:
        ends = [0]
        for piece in self.pieces(str(text)):
            ends.append(ends[-1] + len(piece))
        return [
            block[a - first : b - first]
            for i in range(0, len(ends) - 1, _BLOCK)
            for first, block in [(ends[i], text[ends[i] : ends[min(i + _BLOCK, len(ends) - 1)]])]
            for a, b in pairwise(ends[i : i + _BLOCK + 1])
        ]

    def pieces(self, text: str) -> Iterator[str]:
        """Yield a normalized text's pieces, characters without an id in runs."""
        run = ""
        for piece in self._merged(text):
            if piece in self._known:
                if run:
                    yield run
                    run = ""
                yield piece
            else:
                run += piece
        if run:
            yield run

    def _merged(self, text: str) -> Iterator[str]:
        if self._words:
            for word in re.findall("▁+[^▁]*|[^▁]+", text):
                yield from self._remembered(word)
        elif self._frozen:
            yield from self._merge(self._around_frozen(text))
        else:
            yield from self._merge([(character, False) for character in text])

    def _remembered(self, word: str) -> tuple[str, ...]:
        if (found := self._kept.get(word)) is None:
            found = tuple(self._merge([(character, False) for character in word]))
            if len(self._kept) < _MOST_KEPT and len(word) <= _BLOCK:
                self._kept[word] = found
        return found

    def _around_frozen(self, text: str) -> list[tuple[str, bool]]:
        assert self._frozen
        symbols, end = [], 0
        for match in self._frozen.finditer(text):
            symbols += [(character, False) for character in text[end : match.start()]]
            symbols.append((match.group(), True))
            end = match.end()
        return symbols + [(character, False) for character in text[end:]]

    def _merge(self, symbols: list[tuple[str, bool]]) -> Iterator[str]:
        """Yield what remains of symbols, some of them frozen, when no two neighbours make a piece any more."""
        scores, texts, count = self._scores, [text for text, _ in symbols], len(symbols)
        before, after = list(range(-1, count - 1)), [*range(1, count), -1]
        made: dict[str, tuple[str, str]] = {}
        heap: list[tuple[float, int, int, str]] = []

        def pair(left: int, right: int) -> tuple[float, int, int, str] | None:
            if symbols[left][1] or symbols[right][1]:
                return None
            score = scores.get(whole := texts[left] + texts[right])
            if score is None:
                return None
            if whole in self._unused:
                made[whole] = (texts[left], texts[right])
            return -score, left, right, whole

        heap = [found for i in range(count - 1) if (found := pair(i, i + 1))]
        heapify(heap)
        while heap:
            _, left, right, whole = heappop(heap)
            if after[left] != right or texts[left] + texts[right] != whole:
                continue  # one of them was merged with another
            texts[left], texts[right] = whole, ""
            after[left], after[right] = after[right], -2
            if after[left] >= 0:
                before[after[left]] = left
                if found := pair(left, after[left]):
                    heappush(heap, found)
            if before[left] >= 0 and (found := pair(before[left], left)):
                heappush(heap, found)
        rest = [text for text in reversed(texts) if text]
        while rest:
            text = rest.pop()
            if text in made:
                rest += reversed(made[text])
            else:
                yield text
