"""A checkpoint's tokenizer, from whichever of the formats its folder has."""

__all__ = ["find_tokenizer", "read_tokenizer"]

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import AddedToken

from xinfer.errors import ModelError
from xinfer.models.files import read_file, read_json, refusing
from xinfer.models.text.added_tokens import AddedTokens, add_tokens, begin_and_end, read_added_tokens
from xinfer.models.text.chat import ChatTemplate
from xinfer.models.text.merging import MergeSplit
from xinfer.models.text.pieces import PieceType, from_pieces
from xinfer.models.text.sentencepiece import read_sentencepiece
from xinfer.models.text.tiktoken_ranks import is_tiktoken, read_tiktoken
from xinfer.models.text.tokenizer import Tokenizer

_ADDED = re.compile(r'(?<!\\)"added_tokens"\s*:\s*(?=\[)')


def read_tokenizer(folder: Path, model_type: str = "") -> Tokenizer:
    """Return a folder's tokenizer with its chat template; what can't be one is a `ModelError`.

    tokenizer.json goes first, then tokenizer.model (SentencePiece's, or tiktoken's under that name), then tiktoken's
    under a name of its own. With tokenizer.json its own post-processor says what texts begin and end with, and
    `add_bos_token` counts for nothing; without it that key says so, and is false by default. Both as the reference.
    """
    config = read_json(folder / "tokenizer_config.json", optional=True)
    tokens = read_added_tokens(folder, config)
    file = find_tokenizer(folder)
    if file is None:
        raise ModelError(
            f"{folder}: none of tokenizer.json, tokenizer.model, tiktoken.model or one *.tiktoken file in it"
        )
    split = None
    if file.suffix == ".json":
        backend, declared = _from_json(file)
        backend = add_tokens(backend, tokens, declared, file)
    elif file.name == "tokenizer.model" and not is_tiktoken(file):
        backend, tokens, split = _from_sentencepiece(file, config, tokens)
    else:
        has_special = bool(tokens.placed or tokens.named or tokens.extra)
        backend = read_tiktoken(file, model_type, config, not has_special)
        backend = add_tokens(backend, tokens, {}, file)
    if file.suffix != ".json":
        _begin_and_end(backend, config, tokens)
    return Tokenizer(backend, ChatTemplate.of(_templates(folder, config), tokens.texts), split)


def find_tokenizer(folder: Path) -> Path | None:
    """Return the file that a folder's tokenizer is read from, if there is any."""
    for name in ("tokenizer.json", "tokenizer.model", "tiktoken.model"):
        if (folder / name).is_file():
            return folder / name
    found = sorted(folder.glob("*.tiktoken"))
    return found[0] if len(found) == 1 else None


def _from_json(file: Path) -> tuple[tokenizers.Tokenizer, dict[str, int]]:
    """Return the tokenizer, and the ids that the file has for added tokens, which it need not get."""
    with refusing(f"{file}: not a tokenizer"):
        text = read_file(file).decode("utf-8")
        backend = tokenizers.Tokenizer.from_str(text)
        found = _ADDED.search(text)
        listed = json.JSONDecoder().raw_decode(text, found.end())[0] if found else []
        return backend, {token["content"]: token["id"] for token in listed}


def _from_sentencepiece(
    file: Path, config: dict[str, Any], tokens: AddedTokens
) -> tuple[tokenizers.Tokenizer, AddedTokens, MergeSplit | None]:
    pieces, ids = read_sentencepiece(file)
    kept = {text for i, text in enumerate(pieces.texts) if i not in tokens.placed}
    for i, token in tokens.placed.items():  # a placeholder's piece gets the name that it has by now
        if i < len(pieces.texts) and pieces.texts[i] != token.content and token.content not in kept:
            pieces.texts[i] = token.content
            if pieces.types[i] not in (PieceType.UNKNOWN, PieceType.BYTE):
                pieces.types[i] = PieceType.CONTROL
    legacy = config.get("legacy", not str(config.get("tokenizer_class", "")).startswith("LlamaTokenizer"))
    with refusing(f"{file}: no tokenizer can be made of it"):
        backend, split = from_pieces(replace(pieces, first_only=not legacy))
        named = {name: AddedToken(pieces.texts[i], normalized=False, special=True) for name, i in ids.items()}
        tokens = AddedTokens(tokens.placed, named | dict(tokens.named), tokens.extra)
        return add_tokens(backend, tokens, {}, file), tokens, split


def _begin_and_end(backend: tokenizers.Tokenizer, config: dict[str, Any], tokens: AddedTokens) -> None:
    ids = {}
    for name in ("bos_token", "eos_token"):
        wanted, token = config.get(f"add_{name}", False), tokens.named.get(name)
        if not isinstance(wanted, bool | None):
            raise ModelError(f"tokenizer_config.json has add_{name}={wanted!r:.80}: true or false is expected")
        ids[name] = [i] if wanted and token and (i := backend.token_to_id(token.content)) is not None else []
    begin_and_end(backend, ids["bos_token"], ids["eos_token"])


def _templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name: those of files, else those of tokenizer_config.json."""
    named = sorted((folder / "additional_chat_templates").glob("*.jinja"))
    files = {file.stem: file for file in named}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    if files:
        with refusing(f"{folder}: a chat template is no text"):
            return {name: read_file(file).decode("utf-8") for name, file in files.items()}
    template = config.get("chat_template")
    if isinstance(template, list) and all(isinstance(entry, dict) for entry in template):
        template = {str(entry.get("name")): entry.get("template") for entry in template}
    if not isinstance(template, dict):
        template = {"default": template} if template else {}
    for name, source in template.items():
        where = f"{folder / 'tokenizer_config.json'}: the chat template {name!r:.80} is"
        if not isinstance(source, str):
            raise ModelError(
                f"{where} of type {type(source).__name__}: a text, or a list of objects with name and template, "
                "is expected"
            )
        if not source.isascii():
            with refusing(f"{where} no text"):
                source.encode()
    return template
