"""What an exported model has beside its graph: descriptions, the tokenizer's files, the chat template."""

__all__ = ["write_files"]

import json
from pathlib import Path
from typing import Any

from xinfer.models.files import read_file
from xinfer.models.gguf.file import GgufFile
from xinfer.models.model import Model
from xinfer.models.text.tokenizer import Tokenizer

_TOKENIZER = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("tokenizer.model", "tiktoken.model", "*.tiktoken", "vocab.json", "merges.txt", "vocab.txt"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/*.jinja"),
)
_QUANTIZATION = ("quantization_config", "compression_config")  # of weights that the graph has otherwise
_GGUF_IDS = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}


def write_files(model: Model, tokenizer: Tokenizer, folder: Path) -> list[str]:
    """Write all but the graph, copied where the checkpoint has it; return what a user should know.

    config.json is that of what is exported: of a model that reads images too its text part, without what it says of
    quantized weights. tokenizer.json is written from the tokenizer as it was read where the checkpoint has none.
    """
    config = {name: value for name, value in model.config.items() if name not in _QUANTIZATION}
    special: dict[str, Any] = {}
    if model.path.is_dir():
        for path in sorted(path for pattern in _TOKENIZER for path in model.path.glob(pattern)):
            _write(folder / path.relative_to(model.path), read_file(path))
        if (generation := model.path / "generation_config.json").is_file():
            _write(folder / generation.name, read_file(generation))
    elif model.path.suffix != ".json":
        ids = _special_ids(model.path)
        config |= {f"{name}_token_id": token_id for name, token_id in ids.items()} | _eos(model)
        tokens = {name: tokenizer.backend.id_to_token(token_id) for name, token_id in ids.items()}
        special = {f"{name}_token": token for name, token in tokens.items() if token is not None}
    _write_json(folder / "config.json", config)
    return _write_tokenizer(tokenizer, special, model.spec.max_model_len, folder)


def _special_ids(path: Path) -> dict[str, int]:
    """Return the special tokens that a GGUF file names."""
    metadata = GgufFile(path).metadata
    found = {name: metadata.get(f"tokenizer.ggml.{word}_token_id") for name, word in _GGUF_IDS.items()}
    return {name: token_id for name, token_id in found.items() if isinstance(token_id, int)}


def _eos(model: Model) -> dict[str, Any]:
    """Return all tokens that end a text, as config.json says it."""
    return {"eos_token_id": list(model.eos_token_ids)} if len(model.eos_token_ids) > 1 else {}


def _write_tokenizer(tokenizer: Tokenizer, special: dict[str, Any], longest: int, folder: Path) -> list[str]:
    """Write what is missing of the files that tokenizers are read from."""
    notes = []
    if not (folder / "tokenizer.json").exists():
        try:
            _write(folder / "tokenizer.json", tokenizer.backend.to_str().encode())
        except Exception:  # the library's own kind: it can't write a step of ours
            notes.append("no tokenizer.json was written: this tokenizer has a step that the format can't say")
    if not (folder / "tokenizer_config.json").exists():
        kind = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": longest}
        _write_json(folder / "tokenizer_config.json", {**kind, "clean_up_tokenization_spaces": False, **special})
        template = tokenizer.chat_template
        if template is not None and not (folder / "chat_template.jinja").exists():
            _write(folder / "chat_template.jinja", template.source.encode())
            if template.tool_use:
                _write(folder / "additional_chat_templates" / "tool_use.jinja", template.tool_use.encode())
    return notes


def _write_json(path: Path, content: dict[str, Any]) -> None:
    _write(path, (json.dumps(content, indent=2) + "\n").encode())


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
