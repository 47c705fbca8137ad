"""SentencePiece's `tokenizer.model`: a protocol buffer of which a few fields are read, and nothing is believed.

A reader of the wire format's four kinds of fields is shorter than a dependency, and takes no more memory than the file.
"""

__all__ = ["read_sentencepiece"]

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from xinfer.errors import ModelError
from xinfer.models.files import read_file
from xinfer.models.text.pieces import Pieces, PieceType

_UNIGRAM, _BPE, _WORD, _CHARACTER = 1, 2, 3, 4
_LARGEST = 1 << 26  # bytes; the largest in use have some 5 million
_MOST_FIELDS = {"model": 1 << 19, "piece": 16, "spec": 1 << 16}  # the largest in use has 262,144 pieces

# Numbers of fields in SentencePiece's sentencepiece_model.proto.
_PIECE, _TRAINER, _NORMALIZER = 1, 2, 3
_TEXT, _SCORE, _TYPE = 1, 2, 3
_MODEL_TYPE, _SUFFIX, _BYTE_FALLBACK = 3, 24, 35
_CHARSMAP, _DUMMY_PREFIX, _EXTRA_WHITESPACES, _ESCAPE = 2, 3, 4, 5
_IDS = {"bos_token": 41, "eos_token": 42, "pad_token": 43}


def read_sentencepiece(file: Path) -> tuple[Pieces, dict[str, int]]:
    """Return a model's pieces, and the ids of its special tokens by name; what it can't be is a `ModelError`."""
    try:
        return _read(memoryview(read_file(file, _LARGEST)))
    except (ValueError, IndexError, struct.error) as error:
        raise ModelError(f"{file}: not a SentencePiece model ({error}): download it again") from error
    except ModelError as error:
        raise ModelError(f"{file}: {error}") from error


def _read(content: memoryview) -> tuple[Pieces, dict[str, int]]:
    texts: list[str] = []
    scores: list[float] = []
    types: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    seen = set()
    for number, value in _fields(content, "model"):
        seen.add(number)
        if number == _PIECE:
            piece = dict(_fields(_message(value), "piece"))
            texts.append(bytes(_message(piece.get(_TEXT, b""))).decode())
            scores.append(struct.unpack("<f", piece[_SCORE])[0] if _SCORE in piece else 0.0)
            types.append(_number(piece.get(_TYPE, PieceType.NORMAL)))
        elif number == _TRAINER:
            trainer |= dict(_fields(_message(value), "spec"))
        elif number == _NORMALIZER:
            normalizer |= dict(_fields(_message(value), "spec"))
    if not {_TRAINER, _NORMALIZER} <= seen:  # which come after all pieces
        raise ValueError("it has no trainer_spec or no normalizer_spec, as if truncated")
    kind = _number(trainer.get(_MODEL_TYPE, _UNIGRAM))
    if kind not in (_UNIGRAM, _BPE):
        names = {_WORD: "word", _CHARACTER: "char"}
        raise ModelError(
            f"the SentencePiece model type {names.get(kind, kind)!r} is not supported: bpe and unigram are"
        )
    if _number(trainer.get(_SUFFIX, 0)):
        raise ModelError("the SentencePiece model has treat_whitespace_as_suffix, which is not supported")
    pieces = Pieces(
        texts=texts,
        scores=scores,
        types=types,
        unigram=kind == _UNIGRAM,
        byte_fallback=bool(_number(trainer.get(_BYTE_FALLBACK, 0))),
        charsmap=bytes(_message(normalizer.get(_CHARSMAP, b""))),
        dummy_prefix=bool(_number(normalizer.get(_DUMMY_PREFIX, 1))),
        strip=bool(_number(normalizer.get(_EXTRA_WHITESPACES, 1))),
        escape=bool(_number(normalizer.get(_ESCAPE, 1))),
    )
    defaults = {"bos_token": 1, "eos_token": 2, "pad_token": -1}
    ids = {name: _number(trainer.get(number, defaults[name])) for name, number in _IDS.items()}
    named = {name: i for name, i in ids.items() if 0 <= i < len(types) and types[i] == PieceType.CONTROL}
    if PieceType.UNKNOWN in types:
        named["unk_token"] = types.index(PieceType.UNKNOWN)
    return pieces, named


def _fields(content: memoryview, kind: str) -> Iterator[tuple[int, Any]]:
    """Yield a message's fields: numbers as int, texts and messages as memoryview, fixed widths as bytes."""
    at, end, left = 0, len(content), _MOST_FIELDS[kind]
    while at < end:
        if (left := left - 1) < 0:
            raise ValueError(f"more than {_MOST_FIELDS[kind]} fields of a {kind}")
        key, at = _varint(content, at)
        wire = key & 7
        if wire == 0:
            value, at = _varint(content, at)
            yield key >> 3, value
            continue
        if wire == 2:
            size, at = _varint(content, at)
        elif wire in (1, 5):
            size = 8 if wire == 1 else 4
        else:
            raise ValueError(f"a field of the unknown kind {wire} at byte {at}")
        if size > end - at:
            raise ValueError(f"truncated: {size} bytes are expected at byte {at} of {end}")
        yield key >> 3, content[at : at + size] if wire == 2 else bytes(content[at : at + size])
        at += size


def _varint(content: memoryview, at: int) -> tuple[int, int]:
    """Return a number and where it ends."""
    byte = content[at]
    if byte < 128:
        return byte, at + 1
    value = byte & 127
    for i in range(1, 10):
        byte = content[at + i]
        value |= (byte & 127) << (7 * i)
        if byte < 128:
            return value, at + i + 1
    raise ValueError(f"a number without end at byte {at}")


def _message(value: Any) -> memoryview:
    if not isinstance(value, memoryview | bytes) or (isinstance(value, bytes) and value):
        raise ValueError("a field of another kind than expected")
    return memoryview(value)


def _number(value: Any) -> int:
    """Return a field's number; negative ones are written as if of 64 bits."""
    if not isinstance(value, int):
        raise ValueError("a field of another kind than expected")
    return value
