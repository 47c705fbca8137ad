"""A checkpoint's folder gives the tokens that transformers, sentencepiece and tiktoken make of the same files."""

import base64
import io
import json
import random
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import tiktoken
import tokenizers
from generated import texts
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as protobuf
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer
from transformers.utils import logging

from xinfer.errors import ModelError, RequestError
from xinfer.models.text.tokenizer import Tokenizer
from xinfer.models.text.tokenizer_files import read_tokenizer

logging.set_verbosity_error()
TEXTS = texts(150, seed=7)
HI = [{"role": "user", "content": "Hi"}]


def written(path: Path, **files: Any) -> Path:
    """Write a folder's files, under names in which `__` is a dot: bytes and texts as they are, all else as JSON."""
    for name, content in {"config__json": {}, **files}.items():
        file = path / name.replace("__", ".")
        if isinstance(content, bytes):
            file.write_bytes(content)
        else:
            file.write_text(content if isinstance(content, str) else json.dumps(content), "utf-8")
    return path


def reference(path: Path) -> Any:
    return AutoTokenizer.from_pretrained(path)


# --- tokenizer.json -------------------------------------------------------------------------------------------------


def byte_level() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def sentencepiece_like() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False, limit_alphabet=60)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def unigram() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.Unigram())
    backend.normalizer = normalizers.NFKC()
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    special = ["<s>", "</s>", "<unk>"]
    trainer = trainers.UnigramTrainer(vocab_size=300, special_tokens=special, unk_token="<unk>", show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordPiece(unk_token="[UNK]"))
    backend.normalizer = normalizers.BertNormalizer()
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    backend.decoder = decoders.WordPiece(cleanup=False)
    trainer = trainers.WordPieceTrainer(
        vocab_size=300, special_tokens=["[UNK]", "[CLS]", "[SEP]"], limit_alphabet=80, show_progress=False
    )
    backend.train_from_iterator(TEXTS, trainer)
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(text, backend.token_to_id(text)) for text in ("[CLS]", "[SEP]")],
    )
    return backend


