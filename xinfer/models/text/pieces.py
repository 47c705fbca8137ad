"""A `tokenizers` object from SentencePiece's pieces, of a `tokenizer.model` or a GGUF file."""

__all__ = ["PieceType", "Pieces", "from_pieces"]

from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from math import isfinite

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from xinfer.errors import ModelError
from xinfer.models.text.merging import MergeSplit

_MOST_WORK = 1 << 26  # the sum of squares of lengths, which finding the merges takes; Gemma's pieces have 20 million


class PieceType(IntEnum):
    """What a piece is, by SentencePiece's numbers, which are GGUF's too."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


@dataclass(frozen=True)
class Pieces:
    """A SentencePiece model.

    Attributes:
        texts: of the pieces, by id.
        scores: of the pieces, as many.
        types: of the pieces, as many; a number that is no `PieceType` is one that is never made.
        unigram: whether pieces are chosen for the best sum of scores, else merged.
        byte_fallback: whether characters without a piece become bytes.
        charsmap: how texts are normalized, compiled by SentencePiece; nothing leaves them alone.
        dummy_prefix: whether texts begin with a space that is not theirs.
        strip: whether spaces at the ends and repeated ones are left out.
        escape: whether pieces have `▁` for a space.
        whole_user_defined: whether pieces of the user are found behind the dummy prefix, as SentencePiece does; else
            they split texts as control tokens do, as llama.cpp does.
        first_only: whether there is no dummy prefix behind an added token.
    """

    texts: list[str]
    scores: list[float]
    types: list[int]
    unigram: bool = False
    byte_fallback: bool = True
    charsmap: bytes = b""
    dummy_prefix: bool = True
    strip: bool = False
    escape: bool = True
    whole_user_defined: bool = True
    first_only: bool = False

    def of(self, *types: int) -> list[str]:
        """Return the texts of pieces of these types."""
        return [text for text, kind in zip(self.texts, self.types, strict=True) if kind in types]


def from_pieces(pieces: Pieces) -> tuple[tokenizers.Tokenizer, MergeSplit | None]:
    """Return the tokenizer, and the pre-tokenizer that it needs for merging where the library's would differ."""
    _check(pieces)
    split = None
    if pieces.unigram:
        backend = _unigram(pieces)
    else:
        backend, split = _merging(pieces)
    backend.normalizer = normalizers.Sequence(_normalizers(pieces))
    if pieces.dummy_prefix and pieces.first_only:
        prefix = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        cuts = [backend.pre_tokenizer] if backend.pre_tokenizer else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([prefix, *cuts])
    backend.decoder = decoders.Sequence(_decoders(pieces))
    for types, special in (
        ((PieceType.CONTROL, PieceType.UNKNOWN), True),
        (() if pieces.whole_user_defined else (PieceType.USER_DEFINED,), False),
    ):
        backend.add_tokens([AddedToken(text, normalized=False, special=special) for text in pieces.of(*types) if text])
    return backend, split


def _check(pieces: Pieces) -> None:
    if not pieces.texts:
        raise ModelError("the SentencePiece vocabulary has no pieces")
    if len(set(pieces.texts)) != len(pieces.texts):
        seen: set[str] = set()
        twice = next(text for text in pieces.texts if text in seen or seen.add(text))  # type: ignore[func-returns-value]
        raise ModelError(f"the SentencePiece vocabulary has the piece {twice!r:.80} twice")
    if sum(len(text) ** 2 for text in pieces.texts) > _MOST_WORK:
        longest = max(map(len, pieces.texts))
        raise ModelError(
            f"the SentencePiece vocabulary's pieces, up to {longest} characters, are longer than any in use"
        )
    if not all(map(isfinite, pieces.scores)):
        raise ModelError("the SentencePiece vocabulary has a score that is no number")


def _unknown(pieces: Pieces) -> int:
    return next((i for i, kind in enumerate(pieces.types) if kind == PieceType.UNKNOWN), 0)


