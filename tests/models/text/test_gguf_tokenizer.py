"""Every kind of vocabulary and every pre-tokenizer of GGUF files gives the tokens that llama.cpp gives."""

import io
import json
import re
import unicodedata
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from generated import MARKED, VARIANTS, VOCABULARIES, texts
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as protobuf

from xinfer.errors import ModelError
from xinfer.models.gguf.tokenizer import tokenizer_from_gguf
from xinfer.models.text.patterns import PRE

DATA = Path(__file__).parents[2] / "data"
EXPECTED: dict[str, Any] = json.loads((DATA / "gguf_tokens.json").read_text())  # see make_gguf_tokens.py beside it
BYTE_LEVEL: dict[str, Any] = json.loads((DATA / "tiny_tokens.json").read_text())["byte_level"]["metadata"]
TEXTS = texts(120)
KINDS = [(name, i) for name in VARIANTS for i in range(len(VARIANTS[name]))]


def has_mark(text: str, *categories: str) -> bool:
    return any(unicodedata.category(character) in (categories or ("Mn", "Mc", "Me")) for character in text)


def foreign_digits(text: str) -> bool:
    return any(character.isnumeric() and not character.isascii() for character in text)


def beside_digits(text: str) -> bool:
    """Whether there is more than ASCII where digits are."""
    return any(map(str.isnumeric, text)) and not text.isascii()


# Where llama.cpp's expressions are not the models' own, or its engine reads them otherwise, texts that show it.
ODD: dict[str, Callable[[str], bool]] = {
    **dict.fromkeys(("tekken", "gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2", "kimi-k2"), has_mark),
    **dict.fromkeys(("tiny_aya", "cohere2moe"), lambda text: beside_digits(text) or has_mark(text)),
    **dict.fromkeys(("deepseek-llm", "deepseek-coder"), lambda text: bool({*text} & {"\u2028", "\u3000"})),
    "superbpe": foreign_digits,
}


def metadata_of(name: str, variant: int = 0, **changes: Any) -> dict[str, Any]:
    fields = VARIANTS[name][variant] | changes
    return VOCABULARIES[name]() | {f"tokenizer.ggml.{key}": value for key, value in fields.items()}


# --- texts to ids ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", sorted(PRE))
def test_texts_are_cut_as_llama_cpp_cuts_them(pre: str) -> None:
    """With a beginning-of-sequence token where it puts one. Texts are composed where the model's own tokenizer does."""
    tokenizer = tokenizer_from_gguf(BYTE_LEVEL | {"tokenizer.ggml.pre": pre})
    compared = 0
    for text, answers, which in zip(TEXTS, EXPECTED["pre"]["answers"], EXPECTED["pre"]["which"][pre], strict=True):
        if ODD.get(pre, lambda _: False)(text) or (PRE[pre].compose and unicodedata.normalize("NFC", text) != text):
            continue
        assert tokenizer.encode(text) == answers[which], text
        compared += 1
    assert compared >= 60


def test_the_texts_tell_kinds_of_pre_tokenizers_apart() -> None:
    which = EXPECTED["pre"]["which"]
    ids = {tuple(answers) for answers in which.values()}
    assert len(ids) >= 20  # of 29 kinds, some of which llama.cpp has the same expression for


@pytest.mark.parametrize(("name", "variant"), KINDS)
def test_other_vocabularies_give_the_ids_of_llama_cpp(name: str, variant: int) -> None:
    """Pieces of equal scores are merged from the left, as by SentencePiece."""
    tokenizer = tokenizer_from_gguf(metadata_of(name, variant))
    for text, ids in zip(TEXTS + MARKED, EXPECTED["kinds"][name][variant], strict=True):
        if name == "wordpiece" and has_mark(text, "Mc", "Me"):
            continue  # BERT drops accents (Mn), llama.cpp all marks
        if name == "unigram" and not re.sub("^.*</s>", "", text).strip(" "):
            continue  # SentencePiece puts a space before any text, llama.cpp not before one of spaces
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("name", ["tied", "gemma4"])
@pytest.mark.parametrize("text", TEXTS[:40])
def test_what_is_encoded_is_decoded(name: str, text: str) -> None:
    tokenizer = tokenizer_from_gguf(metadata_of(name))
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_unigram_files_charsmap_normalizes_as_sentencepiece_does() -> None:
    """Full-width letters, ligatures and all kinds of spaces; and spaces too many are left out."""
    lines = [text for text in texts(400, seed=8) if "\0" not in text and "\n" not in text and text.strip()]
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=model, vocab_size=300, hard_vocab_limit=False, minloglevel=2
    )
    theirs, parsed = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()), protobuf.ModelProto()
    parsed.ParseFromString(model.getvalue())
    fields = {
        "model": "t5",
        "tokens": [piece.piece for piece in parsed.pieces],
        "scores": [piece.score for piece in parsed.pieces],
        "token_type": [piece.type for piece in parsed.pieces],
        "precompiled_charsmap": [*parsed.normalizer_spec.precompiled_charsmap],
        "add_space_prefix": True,
        "remove_extra_whitespaces": True,
        "unknown_token_id": 0,
        "eos_token_id": 2,
    }
    tokenizer = tokenizer_from_gguf({f"tokenizer.ggml.{name}": value for name, value in fields.items()})
    for text in [*TEXTS, "Ｔｈｅ　ｗｏｒｄ", "ﬁ ①  ½\u00a0", "  The  word  "]:
        assert tokenizer.encode(text) == [*theirs.encode(text), 2], text


