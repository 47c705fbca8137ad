"""A `tokenizers` object from a GGUF file's metadata: byte-level BPE, SentencePiece (BPE and Unigram), WordPiece."""

__all__ = ["tokenizer_from_gguf"]

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers

from xinfer.errors import ModelError, nearest
from xinfer.models.files import refusing
from xinfer.models.text.added_tokens import begin_and_end
from xinfer.models.text.chat import ChatTemplate
from xinfer.models.text.merging import MergeSplit
from xinfer.models.text.patterns import PRE
from xinfer.models.text.pieces import Pieces, PieceType, from_pieces
from xinfer.models.text.tokenizer import Tokenizer

_SPECIAL = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding", "sep": "seperator", "cls": "cls"}
_PHI3_NO_STRIP = ("<unk>", "<s>", "<|endoftext|>")
_LONGEST_RUN = 64
_LONGEST_WORD = 100  # characters, as BERT's own tokenizer has it


@dataclass(frozen=True, slots=True)
class _Vocabulary:
    """The metadata, of which nothing is believed unchecked."""

    metadata: dict[str, Any]
    tokens: list[str]
    types: list[int]

    def list_of(self, name: str, kind: type | tuple[type, ...]) -> list[Any]:
        """Return `tokenizer.ggml.<name>`, or nothing."""
        return _list_of(self.metadata, name, kind)

    def flag(self, name: str, default: bool) -> bool:
        """Return `tokenizer.ggml.<name>`, which is true or false."""
        return bool(self.metadata.get(f"tokenizer.ggml.{name}", default))

    def token_id(self, name: str, default: int = -1) -> int | None:
        """Return `tokenizer.ggml.<name>_token_id` where it is one of the tokens."""
        value = self.metadata.get(f"tokenizer.ggml.{name}_token_id", default)
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
    name = metadata.get("tokenizer.ggml.model")
    kind = _KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ModelError(f"tokenizer.ggml.model={name!r} is not supported (supported: {', '.join(_KINDS)})")
    tokens = _list_of(metadata, "tokens", str)
    if not tokens:
        raise ModelError("the GGUF file has no vocabulary (tokenizer.ggml.tokens)")
    if len(set(tokens)) != len(tokens):
        raise ModelError("the GGUF file's vocabulary names a token twice (tokenizer.ggml.tokens)")
    types = _list_of(metadata, "token_type", int) or [PieceType.NORMAL] * len(tokens)
    if len(types) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(types)} types (tokenizer.ggml.token_type)")
    vocabulary = _Vocabulary(metadata, tokens, types)
    with refusing("the GGUF file's tokenizer is damaged"):
        backend, split = kind.build(vocabulary)
        _add_special(backend, vocabulary, kind)
    ids = {name: _special_id(vocabulary, kind, name) for name in _SPECIAL}
    special = {f"{name}_token": tokens[token_id] for name, token_id in ids.items() if token_id is not None}
    return Tokenizer(backend, ChatTemplate.of(_templates(metadata), special), split)


def _templates(metadata: dict[str, Any]) -> dict[str, str]:
    """Return chat templates by name: `tokenizer.chat_template`, and those that `tokenizer.chat_templates` names."""
    start = "tokenizer.chat_template"
    templates = {"default": metadata.get(start)}
    templates |= {key[len(start) + 1 :]: value for key, value in metadata.items() if key.startswith(f"{start}.")}
    return {name: str(template) for name, template in templates.items() if template}


def _add_special(backend: tokenizers.Tokenizer, vocabulary: _Vocabulary, kind: "_Kind") -> None:
    """Have special tokens recognized in texts, and texts begin and end with one where the model wants it."""
    name = str(vocabulary.metadata.get("general.name", "")).lower()
    phi3 = "phi-3" in name or "phi3" in name  # files don't say that these take the spaces behind them
    for wanted, special in (((PieceType.CONTROL, PieceType.UNKNOWN), True), ((PieceType.USER_DEFINED,), False)):
        found = [token for token, type_ in zip(vocabulary.tokens, vocabulary.types, strict=True) if type_ in wanted]
        backend.add_tokens(
            [
                AddedToken(token, normalized=False, special=special, rstrip=phi3 and token not in _PHI3_NO_STRIP)
                for token in found
                if token
            ]
        )
    pre = _pre(vocabulary) if kind.build is _byte_level else None
    wants_begin = kind.begin or (pre is not None and PRE[pre].begin)
    ids: list[list[int]] = []
    for name, default in (("bos", wants_begin), ("eos", kind.end == "eos"), ("sep", kind.end == "sep")):
        token_id = _special_id(vocabulary, kind, name)
        ids.append([token_id] if token_id is not None and vocabulary.flag(f"add_{name}_token", default) else [])
    begin_and_end(backend, ids[0], ids[1] + ids[2])


def _special_id(vocabulary: _Vocabulary, kind: "_Kind", name: str) -> int | None:
    default = kind.ids.get(name, -1)
    if name == "bos" and kind.end == "sep":  # BERT's, which files call by either name
        default = int(vocabulary.metadata.get("tokenizer.ggml.cls_token_id", default))
    return vocabulary.token_id(_SPECIAL[name], default)


def _pre(vocabulary: _Vocabulary) -> str:
    pre = str(vocabulary.metadata.get("tokenizer.ggml.pre", "default"))
    if pre not in PRE:
        raise ModelError(
            f"tokenizer.ggml.pre={pre!r} is not supported{nearest(pre, PRE)} (supported: {', '.join(sorted(PRE))})"
        )
    return pre