def _unigram(pieces: Pieces) -> tokenizers.Tokenizer:
    """The library takes any piece for text. So those that are none get texts that no text has, or the lowest score."""
    normal = [s for s, kind in zip(pieces.scores, pieces.types, strict=True) if kind == PieceType.NORMAL] or [0.0]
    lowest, highest = min(normal), max(normal)
    vocabulary = []
    for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True):
        if kind == PieceType.USER_DEFINED:  # as long as it is, it counts for more than pieces that make it up
            vocabulary.append((text, len(text.encode()) * highest - 0.1))
        elif kind == PieceType.UNUSED and pieces.whole_user_defined:
            vocabulary.append((f"\ufdd0{text}\ufdd0", lowest))
        else:
            vocabulary.append((text, score if kind == PieceType.NORMAL else lowest))
    backend = tokenizers.Tokenizer(models.Unigram(vocabulary, _unknown(pieces), pieces.byte_fallback))
    if pieces.byte_fallback:  # no text is a byte's name
        backend.pre_tokenizer = pre_tokenizers.Split(Regex("<(?=0x[0-9A-F]{2}>)"), "isolated")
    return backend


def _merging(pieces: Pieces) -> tuple[tokenizers.Tokenizer, MergeSplit | None]:
    ids = {text: i for i, text in enumerate(pieces.texts)}
    scores = {
        text: score
        for text, score, kind in zip(pieces.texts, pieces.scores, pieces.types, strict=True)
        if kind in (PieceType.NORMAL, PieceType.UNUSED)
    }
    merges = [
        (-score, ids[text], text[:cut], text[cut:])
        for text, score in scores.items()
        for cut in range(1, len(text))
        if text[:cut] in scores and text[cut:] in scores
    ]
    merges.sort()
    frozen = pieces.of(PieceType.USER_DEFINED) if pieces.whole_user_defined else []
    unused = frozenset(pieces.of(PieceType.UNUSED)) if pieces.whole_user_defined else frozenset[str]()
    tied = any(a[0] == b[0] and a[1] != b[1] for a, b in pairwise(merges))
    whole = set().union(*scores) <= scores.keys()  # else a piece is made of characters that are none
    unknown = pieces.texts[_unknown(pieces)]
    if whole and not tied and not frozen and unused.isdisjoint(left + right for *_, left, right in merges):
        ranked = [(left, right) for *_, left, right in merges]
        model = models.BPE(ids, ranked, unk_token=unknown, fuse_unk=True, byte_fallback=pieces.byte_fallback)
        return tokenizers.Tokenizer(model), None
    model = models.BPE(
        ids, [], unk_token=unknown, fuse_unk=True, byte_fallback=pieces.byte_fallback, ignore_merges=True
    )
    known = frozenset(scores) | frozenset(frozen)
    return tokenizers.Tokenizer(model), MergeSplit(scores, unused, frozen, known)


def _normalizers(pieces: Pieces) -> list[normalizers.Normalizer]:
    steps: list[normalizers.Normalizer] = []
    if pieces.charsmap:
        steps.append(normalizers.Precompiled(pieces.charsmap))
    if pieces.strip:
        steps += [normalizers.Replace(Regex(r"\A +| +\z"), ""), normalizers.Replace(Regex(" {2,}"), " ")]
    space = "▁" if pieces.escape else " "
    if pieces.dummy_prefix and not pieces.first_only:
        steps.append(normalizers.Prepend(space))
    if pieces.escape:
        steps.append(normalizers.Replace(" ", "▁"))
    return steps


def _decoders(pieces: Pieces) -> list[decoders.Decoder]:
    steps: list[decoders.Decoder] = [decoders.Replace("▁", " ")]
    if pieces.byte_fallback:
        steps.append(decoders.ByteFallback())
    return [*steps, decoders.Fuse(), *([decoders.Strip(" ", 1, 0)] if pieces.dummy_prefix else [])]