def wordlevel() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(models.WordLevel(unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.WordLevelTrainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    return backend


KINDS: list[Callable[[], tokenizers.Tokenizer]] = [byte_level, sentencepiece_like, unigram, wordpiece, wordlevel]


@pytest.mark.parametrize("make", KINDS)
def test_every_kind_gives_the_ids_and_texts_of_transformers(
    make: Callable[[], tokenizers.Tokenizer], tmp_path: Path
) -> None:
    backend = make()
    backend.add_special_tokens(["<|end|>"])
    written(tmp_path, tokenizer__json=backend.to_str())
    ours, theirs = read_tokenizer(tmp_path), reference(tmp_path)
    for text in [*TEXTS, "a<|end|> b"]:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skipped in (True, False):
            expected = theirs.decode(ids, skip_special_tokens=skipped, clean_up_tokenization_spaces=False)
            assert ours.decode(ids, skipped) == expected


LLAMA = {"tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


@pytest.mark.parametrize("processor", [True, False])
@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast", None])
@pytest.mark.parametrize("keys", [{}, {"add_bos_token": True}, {"add_bos_token": False, "add_eos_token": True}])
def test_with_tokenizer_json_its_post_processor_says_what_texts_begin_with(
    processor: bool, kind: str | None, keys: dict[str, bool], tmp_path: Path
) -> None:
    """Whatever tokenizer_config.json says, and for every class: so transformers 5."""
    backend = sentencepiece_like()
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    if processor:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    config = {name: value for name, value in (LLAMA | keys | {"tokenizer_class": kind}).items() if value is not None}
    written(tmp_path, tokenizer__json=backend.to_str(), tokenizer_config__json=config)
    ids = read_tokenizer(tmp_path).encode("The word")
    assert ids == reference(tmp_path).encode("The word")
    assert (ids[0] == 1) == processor


# --- added tokens ---------------------------------------------------------------------------------------------------


def entry(content: str, token_id: int | None = None, **flags: bool) -> dict[str, Any]:
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return ({} if token_id is None else {"id": token_id}) | {"content": content} | plain | flags


def letters(*added: dict[str, Any], vocabulary: dict[str, int] | None = None) -> dict[str, Any]:
    """Return a tokenizer.json in which letters are tokens."""
    ids = vocabulary or {letter: i for i, letter in enumerate("abcdef")}
    content: dict[str, Any] = json.loads(tokenizers.Tokenizer(models.BPE(ids, [])).to_str())
    return content | {"added_tokens": list(added)}


@pytest.mark.parametrize(
    ("own", "files"),
    [
        ([entry("<x>", 6)], {}),
        ([entry("<x>", 6)], {"tokenizer_config__json": {"added_tokens_decoder": {"7": entry("<z>", special=False)}}}),
        (
            [entry("<x>", 6, special=False)],
            {"tokenizer_config__json": {"added_tokens_decoder": {"6": entry("<x>", lstrip=True)}}},
        ),
        ([entry("<x>", 6)], {"tokenizer_config__json": {"added_tokens_decoder": {}, "bos_token": "<s>"}}),
        ([entry("<x>", 6, special=False)], {"tokenizer_config__json": {"bos_token": "<x>"}}),
        ([], {"tokenizer_config__json": {"bos_token": "a", "eos_token": "<e>"}}),
        ([], {"tokenizer_config__json": {"added_tokens_decoder": {"2": entry("c")}}}),
        (
            [entry("<x>", 6)],
            {
                "special_tokens_map__json": {"bos_token": "<s>", "additional_special_tokens": ["<e>"]},
                "added_tokens__json": {"<w>": 7, "<v>": 8},
            },
        ),
        (
            [entry("<x>", 6)],
            {
                "tokenizer_config__json": {"added_tokens_decoder": {"7": entry("<z>")}},
                "special_tokens_map__json": {"bos_token": "<s>"},
                "added_tokens__json": {"<w>": 3},
            },
        ),
        (
            [],
            {"tokenizer_config__json": {"image_token": "<i>", "extra_special_tokens": ["<q>"], "pad_token": "<p>"}},
        ),
        ([], {"tokenizer_config__json": {"extra_special_tokens": {"image_token": "<i>"}, "pad_token": "<p>"}}),
        (
            [],
            {"tokenizer_config__json": {"bos_token": entry("<s>", lstrip=True) | {"__type": "AddedToken"}}},
        ),
    ],
)
def test_added_tokens_are_those_of_transformers(own: list[Any], files: dict[str, Any], tmp_path: Path) -> None:
    written(tmp_path, tokenizer__json=letters(*own), **files)
    ours, theirs = read_tokenizer(tmp_path), reference(tmp_path)
    found = ours.backend.get_added_tokens_decoder()
    assert {i: repr(token) for i, token in found.items()} == {
        i: repr(token) for i, token in theirs.added_tokens_decoder.items()
    }
    for text in ("a<x> <z>b", "<s>a<e><w> <v>", "a <i><q><p>", "c <x>"):
        assert ours.encode(text) == theirs.encode(text)


def holed(kind: str) -> dict[str, Any]:
    """Return a tokenizer.json with an added token behind a hole, which the library alone would number otherwise."""
    made = {"byte_level": byte_level, "unigram": unigram, "wordpiece": wordpiece, "wordlevel": wordlevel}[kind]()
    content: dict[str, Any] = json.loads(made.to_str())
    size = made.get_vocab_size()
    content["added_tokens"] += [entry("<|x|>", size + 7), entry("<|y|>", size + 3)]
    return content


@pytest.mark.parametrize("kind", ["byte_level", "unigram", "wordpiece", "wordlevel"])
def test_an_added_token_has_the_id_that_its_file_says(kind: str, tmp_path: Path) -> None:
    content = holed(kind)
    size = content["added_tokens"][-2]["id"] - 7
    config = {"added_tokens_decoder": {str(size + 12): entry("<|z|>")}}
    written(tmp_path, tokenizer__json=content, tokenizer_config__json=config)
    tokenizer = read_tokenizer(tmp_path)
    plain = tokenizers.Tokenizer.from_str(json.dumps(content | {"added_tokens": content["added_tokens"][:-2]}))
    for text in TEXTS:
        assert tokenizer.encode(text) == plain.encode(text).ids
    control = tokenizer.backend.encode("<|x|><|y|><|z|>", add_special_tokens=False).ids
    assert control == [size + 7, size + 3, size + 12]
    assert tokenizer.decode(control, skip_special_tokens=False).replace(" ", "") == "<|x|><|y|><|z|>"
    assert tokenizer.max_token_id == size + 12


@pytest.mark.parametrize("kind", ["byte_level", "wordpiece", "wordlevel"])
def test_with_holes_control_tokens_of_messages_stay_text(kind: str, tmp_path: Path) -> None:
    """Case K04."""
    content = holed(kind)
    config = {"chat_template": "{% for m in messages %}<|x|>{{ m.content }}{% endfor %}"}
    written(tmp_path, tokenizer__json=content, tokenizer_config__json=config)
    tokenizer = read_tokenizer(tmp_path)
    special = {entry["id"] for entry in content["added_tokens"][-2:]}
    for text in ("a<|y|>b", "<|x|>"):
        ids = tokenizer.encode_chat([{"role": "user", "content": text}])
        assert [i for i in ids if i in special] == [content["added_tokens"][-2]["id"]]


@pytest.mark.parametrize(
    ("own", "config", "message"),
    [
        ([entry("<x>", 2)], {}, "'<x>' is to have the id 2.* 2 is 'c'"),
        ([entry("c", 7)], {}, "'c' is to have the id 7"),
        ([entry("<x>", 7), entry("<y>", 7)], {}, "is to have the id 7"),
        ([entry("<x>", 6)], {"added_tokens_decoder": {"9": entry("<x>")}}, None),
        ([entry("<x>", 6)], {"added_tokens_decoder": {"3": entry("<y>")}}, "'<y>' is to have the id 3"),
        ([], {"added_tokens_decoder": {"x": entry("<y>")}}, "'x' is no added token's number"),
        ([], {"added_tokens_decoder": {"-1": entry("<y>")}}, "'-1' is no added token's number"),
        ([], {"added_tokens_decoder": {str(2**40): entry("<y>")}}, "is no added token's number"),
        ([], {"added_tokens_decoder": {"9" * 5000: entry("<y>")}}, "is no added token's number"),
        ([], {"added_tokens_decoder": ["<y>"]}, "added_tokens_decoder is of type list"),
        ([], {"added_tokens_decoder": {"7": {"content": 1}}}, "is no added token"),
        ([], {"added_tokens_decoder": {"7": entry("<y>") | {"special": "yes"}}}, "neither true nor false"),
        ([], {"bos_token": "\ud800"}, "no text"),
        ([], {"extra_special_tokens": "x"}, "extra_special_tokens is of type str"),
        ([], {"chat_template": "\ud800"}, "chat template 'default' is no text"),
        ([], {"chat_template": 1}, "chat template 'default' is of type int"),
        ([], {"chat_template": [{"name": "default"}]}, "chat template 'default' is of type NoneType"),
    ],
)
def test_settings_that_make_no_sense_or_contradict_each_other_are_refused(
    own: list[Any], config: dict[str, Any], message: str | None, tmp_path: Path
) -> None:
    written(tmp_path, tokenizer__json=letters(*own), tokenizer_config__json=config)
    if message is None:
        assert read_tokenizer(tmp_path).encode("<x>") == [9]
        return
    with pytest.raises(ModelError, match=message):
        read_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"<x>": "y"}, "'y' is no added token's number"),
        ({"<x>": True}, "True is no added token's number"),
        ({"": 7}, "is no added token"),
        ({"\ud800": 7}, "is no text"),
        (["<x>"], "a JSON object is expected"),
    ],
)
def test_older_files_that_make_no_sense_are_refused(content: Any, message: str, tmp_path: Path) -> None:
    written(tmp_path, tokenizer__json=letters(), added_tokens__json=content)
    with pytest.raises(ModelError, match=message):
        read_tokenizer(tmp_path)


