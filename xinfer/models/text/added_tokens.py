"""Tokens beside a vocabulary: what a checkpoint's JSON files say of them, and where the library puts them."""

__all__ = ["AddedTokens", "add_tokens", "begin_and_end", "read_added_tokens"]

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken, processors

from xinfer.errors import ModelError
from xinfer.models.files import read_json, refusing

_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
_MOST_HOLES = 1 << 17  # ids without a token that a list of pieces is filled up with


@dataclass(frozen=True)
class AddedTokens:
    """What the files say.

    Attributes:
        placed: tokens by their ids.
        named: special tokens by the name that a chat template calls them (`bos_token`, ...).
        extra: further special tokens, whose ids nothing tells.
    """

    placed: Mapping[int, AddedToken] = field(default_factory=dict)
    named: Mapping[str, AddedToken] = field(default_factory=dict)
    extra: tuple[AddedToken, ...] = ()

    @property
    def texts(self) -> dict[str, str]:
        """Texts of special tokens, by name."""
        return {name: token.content for name, token in self.named.items()}


def read_added_tokens(folder: Path, config: Mapping[str, Any]) -> AddedTokens:
    """Return what tokenizer_config.json (`config`) says, and where it lists no tokens the older files beside it.

    Both as the reference reads them: special_tokens_map.json and added_tokens.json count only without
    `added_tokens_decoder`.
    """
    file, listed = folder / "tokenizer_config.json", config.get("added_tokens_decoder")
    placed: dict[int, AddedToken] = {}
    said = dict(config)
    if listed is not None:
        if not isinstance(listed, dict):
            raise ModelError(f"{file}: added_tokens_decoder is of type {type(listed).__name__}: an object is expected")
        placed = {_id(i, file): _token(token, file) for i, token in listed.items()}
    else:
        said |= read_json(folder / "special_tokens_map.json", optional=True)
    named, extra = _special(said, file)
    if listed is None:
        older = folder / "added_tokens.json"
        special = {token.content for token in (*named.values(), *extra)}
        for text, i in read_json(older, optional=True).items():
            flags = {"normalized": text not in special, "special": text in special}
            placed[_id(i, older)] = _token({"content": text} | flags, older)
    known = {token.content: token for token in placed.values()}
    return AddedTokens(
        placed,
        {name: known.get(token.content, token) for name, token in named.items()},
        tuple(known.get(token.content, token) for token in extra),
    )


def _special(said: Mapping[str, Any], file: Path) -> tuple[dict[str, AddedToken], list[AddedToken]]:
    others = [name for name in said if name.endswith("_token") and name not in _NAMES]
    named = {
        name: _token(said[name], file)
        for name in (*_NAMES, *others)
        if isinstance(said.get(name), str | dict) and said[name]
    }
    further = said.get("extra_special_tokens") or said.get("additional_special_tokens") or []
    if isinstance(further, dict):
        named |= {name: _token(token, file) for name, token in further.items()}
        further = said.get("additional_special_tokens") or []
    if not isinstance(further, list):
        raise ModelError(f"{file}: extra_special_tokens is of type {type(further).__name__}: a list is expected")
    return named, [_token(token, file) for token in further]


def _id(value: Any, file: Path) -> int:
    digits = str(value) if isinstance(value, int) and not isinstance(value, bool) else value
    if not isinstance(digits, str) or not re.fullmatch("[0-9]{1,10}", digits) or int(digits) >= 1 << 31:
        raise ModelError(f"{file}: {value!r:.80} is no added token's number")
    return int(digits)


def _token(value: Any, file: Path) -> AddedToken:
    """Return a token, of which a bare text is a special one."""
    fields = {"content": value, "special": True, "normalized": False} if isinstance(value, str) else value
    if not isinstance(fields, dict) or not isinstance(fields.get("content"), str) or not fields["content"]:
        raise ModelError(f"{file}: {value!r:.80} is no added token: a text, or an object with content, is expected")
    flags = {name: fields[name] for name in _FLAGS if name in fields}
    if not all(isinstance(flag, bool) for flag in flags.values()):
        raise ModelError(f"{file}: the added token {fields['content']!r:.80} has a flag that is neither true nor false")
    try:
        return AddedToken(fields["content"], **flags)
    except (UnicodeEncodeError, TypeError) as error:
        raise ModelError(f"{file}: {value!r:.80} is no text ({error})") from error