def test_words_of_wordpiece_are_decoded_with_spaces_between_them() -> None:
    tokenizer = tokenizer_from_gguf(metadata_of("wordpiece"))
    names = metadata_of("wordpiece")["tokenizer.ggml.tokens"]
    begins, goes_on = (next(i for i, n in enumerate(names) if i > 5 and (n[0] == "▁") == first) for first in (1, 0))
    word = names[begins][1:]
    assert tokenizer.decode([2, begins, goes_on, begins, 3]) == f"{word}{names[goes_on]} {word}"


def test_a_byte_level_text_ends_where_the_file_says_so() -> None:
    eos = BYTE_LEVEL["tokenizer.ggml.eos_token_id"]
    changes = {"tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.add_eos_token": True}
    assert tokenizer_from_gguf(BYTE_LEVEL | changes).encode("a")[-1] == eos
    assert tokenizer_from_gguf(BYTE_LEVEL | changes | {"tokenizer.ggml.add_eos_token": False}).encode("a")[-1] != eos


@pytest.mark.parametrize("legacy", [True, False])
def test_a_wordpiece_files_first_token_is_called_by_either_name(legacy: bool) -> None:
    metadata = metadata_of("wordpiece")
    if legacy:
        metadata["tokenizer.ggml.cls_token_id"] = metadata.pop("tokenizer.ggml.bos_token_id")
    assert tokenizer_from_gguf(metadata).encode("a")[0] == 2


# --- chat templates -------------------------------------------------------------------------------------------------

HI = [{"role": "user", "content": "Hi"}]


def test_a_files_template_for_tools_is_taken_where_tools_are_given() -> None:
    templates = {
        "tokenizer.chat_templates": ["tool_use", "rag"],
        "tokenizer.chat_template": "plain {{ bos_token }}",
        "tokenizer.chat_template.tool_use": "tools {{ bos_token }}",
        "tokenizer.chat_template.rag": "documents",
    }
    template = tokenizer_from_gguf(BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2"} | templates).chat_template
    assert template is not None
    assert template.render(HI) == "plain <|endoftext|>"
    assert template.render(HI, tools=[{"name": "f"}]) == "tools <|endoftext|>"


# --- files that are damaged -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wordpiece", {"unknown_token_id": 2**31}, "no token for unknown words"),
        ("unigram", {"precompiled_charsmap": [1, 2, 3]}, "damaged"),
        ("unigram", {"precompiled_charsmap": [255] * 64}, "damaged"),
        ("unigram", {"scores": []}, "0 scores"),
        ("tied", {"scores": [float("nan")] * len(VOCABULARIES["tied"]()["tokenizer.ggml.tokens"])}, "no number"),
        ("gemma4", {"merges": ["a\n"]}, "merges has"),
    ],
)
def test_a_vocabulary_that_makes_no_sense_is_named(name: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(metadata_of(name, **changes))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@given(name=st.sampled_from(sorted(VOCABULARIES)), data=st.data())
def test_no_value_of_any_key_raises_anything_else(name: str, data: st.DataObject) -> None:
    optional = ["precompiled_charsmap", "remove_extra_whitespaces", "normalizer.lowercase", "cls_token_id", "merges"]
    keys = [*metadata_of(name), *(f"tokenizer.ggml.{key}" for key in optional)]
    with suppress(ModelError):
        tokenizer_from_gguf(metadata_of(name) | {data.draw(st.sampled_from(keys)): data.draw(JUNK)}).encode("text")