def test_an_id_far_behind_a_list_of_pieces_takes_no_memory(tmp_path: Path) -> None:
    content = json.loads(unigram().to_str())
    content["added_tokens"].append(entry("<far>", 2**31 - 1))
    written(tmp_path, tokenizer__json=content)
    with pytest.raises(ModelError, match="'<far>' has the number 2147483647, far behind"):
        read_tokenizer(tmp_path)


# --- SentencePiece --------------------------------------------------------------------------------------------------


def trained(**options: Any) -> bytes:
    """Return a SentencePiece model, trained on the texts' simple lines."""
    lines = [line for text in texts(400, seed=8) for line in text.splitlines() if line.strip() and "\0" not in line]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, hard_vocab_limit=False, minloglevel=2, **options
    )
    return model.getvalue()


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
TRAINED: list[dict[str, Any]] = [
    *({"model_type": kind, "vocab_size": 300} for kind in ("bpe", "unigram")),
    *({"model_type": kind, "vocab_size": 460, "byte_fallback": True, **PLAIN} for kind in ("bpe", "unigram")),
    {"model_type": "bpe", "vocab_size": 460, "byte_fallback": True, "character_coverage": 0.98, **PLAIN},
    {"model_type": "bpe", "vocab_size": 300, "add_dummy_prefix": False, "split_by_whitespace": False, **PLAIN},
    {"model_type": "bpe", "vocab_size": 300, "user_defined_symbols": ["The", "<x>", "▁▁"], **PLAIN},
    {"model_type": "unigram", "vocab_size": 300, "user_defined_symbols": ["The", "<x>"]},
    {"model_type": "unigram", "vocab_size": 300, "normalization_rule_name": "nmt_nfkc_cf"},
    {"model_type": "bpe", "vocab_size": 300, "normalization_rule_name": "nfkc", "control_symbols": ["<c>"]},
]