# --- into the tokenizer ---------------------------------------------------------------------------------------------


def add_tokens(
    backend: tokenizers.Tokenizer, tokens: AddedTokens, declared: Mapping[str, int], file: Path
) -> tokenizers.Tokenizer:
    """Return the tokenizer with these tokens added, each with the id that the files say.

    The library gives a token that the vocabulary lacks the first id behind it, whatever the file says. Where that is
    another than the one `declared` (by text), the vocabulary gets the token under its own id and is read again, and
    what is wrong even then is a `ModelError` that names the first token that moved.
    """
    wanted = {**declared, **{token.content: i for i, token in tokens.placed.items()}}
    _add(backend, tokens)
    if _moved(backend, wanted) is None:
        return backend
    content = json.loads(backend.to_str())
    own = {token["content"]: token for token in content["added_tokens"]}
    content["added_tokens"] = [own[text] | {"id": i} for text, i in wanted.items() if text in own and text in declared]
    _fill(content["model"]["vocab"], wanted, file)
    with refusing(f"{file}: the added tokens' numbers make no vocabulary"):
        backend = tokenizers.Tokenizer.from_str(json.dumps(content))
    _add(backend, tokens)
    if (moved := _moved(backend, wanted)) is not None:
        text, i = moved
        raise ModelError(
            f"{file}: the added token {text!r:.80} is to have the id {i}, but with this vocabulary its id is "
            f"{backend.token_to_id(text)} and {i} is {backend.id_to_token(i)!r:.80}: the files contradict each other"
        )
    return backend


def _add(backend: tokenizers.Tokenizer, tokens: AddedTokens) -> None:
    """Add tokens in the reference's order: those with ids, then those named; and make special what is named."""
    special = [*tokens.named.values(), *tokens.extra]
    texts = {token.content for token in special}
    backend.add_tokens(
        [
            AddedToken(token.content, **{name: getattr(token, name) for name in _FLAGS[:4]}, special=True)
            if token.content in texts
            else token
            for _, token in sorted(tokens.placed.items())
        ]
    )
    backend.add_special_tokens(special)


def _moved(backend: tokenizers.Tokenizer, wanted: Mapping[str, int]) -> tuple[str, int] | None:
    """Return the first token that has not the id wanted, or whose id decodes to another."""
    for text, i in wanted.items():
        if backend.token_to_id(text) != i or backend.id_to_token(i) != text:
            return text, i
    return None


def _fill(vocabulary: Any, wanted: Mapping[str, int], file: Path) -> None:
    """Put tokens into the vocabulary of a tokenizer.json under their ids, as far as these are free."""
    if isinstance(vocabulary, dict):
        taken = set(vocabulary.values())
        vocabulary |= {text: i for text, i in wanted.items() if text not in vocabulary and i not in taken}
        return
    texts = {i: text for text, i in wanted.items()}
    pieces, score = {piece[0] for piece in vocabulary}, min((piece[1] for piece in vocabulary), default=0.0)
    last = max(texts, default=-1)
    if last - len(vocabulary) > _MOST_HOLES:
        raise ModelError(f"{file}: the added token {texts[last]!r} has the number {last}, far behind the vocabulary")
    for i in range(len(vocabulary), last + 1):  # a list has no holes, so they get names that are in no text
        named = texts.get(i)
        vocabulary.append([named if named and named not in pieces else f"\ufdd0{i}\ufdd0", score])


def begin_and_end(backend: tokenizers.Tokenizer, begin: Iterable[int], end: Iterable[int]) -> None:
    """Have texts begin and end with these tokens, where there are any."""
    named = {f"begin{i}": i for i in begin}, {f"end{i}": i for i in end}
    single = [*named[0], "$A", *named[1]]
    special = [
        {"id": name, "ids": [i], "tokens": [backend.id_to_token(i) or name]}
        for names in named
        for name, i in names.items()
    ]
    if special:
        backend.post_processor = processors.TemplateProcessing(
            single=" ".join(single), pair=" ".join([*single, "$B"]), special_tokens=special
        )
