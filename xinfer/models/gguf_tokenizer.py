"""A `tokenizers` object from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece (`llama`)."""

__all__ = ["tokenizer_from_gguf"]

from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from xinfer.errors import ModelError, nearest
from xinfer.models.tokenizer import ChatTemplate, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How a text is cut into words before merging, by `tokenizer.ggml.pre`: patterns, each of which cuts further. Those of
# llama.cpp (src/llama-vocab.cpp), which for `default` are nobody's own but what files without the key get there.
_PATTERNS = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",),
    "qwen2": (rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",),
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "deepseek-r1-qwen": "qwen2"}


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The metadata, of which nothing is believed unchecked."""

    metadata: dict[str, Any]
    tokens: list[str]
    types: list[int]

    def list_of(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Return `tokenizer.ggml.<name>`, or nothing."""
        return _list_of(self.metadata, name, kind)

    def token_id(self, name: str) -> int | None:
        """Return `tokenizer.ggml.<name>_token_id` where it is one of the tokens."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id", -1)
        if not isinstance(value, int):
            raise ModelError(f"tokenizer.ggml.{name}_token_id={value!r} is no token's number")
        return value if 0 <= value < len(self.tokens) else None


def _list_of(metadata: dict[str, Any], name: str, kind: type | tuple[type, ...]) -> list[Any]:
    values = metadata.get(f"tokenizer.ggml.{name}", [])
    if not isinstance(values, list) or not all(isinstance(value, kind) for value in values):
        raise ModelError(f"tokenizer.ggml.{name} is no list of the kind expected")
    return values


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that a file's metadata describes; what it can't be is a `ModelError` that names it."""
    kind, builders = metadata.get("tokenizer.ggml.model"), {"gpt2": _byte_level, "llama": _sentencepiece}
    if not isinstance(kind, str) or kind not in builders:
        raise ModelError(f"tokenizer.ggml.model={kind!r} is not supported (supported: {', '.join(builders)})")
    tokens = _list_of(metadata, "tokens", str)
    if not tokens:
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise ModelError("the GGUF file's vocabulary names a token twice (tokenizer.ggml.tokens)")
    types = _list_of(metadata, "token_type", int) or [_NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} types (tokenizer.ggml.token_type)")
    vocabulary = _Vocabulary(metadata, tokens, types)
    try:
        backend = builders[kind](vocabulary)
        _add_special(backend, vocabulary)
    except (ValueError, TypeError, OverflowError) as error:
        raise ModelError(f"the GGUF file's tokenizer is damaged: {error}") from error
    ids = {name: vocabulary.token_id(key) for name, key in _SPECIAL.items()}
    special = {f"{name}_token": tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, ChatTemplate(str(template), special) if template else None)


_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}


def _add_special(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary) -> None:
    """Have special tokens recognized in texts, and texts begin with one where the model wants it."""
    for wanted, special in (((_CONTROL, _UNKNOWN), True), ((_USER_DEFINED,), False)):
        found = [token for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in wanted]
        backend.add_tokens([AddedToken(token, normalized=False, special=special) for token in found])
    bos, metadata = vocabulary.token_id("bos"), vocabulary.metadata
    by_default = metadata["tokenizer.ggml.model"] == "llama" or _pre(metadata) == "llama-bpe"
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", by_default):
        text = vocabulary.tokens[bos]
        backend.post_processor = processors.TemplateProcessing(
            single="bos $A", pair="bos $A $B", special_tokens=[{"id": "bos", "ids": [bos], "tokens": [text]}]
        )


def _pre(metadata: dict[str, Any]) -> str:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _ALIASES.get(name, name)


def _byte_level(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    pre = _pre(vocabulary.metadata)
    if pre not in _PATTERNS:
        raise ModelError(
            f"tokenizer.ggml.pre={pre!r} is not supported{nearest(pre, _PATTERNS)} (supported: {', '.join(_PATTERNS)})"
        )
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in vocabulary.list_of("merges", str)]
    for merge in merges:
        if len(merge) != 2 or not {*merge, "".join(merge)} <= ids.keys():
            raise ModelError(f"tokenizer.ggml.merges has {' '.join(merge)!r}, which is no pair of tokens that make one")
    backend = tokenizers.Tokenizer(models.BPE(ids, merges, ignore_merges=pre == "llama-bpe"))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[pre]),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if pre == "qwen2":  # as the model's own tokenizer does; llama.cpp leaves it out
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: _Vocabulary) -> tokenizers.Tokenizer:
    """SentencePiece's BPE merges the pair whose joined piece has the best score: the same as merges in that order."""
    tokens, metadata = vocabulary.tokens, vocabulary.metadata
    scores = vocabulary.list_of("scores", (int, float))
    if len(scores) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(scores)} scores (tokenizer.ggml.scores)")
    ids = {token: i for i, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, vocabulary.types, strict=True) if kind == _NORMAL}
    merges = [
        (-scores[ids[piece]], ids[piece], piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort()
    unknown = tokens[vocabulary.token_id("unknown") or 0]
    backend = tokenizers.Tokenizer(
        models.BPE(ids, [m[2:] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