def _merges(vocabulary: _Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in vocabulary.list_of("merges", str):
        cut = merge.find(" ", 1)
        left, right = merge[:cut], merge[cut + 1 :]
        if cut < 0 or not {left, right, left + right} <= ids.keys():
            raise ModelError(f"tokenizer.ggml.merges has {merge!r:.80}, which is no pair of tokens that make one")
        pairs.append((left, right))
    return pairs


def _byte_level(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, None]:
    pre = PRE[_pre(vocabulary)]
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    backend = tokenizers.Tokenizer(models.BPE(ids, _merges(vocabulary, ids), ignore_merges=pre.whole))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in pre.patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    if pre.compose:
        backend.normalizer = normalizers.NFC()
    backend.decoder = decoders.ByteLevel()
    return backend, None


def _gemma4(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, None]:
    """Gemma 4's: merges by rank, but of characters, with `▁` for spaces and bytes for what has no token.

    The file's merges have no line ends, since these separate them: runs become the tokens that are there.
    """
    ids = {token: i for i, token in enumerate(vocabulary.tokens)}
    runs = sorted(len(token) for token in ids if len(token) <= _LONGEST_RUN and not token.strip("\n"))
    ends = [("\n" * a, "\n" * (run - a)) for run in runs for a in runs if run - a in runs]
    unknown = vocabulary.token_id("unknown")
    model = models.BPE(
        ids,
        [*_merges(vocabulary, ids), *ends],
        unk_token=None if unknown is None else vocabulary.tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.Replace(" ", "▁")
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[^\n]+|\n+"), "isolated")
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend, None


def _sentencepiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, MergeSplit | None]:
    return from_pieces(_pieces(vocabulary, unigram=False, prefix=True))


def _unigram(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, MergeSplit | None]:
    return from_pieces(_pieces(vocabulary, unigram=True, prefix=False))


def _pieces(vocabulary: _Vocabulary, *, unigram: bool, prefix: bool) -> Pieces:
    tokens, scores = vocabulary.tokens, vocabulary.list_of("scores", (int, float))
    if len(scores) != len(tokens):
        raise ModelError(f"the GGUF file has {len(tokens)} tokens but {len(scores)} scores (tokenizer.ggml.scores)")
    unknown, types = vocabulary.token_id("unknown", 2 if unigram else 0), list(vocabulary.types)
    if PieceType.UNKNOWN not in types and unknown is not None:
        types[unknown] = PieceType.UNKNOWN
    return Pieces(
        tokens,
        [float(score) for score in scores],
        types,
        unigram=unigram,
        byte_fallback=not unigram,
        charsmap=bytes(value & 255 for value in vocabulary.list_of("precompiled_charsmap", int)) if unigram else b"",
        dummy_prefix=vocabulary.flag("add_space_prefix", prefix),
        strip=unigram and vocabulary.flag("remove_extra_whitespaces", False),
        whole_user_defined=False,
    )


def _wordpiece(vocabulary: _Vocabulary) -> tuple[tokenizers.Tokenizer, None]:
    """BERT's: in the file, what begins a word has `▁`; in the library, what continues one has `##`."""
    names = {}
    for i, (token, kind) in enumerate(zip(vocabulary.tokens, vocabulary.types, strict=True)):
        if kind == PieceType.NORMAL and not (token.startswith("[") and token.endswith("]")):
            token = token[1:] if token.startswith("▁") and len(token) > 1 else f"##{token}"
        names[token] = i
    if len(names) != len(vocabulary.tokens):
        raise ModelError("the GGUF file's vocabulary names a token twice (tokenizer.ggml.tokens)")
    unknown = vocabulary.token_id("unknown", 100)
    if unknown is None:
        raise ModelError("the GGUF file has no token for unknown words (tokenizer.ggml.unknown_token_id)")
    model = models.WordPiece(names, unk_token=vocabulary.tokens[unknown], max_input_chars_per_word=_LONGEST_WORD)
    lower = vocabulary.flag("normalizer.lowercase", True)
    backend = tokenizers.Tokenizer(model)
    backend.normalizer = normalizers.BertNormalizer(
        strip_accents=vocabulary.flag("normalizer.strip_accents", lower), lowercase=lower
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    return backend, None


@dataclass(frozen=True)
class _Kind:
    """What `tokenizer.ggml.model` stands for.

    Attributes:
        build: makes the tokenizer.
        begin: whether texts begin with the beginning-of-sequence token where the file does not say.
        end: the name of the token that texts end with where the file does not say.
        ids: special tokens that are these where the file does not say.
    """

    build: Callable[[_Vocabulary], tuple[tokenizers.Tokenizer, MergeSplit | None]]
    begin: bool = False
    end: str = ""
    ids: dict[str, int] = field(default_factory=dict)


_KINDS = {
    "gpt2": _Kind(_byte_level),
    "llama": _Kind(_sentencepiece, begin=True),
    "gemma4": _Kind(_gemma4, begin=True),
    "bert": _Kind(_wordpiece, begin=True, end="sep", ids={"bos": 101, "unk": 100, "sep": 102, "pad": 0}),
    "t5": _Kind(_unigram, end="eos", ids={"eos": 1, "unk": 2, "pad": 0}),
}
