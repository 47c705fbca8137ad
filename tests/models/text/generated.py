"""Texts and vocabularies made from seeds, for tests and for tests/data/make_gguf_tokens.py."""

import random
from typing import Any

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6

_WORDS = """
a b x the The word HELLO camelCase it's I'M we'LL 's don't unaffable running
é É ñandú ÄÖ cafe\u0301 e\u0301 n\u0303 ß ﬁ 中文 字 漢字かな カタカナ 한국어 हिन्दी नमस्ते ไทย עברית العربية Привет МИР
1 12 123 1234 1234567 ٣٤٥ ² ½ Ⅷ 一二三
! ? ... -- == / // \\ # $ < <= > ( [ { ` ~ ^ | “ ” … ， 。 ！ 、 — · € + ∑ _ @ & % ' " : ;
😀 👨\u200d👩\u200d👧 ✌🏽 🇩🇪 \0 \u200b
"""
_SPACES = (" ", " ", " ", "  ", "   ", " " * 9, "\n", "\n\n", "\r\n", "\t", "\u00a0", "\u3000", "\u2028")
_PARTS = (*_WORDS.split(), *_SPACES)


def texts(count: int, seed: int = 1) -> list[str]:
    """Letters, digits, signs, spaces, contractions, scripts and combining marks, in random order."""
    rng = random.Random(seed)
    return ["".join(rng.choice(_PARTS) for _ in range(rng.randint(1, 9))) for _ in range(count)]


def _substrings(rng: random.Random, count: int) -> list[str]:
    """Return pieces of words, of two to five characters."""
    words = [part for part in _PARTS if len(part) > 2 and part.strip() == part]
    found = []
    for _ in range(count):
        word = rng.choice(words)
        start = rng.randrange(len(word) - 1)
        found.append(word[start : start + rng.randint(2, 5)])
    return list(dict.fromkeys(piece for piece in found if len(piece) > 1))


def _characters(rng: random.Random, kept: float) -> list[str]:
    """Return characters of the texts, but not all of them."""
    found = sorted({character for part in _PARTS for character in part if character.strip() and character != "\0"})
    return [character for character in found if rng.random() < kept]


def _metadata(model: str, pieces: list[tuple[str, int]], **others: Any) -> dict[str, Any]:
    kinds: dict[str, int] = {}
    for piece, kind in pieces:
        kinds.setdefault(piece, kind)
    fields = {"model": model, "tokens": list(kinds), "token_type": list(kinds.values())} | others
    return {f"tokenizer.ggml.{name}": value for name, value in fields.items()}


def _scored(metadata: dict[str, Any], scores: list[float]) -> dict[str, Any]:
    return metadata | {"tokenizer.ggml.scores": [0.0 + score for score in scores]}


_BYTES = [(f"<0x{byte:02X}>", BYTE) for byte in range(256)]
_HEAD = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]


def wordpiece() -> dict[str, Any]:
    """BERT's: words begin with `▁`."""
    rng = random.Random(2)
    special = [(text, CONTROL) for text in ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")]
    lower = [piece.lower() for piece in _characters(rng, 0.8) + _substrings(rng, 300)]
    body = [(piece if rng.random() < 0.4 else f"▁{piece}", NORMAL) for piece in lower]
    ids = {"unknown_token_id": 1, "bos_token_id": 2, "seperator_token_id": 3, "padding_token_id": 0}
    return _metadata("bert", special + body, **ids)


def unigram() -> dict[str, Any]:
    """T5's, with scores that no two pieces share."""
    rng = random.Random(3)
    pieces = [*_characters(rng, 0.8), *_substrings(rng, 300), *(f"▁{piece}" for piece in _substrings(rng, 200)), "▁"]
    head = [("<pad>", CONTROL), ("</s>", CONTROL), ("<unk>", UNKNOWN)]
    metadata = _metadata("t5", [*head, *((piece, NORMAL) for piece in pieces), ("<x>", USER_DEFINED)])
    return _scored(metadata, [0.0] * 3 + [-3 - 10 * rng.random() for _ in metadata["tokenizer.ggml.tokens"][3:]])


def tied() -> dict[str, Any]:
    """SentencePiece's, with many pieces of one score, as vocabularies that were extended by hand have them."""
    rng = random.Random(4)
    pieces = [
        *_characters(rng, 0.7),
        *_substrings(rng, 400),
        *(f"▁{piece}" for piece in _substrings(rng, 100)),
        "▁",
        "▁▁",
    ]
    metadata = _metadata("llama", [*_HEAD, *_BYTES, *((piece, NORMAL) for piece in pieces)])
    scores = [float(rng.randint(-3, 0)) for _ in metadata["tokenizer.ggml.tokens"]]
    return _scored(metadata, scores) | {"tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.unknown_token_id": 0}


def gemma4() -> dict[str, Any]:
    """Gemma 4's: merges by rank of characters that are not encoded."""
    rng = random.Random(5)
    known, merges = [*dict.fromkeys([*_characters(rng, 0.8), "▁", "\n"])], []
    for _ in range(500):
        left, right = rng.choice(known), rng.choice(known)
        piece = rng.choice(_substrings(rng, 1) or ["▁a"])
        left, right = (left, right) if rng.random() < 0.2 else (piece[:1], piece[1:2])
        newline = "\n" in left + right
        if newline or left not in known or right not in known or len(left + right) > 6 or left + right in known:
            continue
        known.append(left + right)
        merges.append(f"{left} {right}")
    head = [("<pad>", CONTROL), ("</s>", CONTROL), ("<bos>", CONTROL), ("<unk>", UNKNOWN)]
    ids = {"bos_token_id": 2, "eos_token_id": 1, "unknown_token_id": 3}
    return _metadata("gemma4", [*head, *_BYTES, *((piece, NORMAL) for piece in [*known, "\n\n"])], merges=merges, **ids)


def phi3() -> dict[str, Any]:
    """Phi-3's, of which the name alone tells that spaces behind most of its special tokens are theirs."""
    metadata = tied() | {"general.name": "Phi 3 mini (phi-3)"}
    added = {"<|endoftext|>": CONTROL, "<|user|>": CONTROL, "<|end|>": USER_DEFINED}
    more = {"tokens": [*added], "token_type": [*added.values()], "scores": [0.0] * len(added)}
    return metadata | {f"tokenizer.ggml.{n}": metadata[f"tokenizer.ggml.{n}"] + values for n, values in more.items()}


VOCABULARIES = {"wordpiece": wordpiece, "unigram": unigram, "tied": tied, "gemma4": gemma4, "phi3": phi3}
MARKED = ["<|user|>\n Hi<|end|>\n<|user|> x</s> y<s> z<|endoftext|> a<unk> b  ", " <s> a </s>  ", "<|end|>   <|end|>\n"]
VARIANTS: dict[str, list[dict[str, Any]]] = {
    "wordpiece": [{}, {"normalizer.lowercase": False}],
    "unigram": [
        {"add_space_prefix": True, "remove_extra_whitespaces": True},
        {"add_space_prefix": True},
        {"add_space_prefix": False, "add_eos_token": False},
    ],
    "tied": [{}, {"add_space_prefix": False, "add_bos_token": False}, {"add_eos_token": True, "eos_token_id": 2}],
    "gemma4": [{}],
    "phi3": [{}],
}
