"""tiktoken's files: a line for each token, of its bytes in base64 and its rank."""

__all__ = ["is_tiktoken", "read_tiktoken"]

import base64
import binascii
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from xinfer.errors import ModelError
from xinfer.models.files import read_file, refusing
from xinfer.models.text.patterns import CL100K, KIMI, LLAMA3, O200K, QWEN

_LINE = re.compile(rb"([A-Za-z0-9+/]+=*) ([0-9]{1,10})")
_LARGEST = 1 << 26  # bytes; the largest in use have some 4 million
_MOST_LINES = 1 << 19  # the largest in use have 200,000
_MOST_WORK = 1 << 26  # the sum of squares of lengths, which finding the merges takes; o200k has some 20 million

# The file has no pattern. So it is the one that tokenizer_config.json has as `pat_str`, else that of the family, by
# what config.json calls it or by the file's name, else Llama 3's.
_PATTERNS = {"qwen": QWEN, "kimi": KIMI, "deepseek_v3": KIMI, "gpt_oss": O200K, "o200k": O200K, "cl100k": CL100K}

# Nor has it special tokens. These are in no file of the checkpoint, but in code beside it, which is not run.
_QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{i}|>" for i in range(205)))
_LLAMA3_SPECIAL = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(4)),
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
    *(f"<|reserved_special_token_{i}|>" for i in range(5, 251)),
)


def is_tiktoken(file: Path) -> bool:
    """Return whether a file begins as tiktoken's do; a `tokenizer.model` can be SentencePiece's or one of these."""
    try:
        with file.open("rb") as opened:
            return _LINE.match(opened.read(1 << 13)) is not None
    except OSError as error:
        raise ModelError(f"{file}: can't be read ({error}): download it again") from error


def read_tiktoken(file: Path, model_type: str, config: Mapping[str, Any], special: bool) -> tokenizers.Tokenizer:
    """Return the tokenizer of a file's ranks; what it can't be is a `ModelError`.

    Args:
        file: the ranks.
        model_type: what config.json calls the model, which chooses the pattern.
        config: tokenizer_config.json, whose `pat_str` goes before.
        special: whether to add the family's special tokens, since the checkpoint's files name none.
    """
    ranks = _ranks(file)
    family = next((name for name in _PATTERNS if name in model_type or file.name.startswith(name)), "llama")
    pattern = config.get("pat_str") or _PATTERNS.get(family, LLAMA3)
    alphabet = _byte_characters()
    names = {token: "".join(alphabet[byte] for byte in token) for token in ranks}
    merges = sorted(
        (rank, cut, token[:cut], token[cut:])
        for token, rank in ranks.items()
        for cut in range(1, len(token))
        if token[:cut] in ranks and token[cut:] in ranks
    )
    with refusing(f"{file}: no tokenizer can be made of it"):
        model = models.BPE(
            {names[token]: rank for token, rank in ranks.items()},
            [(names[left], names[right]) for *_, left, right in merges],
            ignore_merges=True,
        )
        backend = tokenizers.Tokenizer(model)
        split = pre_tokenizers.Split(Regex(pattern), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    backend.decoder = decoders.ByteLevel()
    if special and family in ("qwen", "llama"):
        texts = _QWEN_SPECIAL if family == "qwen" else _LLAMA3_SPECIAL
        backend.add_special_tokens([AddedToken(text, normalized=False, special=True) for text in texts])
    return backend


def _ranks(file: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    taken: set[int] = set()
    work = 0
    content = read_file(file, _LARGEST)
    if (count := content.count(b"\n")) > _MOST_LINES:
        raise ModelError(f"{file}: has {count} lines, but at most {_MOST_LINES} are taken: it is no tokenizer's file")
    for number, line in enumerate(content.splitlines(), 1):
        if not line:
            continue
        match = _LINE.fullmatch(line)
        try:
            token = base64.b64decode(match[1], validate=True) if match else b""
        except binascii.Error:
            token = b""
        if not match or not token:
            raise ModelError(f"{file}: line {number} is {line[:80]!r}, not a token in base64 and its rank")
        rank = int(match[2])
        if token in ranks or rank in taken or rank >= 1 << 31:
            raise ModelError(f"{file}: line {number} has the token {token[:80]!r} or the rank {rank} a second time")
        ranks[token] = rank
        taken.add(rank)
        if (work := work + len(token) ** 2) > _MOST_WORK:
            raise ModelError(
                f"{file}: its tokens are longer than any tokenizer's, line {number} has {len(token)} bytes"
            )
    if len(missing := {bytes([byte]) for byte in range(256)} - ranks.keys()):
        raise ModelError(f"{file}: has no token for {len(missing)} of 256 bytes, {min(missing)!r} first: it is cut off")
    return ranks


def _byte_characters() -> dict[int, str]:
    """Return the characters that stand for bytes in the library's byte-level vocabularies: GPT-2's."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {byte: chr(byte) for byte in shown} | {byte: chr(256 + i) for i, byte in enumerate(hidden)}