@pytest.mark.parametrize("options", TRAINED, ids=lambda options: "-".join(str(v) for v in options.values()))
def test_a_sentencepiece_model_gives_the_ids_of_sentencepiece(options: dict[str, Any], tmp_path: Path) -> None:
    """The library's way with compiled normalization is by graphemes: some of several characters come out otherwise."""
    model = trained(**options)
    ours = read_tokenizer(written(tmp_path, tokenizer__model=model))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    composed = any(pair in "".join(TEXTS) for pair in ("ｶﾞ", "\u1100\u1161"))
    assert not composed
    for text in [*TEXTS, "", " ", "  ", "<x>The<x>  The", "▁▁▁x", "    "]:
        ids = theirs.encode(text)
        assert ours.encode(text) == ids, text
        if theirs.unk_id() not in ids and "▁" not in text:  # the one it shows as ⁇, the other as spaces to strip
            assert ours.decode(ids) == theirs.decode(ids)


def model_of(pieces: list[tuple[str, float, int]], kind: int = 2, **normalizer: bool) -> bytes:
    """Return a model with these pieces, each with its score and type."""
    model = protobuf.ModelProto()
    for text, score, type_ in [("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), *pieces]:
        model.pieces.add(piece=text, score=score, type=type_)
    model.trainer_spec.model_type = kind
    model.normalizer_spec.name = "identity"
    for name, value in ({"remove_extra_whitespaces": False} | normalizer).items():
        setattr(model.normalizer_spec, name, value)
    content: bytes = model.SerializeToString()
    return content


@pytest.mark.parametrize("seed", range(80))
@pytest.mark.parametrize("kind", ["distinct scores", "equal scores", "equal scores, unused pieces", "user's pieces"])
def test_pieces_are_merged_as_sentencepiece_merges_them(kind: str, seed: int, tmp_path: Path) -> None:
    """Equal scores from the left; unused pieces are taken apart again, and those of the user never merged."""
    rng = random.Random(seed)
    known = {*"abc▁"}
    for _ in range(rng.randint(3, 14)):
        known.add("".join(rng.choice(sorted(known)) for _ in range(2))[:6])
    pieces = []
    for i, text in enumerate(rng.sample(sorted(known), len(known))):
        rare = len(text) > 1 and rng.random() < 0.2
        type_ = 5 if rare and kind.endswith("unused pieces") else 4 if rare and kind == "user's pieces" else 1
        pieces.append((text, -float(i) if kind == "distinct scores" else float(rng.randint(-2, 0)), type_))
    if kind != "equal scores, unused pieces" and seed % 3 == 0:
        pieces = [piece for piece in pieces if piece[0] != "b"]  # a piece's characters need not be pieces
    model = model_of(pieces, add_dummy_prefix=seed % 2 == 0)
    ours = read_tokenizer(written(tmp_path, tokenizer__model=model))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    for _ in range(40):
        text = "".join(rng.choice("abc a  aabx") for _ in range(rng.randint(0, 14)))
        assert ours.encode(text) == theirs.encode(text), text


def test_a_long_text_without_spaces_is_merged_in_time(tmp_path: Path) -> None:
    letters = [chr(0x4E00 + i) for i in range(200)]
    rng = random.Random(0)
    pairs = {rng.choice(letters) + rng.choice(letters) for _ in range(2000)}
    model = model_of([(text, 0.0, 1) for text in [*letters, *sorted(pairs), "▁"]])
    ours = read_tokenizer(written(tmp_path, tokenizer__model=model))
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    text = "".join(rng.choice(letters) for _ in range(20_000))
    began = time.process_time()
    assert ours.encode(text) == theirs.encode(text)
    assert time.process_time() - began < 5


def test_the_hash_tells_scores_apart_that_cut_texts_differently(tmp_path: Path) -> None:
    """Also where the library does not know of them."""
    found = []
    for ab, bc in ((0.0, 0.0), (0.0, 0.0), (-1.0, 0.0)):
        pieces = [("ab", ab, 1), ("bc", bc, 1), *((text, 0.0, 1) for text in ("a", "b", "c", "▁", "▁a", "aa"))]
        tokenizer = read_tokenizer(written(tmp_path, tokenizer__model=model_of(pieces, add_dummy_prefix=False)))
        found.append((tokenizer.encode("abc"), tokenizer.content_hash))
    assert found[0] == found[1]
    assert found[0][0] != found[2][0]
    assert found[0][1] != found[2][1]


def test_a_merged_vocabularys_control_tokens_stay_text_in_messages(tmp_path: Path) -> None:
    """Case K04, where merging is our own."""
    pieces = [(text, 0.0, 1) for text in ("a", "b", "<", "/", "s", ">", "ab", "ba", "▁")]
    config = {"chat_template": "<s>{{ messages[0].content }}</s>"}
    written(tmp_path, tokenizer__model=model_of(pieces, add_dummy_prefix=False), tokenizer_config__json=config)
    tokenizer = read_tokenizer(tmp_path)
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ids = tokenizer.encode_chat([{"role": "user", "content": "aba</s>bab"}])
    assert ids == [1, *theirs.encode("aba</s>bab"), 2]


@pytest.mark.parametrize("kind", ["LlamaTokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "keys", [{}, {"add_bos_token": True}, {"add_bos_token": True, "add_eos_token": True}, {"legacy": True}]
)
def test_a_sentencepiece_model_with_its_config_gives_the_ids_of_transformers(
    kind: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    """Among others, where texts get a space behind an added token (`legacy`)."""
    config = LLAMA | keys | {"tokenizer_class": kind}
    model = trained(model_type="bpe", vocab_size=460, byte_fallback=True, **PLAIN)
    size = sentencepiece.SentencePieceProcessor(model_proto=model).get_piece_size()
    config["added_tokens_decoder"] = {str(size): entry("<|x|>")}
    written(tmp_path, tokenizer__model=model, tokenizer_config__json=config)
    ours, theirs = read_tokenizer(tmp_path), reference(tmp_path)
    for text in ("The word", "The<|x|>word</s>word", "a<s>b"):
        assert ours.encode(text) == theirs.encode(text), text


def test_a_placeholder_gets_the_name_that_the_config_has_for_it(tmp_path: Path) -> None:
    pieces = [("a", -1.0, 1), ("▁", -2.0, 1), ("<unused0>", 0.0, 4)]
    config = {"added_tokens_decoder": {"5": entry("<|tool|>")}}
    written(tmp_path, tokenizer__model=model_of(pieces), tokenizer_config__json=config)
    tokenizer = read_tokenizer(tmp_path)
    assert tokenizer.encode("<|tool|>") == reference(tmp_path).encode("<|tool|>") == [5]


# --- tiktoken -------------------------------------------------------------------------------------------------------

# The expressions as their owners publish them.
OWN = {
    "llama": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "qwen": (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "phi3small": (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}++|\p{N}{1,3}+| ?[^\s\p{L}\p{N}]++[\r\n]*+|\s++$"
        r"|\s*[\r\n]|\s+(?!\S)|\s"
    ),
    "gpt_oss": (
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
    "kimi_k2": (
        r"[\p{Han}]+"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
        r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    ),
}


def ranks() -> dict[bytes, int]:
    """Return bytes and pieces of the texts, longer ones made of shorter ones, in random order."""
    rng = random.Random(9)
    found = {bytes([byte]): byte for byte in rng.sample(range(256), 256)}
    whole = "".join(texts(300, seed=10)).encode()
    while len(found) < 900:
        at, size = rng.randrange(len(whole)), rng.randint(2, 8)
        token = whole[at : at + size]
        if (
            len(token) > 1
            and token not in found
            and (len(token) == 2 or any(t in found for t in (token[1:], token[:-1])))
        ):
            found[token] = len(found)
    return found


def lines_of(found: dict[bytes, int]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for token, rank in found.items())


@pytest.mark.parametrize("family", OWN)
@pytest.mark.parametrize("name", ["tokenizer__model", "tiktoken__model", "any__tiktoken"])
def test_a_tiktoken_file_gives_the_ids_of_tiktoken(family: str, name: str, tmp_path: Path) -> None:
    found = ranks()
    special = {"<|a|>": len(found), "<|b|>": len(found) + 5}
    config = {"added_tokens_decoder": {str(i): entry(text) for text, i in special.items()}}
    written(tmp_path, **{name: lines_of(found)}, tokenizer_config__json=config)
    ours = read_tokenizer(tmp_path, family)
    theirs = tiktoken.Encoding("x", pat_str=OWN[family], mergeable_ranks=found, special_tokens=special)
    for text in [*TEXTS, "x<|a|> <|b|>The"]:
        ids = theirs.encode(text, allowed_special="all")
        assert ours.encode(text) == ids, text
        assert ours.decode(ids, skip_special_tokens=False) == text


def test_a_pattern_of_its_own_goes_before_the_familys(tmp_path: Path) -> None:
    found, pattern = ranks(), r"[a-z]+|[^a-z]"
    written(tmp_path, tiktoken__model=lines_of(found), tokenizer_config__json={"pat_str": pattern})
    ours = read_tokenizer(tmp_path, "qwen")
    theirs = tiktoken.Encoding("x", pat_str=pattern, mergeable_ranks=found, special_tokens={})
    for text in TEXTS:
        assert ours.encode(text) == theirs.encode(text)


def test_llama_3_and_qwen_have_their_special_tokens_without_a_file_that_names_them(tmp_path: Path) -> None:
    found = ranks()
    (tmp_path / "llama").mkdir()
    (tmp_path / "qwen").mkdir()
    llama = read_tokenizer(written(tmp_path / "llama", tokenizer__model=lines_of(found)), "llama")
    qwen = read_tokenizer(written(tmp_path / "qwen", qwen__tiktoken=lines_of(found)))
    assert llama.encode("<|begin_of_text|><|eot_id|>") == [len(found), len(found) + 9]
    assert llama.max_token_id == len(found) + 255
    assert qwen.encode("<|endoftext|><|im_start|><|extra_204|>") == [len(found), len(found) + 1, len(found) + 207]


@pytest.mark.parametrize("bos", [True, False])
def test_a_tiktoken_file_begins_texts_where_the_config_says_so(bos: bool, tmp_path: Path) -> None:
    config = {"bos_token": "<|b|>", "add_bos_token": bos}
    written(tmp_path, tiktoken__model=lines_of(ranks()), tokenizer_config__json=config)
    tokenizer = read_tokenizer(tmp_path)
    assert (tokenizer.encode("a")[0] == tokenizer.backend.token_to_id("<|b|>")) == bos


# --- chat templates -------------------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
NAMED = {"default": "plain", "tool_use": "tools", "rag": "documents"}


@pytest.mark.parametrize(
    "files",
    [
        {"chat_template__jinja": "plain"},
        {"chat_template__jinja": "plain", "tool_use": "tools"},
        {"chat_template__jinja": "plain", "tokenizer_config__json": {"chat_template": "older"}},
        {"chat_template__jinja": "plain", "tokenizer_config__json": {"chat_template": {"tool_use": "older"}}},
        {"tool_use": "tools", "default": "plain"},
        {"tokenizer_config__json": {"chat_template": "plain"}},
        {"tokenizer_config__json": {"chat_template": [{"name": n, "template": t} for n, t in NAMED.items()]}},
        {"tokenizer_config__json": {"chat_template": NAMED}},
    ],
)
def test_the_template_is_the_one_that_transformers_takes(files: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "additional_chat_templates").mkdir()
    named = {f"additional_chat_templates/{n}__jinja": files.pop(n) for n in ("tool_use", "default") if n in files}
    written(tmp_path, tokenizer__json=letters(), **files, **named)
    ours, theirs = read_tokenizer(tmp_path).chat_template, reference(tmp_path)
    assert ours is not None
    for tools in (None, TOOLS):
        expected = theirs.apply_chat_template(HI, tools=tools, tokenize=False)
        assert ours.render(HI, tools=tools) == expected
    assert ours.render(HI) == "plain"


def test_without_a_default_template_there_is_none(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "rag", "template": "documents"}]}
    tokenizer = read_tokenizer(written(tmp_path, tokenizer__json=letters(), tokenizer_config__json=config))
    with pytest.raises(RequestError, match="no chat template"):
        tokenizer.encode_chat(HI)


# --- files that are damaged, and files that are made to do harm -----------------------------------------------------

SECONDS = 5  # of processor time: here a second, and more for machines that are slower or shared


def refused(path: Path, message: str = "") -> None:
    began = time.process_time()
    with pytest.raises(ModelError, match=message):
        read_tokenizer(path)
    assert time.process_time() - began < SECONDS


def field(number: int, content: bytes) -> bytes:
    """Return a field of bytes in a protocol buffer."""
    size, head = len(content), bytearray([number << 3 | 2])
    while size > 127:
        head.append(size & 127 | 128)
        size >>= 7
    return bytes(head) + bytes([size]) + content


SPECS = b"\x12\x02\x18\x02\x1a\x00"  # of a model that merges
HARMFUL: dict[str, tuple[str, bytes, str]] = {
    "nothing": ("tokenizer__json", b"", "not a tokenizer"),
    "no json": ("tokenizer__json", b"PK\3\4", "not a tokenizer"),
    "deep json": ("tokenizer__json", b'{"a":' * 100_000, "not a tokenizer"),
    "an empty object": ("tokenizer__json", b"{}", "not a tokenizer"),
    "no sentencepiece": ("tokenizer__model", b"", "truncated"),
    "no pieces": ("tokenizer__model", SPECS, "no pieces"),
    "a page": ("tokenizer__model", b"<!DOCTYPE html><html></html>", "not a SentencePiece model"),
    "a pointer to the file": ("tokenizer__model", b"version https://git-lfs.github.com/spec/v1\n", "not a Sentence"),
    "a size beyond the end": ("tokenizer__model", b"\x0a\xff\xff\xff\xff\x0f", "truncated"),
    "a number without end": ("tokenizer__model", b"\x80" * 40, "without end"),
    "a piece twice": ("tokenizer__model", field(1, field(1, b"a")) * 2 + SPECS, "piece 'a' twice"),
    "a piece that is no text": ("tokenizer__model", field(1, field(1, b"\xff")), "not a SentencePiece model"),
    "a piece of a megabyte": (
        "tokenizer__model",
        field(1, field(1, b"a" * 1_000_000)) + SPECS,
        "longer than any",
    ),
    "millions of pieces": ("tokenizer__model", field(1, b"") * 10_000_000, "more than 524288 fields"),
    "millions of fields in a piece": ("tokenizer__model", field(1, b"\x18\x01" * 10_000_000), "more than 16 fields"),
    "millions of lines": ("any__tiktoken", b"YQ== 0\n" + b"\n" * 50_000_000, "50000001 lines"),
    "another kind of model": ("tokenizer__model", field(1, field(1, b"a")) + SPECS + field(2, b"\x18\x03"), "'word'"),
    "a charsmap of junk": (
        "tokenizer__model",
        field(1, field(1, b"a") + b"\x18\x02") + SPECS + field(3, field(2, b"\xff" * 99)),
        "no tokenizer can be made",
    ),
    "a token of a megabyte": (
        "any__tiktoken",
        b"".join(base64.b64encode(bytes([i])) + b" %d\n" % i for i in range(256))
        + base64.b64encode(b"a" * 1_000_000)
        + b" 256\n",
        "longer than any",
    ),
    "a rank twice": ("any__tiktoken", b"YQ== 0\nYg== 0\n", "line 2.*a second time"),
    "a line without a rank": ("any__tiktoken", b"YQ== 0\nYg==\n", "line 2 is b'Yg=='"),
    "a rank that is too large": ("any__tiktoken", b"YQ== 9999999999\n", "line 1"),
    "no base64": ("any__tiktoken", b"Y 0\n", "line 1"),
    "bytes without tokens": ("any__tiktoken", b"YQ== 0\n", "no token for 255 of 256 bytes"),
}


@pytest.mark.parametrize("case", HARMFUL)
def test_a_file_that_makes_no_tokenizer_is_refused_in_time(case: str, tmp_path: Path) -> None:
    name, content, message = HARMFUL[case]
    refused(written(tmp_path, **{name: content}), message)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model", "any.tiktoken", "tokenizer_config.json"])
def test_a_file_far_larger_than_any_is_refused_unread(name: str, tmp_path: Path) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(1 << 40)
    refused(tmp_path, "more than the")


def test_a_pattern_that_is_none_is_refused(tmp_path: Path) -> None:
    written(tmp_path, any__tiktoken=lines_of(ranks()), tokenizer_config__json={"pat_str": "["})
    refused(tmp_path, "no tokenizer can be made of it")


def test_a_folder_without_a_tokenizer_says_what_is_read(tmp_path: Path) -> None:
    refused(written(tmp_path), "none of tokenizer.json, tokenizer.model, tiktoken.model")


SOUND: dict[str, bytes] = {
    "tokenizer__json": json.dumps(letters(entry("<x>", 6))).encode(),
    "tokenizer__model": model_of([("a", -1.0, 1), ("b", -2.0, 1), ("ab", -3.0, 1), ("▁", -4.0, 1)]),
    "any__tiktoken": lines_of(ranks()),
    "tokenizer_config__json": json.dumps({"added_tokens_decoder": {"6": entry("<x>")}, "chat_template": "x"}).encode(),
}


def cuts(content: bytes) -> Iterator[int]:
    yield from range(0, len(content) - 1, max(1, len(content) // 60))


@pytest.mark.parametrize("name", SOUND)
def test_a_file_cut_off_anywhere_is_refused_or_whole(name: str, tmp_path: Path) -> None:
    """A file of lines can end at the end of one, which nothing tells."""
    for cut in cuts(SOUND[name]):
        written(tmp_path, tokenizer__json=SOUND["tokenizer__json"])
        if name != "tokenizer_config__json":
            (tmp_path / "tokenizer.json").unlink()
        written(tmp_path, **{name: SOUND[name][:cut]})
        with suppress(ModelError):
            tokenizer = read_tokenizer(tmp_path)
            assert name == "any__tiktoken"
            assert isinstance(tokenizer, Tokenizer)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(name=st.sampled_from(sorted(SOUND)), data=st.data())
def test_damage_never_raises_anything_else(name: str, data: st.DataObject, tmp_path: Path) -> None:
    for file in tmp_path.iterdir():
        file.unlink()
    content = bytearray(SOUND[name])
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, min(len(content), 2000) - 1))] = data.draw(st.integers(0, 255))
    beside = {"tokenizer__json": SOUND["tokenizer__json"]} if name == "tokenizer_config__json" else {}
    written(tmp_path, **beside, **{name: bytes(content)})
    with suppress(ModelError, RequestError):
        read_tokenizer(tmp_path).encode("ab <x>")


def test_a_text_on_which_the_library_fails_is_refused(tmp_path: Path) -> None:
    """Its code panics, which Python does not count among exceptions: no text may end the program."""
    backend = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    backend.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex("(a+)+$"), "isolated")
    tokenizer = read_tokenizer(written(tmp_path, tokenizer__json=backend.to_str()))
    assert tokenizer.encode("aab") == [0, 0, 1]
    with pytest.raises(RequestError, match=r"fails on the text.*retry-limit"):
        tokenizer.encode("a" * 40 + "b")


def test_a_word_without_a_token_in_a_vocabulary_without_one_for_such_is_refused(tmp_path: Path) -> None:
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0}, unk_token="[UNK]"))
    tokenizer = read_tokenizer(written(tmp_path, tokenizer__json=backend.to_str()))
    assert tokenizer.encode("a") == [0]
    with pytest.raises(RequestError, match="fails on the text"):
        tokenizer.encode("b")
