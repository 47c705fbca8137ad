"""A `tokenizers` object from the metadata of a GGUF file: byte-level BPE (`gpt2`) and SentencePiece (`llama`)."""

__all__ = ["tokenizer_from_gguf"]

from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from xinfer.errors import ModelError, nearest
from xinfer.models.tokenizer import ChatTemplate, Tokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"

# How a text is cut into words before merging, by `tokenizer.ggml.pre`: a pattern, or single digits then GPT-2's words.
_PATTERNS = {
    "llama-bpe": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}",
    "qwen2": rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_REST}",
}
_ALIASES = {"llama3": "llama-bpe", "llama-v3": "llama-bpe", "gpt-2": "default", "deepseek-r1-qwen": "qwen2"}
_PRE = ("default", "smollm", *_PATTERNS)


def tokenizer_from_gguf(metadata: dict[str, Any]) -> Tokenizer:
    """Return the tokenizer that a file's metadata describes; what it can't be is a `ModelError` that names it."""
    kind = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens") or []
    if not tokens:
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    builders = {"gpt2": _byte_level, "llama": _sentencepiece}
    if kind not in builders:
        raise ModelError(f"tokenizer.ggml.model={kind!r} is not supported (supported: {', '.join(builders)})")
    backend = builders[kind](metadata, tokens)
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    for wanted, special in ((_CONTROL, True), (_USER_DEFINED, False)):
        backend.add_tokens(
            [AddedToken(t, normalized=False, special=special) for t, k in zip(tokens, types, strict=True) if k == wanted]
        )
    special = {
        f"{name}_token": tokens[metadata[f"tokenizer.ggml.{key}_token_id"]]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if 0 <= metadata.get(f"tokenizer.ggml.{key}_token_id", -1) < len(tokens)
    }
    by_default = kind == "llama" or _pre(metadata) == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", by_default) and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos}:0 $A:0", special_tokens=[(bos, metadata["tokenizer.ggml.bos_token_id"])]
        )
    template = metadata.get("tokenizer.chat_template")
    return Tokenizer(backend, ChatTemplate(template, special) if template else None)


def _pre(metadata: dict[str, Any]) -> str:
    name = str(metadata.get("tokenizer.ggml.pre", "default"))
    return _ALIASES.get(name, name)


def _byte_level(metadata: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    pre = _pre(metadata)
    if pre not in _PRE:
        raise ModelError(
            f"tokenizer.ggml.pre={pre!r} is not supported{nearest(pre, _PRE)} (supported: {', '.join(_PRE)})"
        )
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges") or []]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre in _PATTERNS:
        first = pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated")
        last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([first, last])
    else:
        words = pre_tokenizers.ByteLevel(add_prefix_space=False)
        digits = [pre_tokenizers.Digits(individual_digits=True)] if pre == "smollm" else []
        backend.pre_tokenizer = pre_tokenizers.Sequence([*digits, words])
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(metadata: dict[str, Any], tokens: list[str]) -> tokenizers.Tokenizer:
    """SentencePiece's BPE merges the pair whose joined piece has the best score: the same as merges in that order."""
    scores = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(scores)} scores (tokenizer.ggml.scores)")
    types = metadata.get("tokenizer.ggml.token_type") or [_NORMAL] * len(tokens)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    pieces = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    merges = [
        (-scores[vocabulary[piece]], vocabulary[piece], piece[:cut], piece[cut:])
        for piece in pieces
        for cut in range(1, len(piece))
        if piece[:cut] in pieces and piece[cut:] in pieces
    ]
    merges.sort()
    unknown = tokens[metadata.get("tokenizer.ggml.unknown_token_id", 0)]
    backend = tokenizers.Tokenizer(
        models.BPE(vocabulary, [m[2:] for m in merges], unk_token=unknown, fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip])
    return backend
