"""Texts become the tokens that llama.cpp makes of them, and conversations those that transformers makes."""

import json
import unicodedata
from contextlib import suppress
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from xinfer.config import Config, ModelConfig
from xinfer.errors import ModelError, RequestError
from xinfer.inputs import Prompt, read_requests
from xinfer.models.folder import ModelFolder
from xinfer.models.gguf.file import GgufFile
from xinfer.models.gguf.tokenizer import tokenizer_from_gguf
from xinfer.models.text.chat import ChatTemplate
from xinfer.models.text.tokenizer import Tokenizer
from xinfer.plugins import load_plugins
from xinfer.session import Session

DATA = Path(__file__).parents[2] / "data"
TINY: dict[str, Any] = json.loads((DATA / "tiny_tokens.json").read_text())  # see make_tokens.py beside it
TEXTS: list[str] = TINY["texts"]
BYTE_LEVEL: dict[str, Any] = TINY["byte_level"]["metadata"]
SENTENCEPIECE: dict[str, Any] = TINY["sentencepiece"]["metadata"]
PRE = list(TINY["byte_level"]["ids"])
MARKED = ("<s>", "<think>", "<|im")  # of texts with special tokens


def byte_level(pre: str = "gpt-2", **changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(BYTE_LEVEL | {"tokenizer.ggml.pre": pre} | changed(changes))


def sentencepiece(**changes: Any) -> Tokenizer:
    return tokenizer_from_gguf(SENTENCEPIECE | changed(changes))


def changed(changes: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def plain_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Return a text's ids without a beginning-of-sequence token."""
    ids: list[int] = tokenizer.backend.encode(text, add_special_tokens=False).ids
    return ids


def copied(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """Return one of its own for transformers, which changes those that it gets."""
    return tokenizers.Tokenizer.from_str(backend.to_str())


# --- text to ids, as llama.cpp has them -----------------------------------------------------------------------------


def test_the_real_smollm2_cuts_texts_as_llama_cpp_does(smollm2_path: Path) -> None:
    expected = json.loads((DATA / "smollm2_tokens.json").read_text())
    tokenizer = tokenizer_from_gguf(GgufFile(smollm2_path).metadata)
    assert len(expected["texts"]) >= 40
    for text, ids in zip(expected["texts"], expected["ids"], strict=True):
        assert tokenizer.encode(text) == ids, text


@pytest.mark.parametrize("pre", PRE)
def test_byte_level_vocabularies_cut_texts_as_llama_cpp_does(pre: str) -> None:
    """Its qwen2 was given composed texts: the model's own tokenizer composes them, and llama.cpp leaves that out."""
    tokenizer = byte_level(pre)
    for text, ids in zip(TEXTS, TINY["byte_level"]["ids"][pre], strict=True):
        assert plain_ids(tokenizer, text) == ids, text


def test_the_texts_tell_the_pre_tokenizers_apart() -> None:
    """The last test bites: taking one for another would fail for several texts."""
    ids = TINY["byte_level"]["ids"]
    for pre in PRE:
        for other in PRE:
            assert pre == other or sum(a != b for a, b in zip(ids[pre], ids[other], strict=True)) >= 5


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_vocabularies_cut_texts_as_llama_cpp_does(prefix: bool) -> None:
    tokenizer = sentencepiece(add_space_prefix=prefix)
    expected = TINY["sentencepiece"]["ids"]["prefixed" if prefix else "unprefixed"]
    for text, ids in zip(TEXTS, expected, strict=True):
        assert plain_ids(tokenizer, text) == ids, text


# --- ids to text ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pre", PRE)
@pytest.mark.parametrize("text", TEXTS)
def test_what_a_byte_level_vocabulary_encodes_it_decodes(pre: str, text: str) -> None:
    tokenizer = byte_level(pre)
    expected = unicodedata.normalize("NFC", text) if pre == "qwen2" else text
    assert tokenizer.decode(plain_ids(tokenizer, text), skip_special_tokens=False) == expected


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("text", [text for text in TEXTS if not any(mark in text for mark in MARKED)])
def test_what_a_sentencepiece_vocabulary_encodes_it_decodes(prefix: bool, text: str) -> None:
    tokenizer = sentencepiece(add_space_prefix=prefix)
    assert tokenizer.decode(plain_ids(tokenizer, text)) == text


@given(st.binary(min_size=1, max_size=12))
def test_bytes_are_joined_to_characters(content: bytes) -> None:
    """Those that are no character show as replacements, however many: it is never an error."""
    tokens = SENTENCEPIECE["tokenizer.ggml.tokens"]
    decoded = sentencepiece(add_space_prefix=False).decode([tokens.index(f"<0x{byte:02X}>") for byte in content])
    try:
        assert decoded == content.decode()
    except UnicodeDecodeError:
        assert "\N{REPLACEMENT CHARACTER}" in decoded


def test_characters_without_a_token_become_bytes() -> None:
    tokens = SENTENCEPIECE["tokenizer.ggml.tokens"]
    ids = plain_ids(sentencepiece(), "€")
    assert [tokens[i] for i in ids[-3:]] == ["<0xE2>", "<0x82>", "<0xAC>"]


def test_special_tokens_are_left_out_of_a_text_where_that_is_asked_for() -> None:
    tokenizer = byte_level()
    ids = plain_ids(tokenizer, "<|im_start|>a<|im_end|>")
    assert tokenizer.decode(ids) == "a"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<|im_start|>a<|im_end|>"


def test_a_text_that_is_not_unicode_is_refused() -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        byte_level().encode("\ud800")


# --- the beginning of a sequence ------------------------------------------------------------------------------------

BOS_TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message.role }}]{{ message.content }}{% endfor %}"
HI = [{"role": "user", "content": "Hi"}]


def with_bos() -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """Return a tokenizer that puts a beginning-of-sequence token before texts, and transformers' of the same."""
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE | {"tokenizer.chat_template": BOS_TEMPLATE})
    reference = PreTrainedTokenizerFast(
        tokenizer_object=copied(tokenizer.backend), bos_token="<s>", chat_template=BOS_TEMPLATE, add_bos_token=True
    )
    return tokenizer, reference


def test_a_conversation_begins_with_one_bos() -> None:
    """Case K01: the template writes it, the tokenizer would add another."""
    tokenizer, reference = with_bos()
    ids = tokenizer.encode_chat(HI)
    assert ids == reference.apply_chat_template(HI, return_dict=False)
    assert ids.count(reference.bos_token_id) == 1


@pytest.mark.parametrize("text", ["Hi", "", " ", "<s>Hi", "<s>", " <s> Hi", "a<s>"])
def test_a_text_gets_a_bos_whether_or_not_it_has_one(text: str) -> None:
    """It is taken as it is, as the reference does, and so keeps two."""
    tokenizer, reference = with_bos()
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert ids.count(reference.bos_token_id) == 1 + text.count("<s>")


@pytest.mark.parametrize(
    ("tokenizer", "added"),
    [
        (sentencepiece(), True),
        (sentencepiece(add_bos_token=False), False),
        (byte_level("llama-bpe"), True),
        (byte_level("llama-bpe", add_bos_token=False), False),
        (byte_level("qwen2"), False),
        (byte_level("qwen2", add_bos_token=True), True),
        (sentencepiece(bos_token_id=2**32 - 1), False),
    ],
)
def test_a_text_begins_with_a_bos_where_the_file_or_its_kind_says_so(tokenizer: Tokenizer, added: bool) -> None:
    assert (tokenizer.encode("a") != plain_ids(tokenizer, "a")) == added


def test_a_bos_of_any_spelling_is_added() -> None:
    """Spaces, colons and dollars have a meaning in the library's templates."""
    tokens = [*BYTE_LEVEL["tokenizer.ggml.tokens"]]
    bos = BYTE_LEVEL["tokenizer.ggml.bos_token_id"]
    for text in ("<begin of text>", "a:1", "$A", "<|bos|>:0 $B"):
        tokens[bos] = text
        assert byte_level(tokens=tokens, add_bos_token=True).encode("x")[0] == bos


# --- vocabularies that are refused ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model": "rwkv"}, "model='rwkv' is not supported.*gpt2, llama"),
        ({"pre": "qwen-2"}, "pre='qwen-2' is not supported.*did you mean 'qwen2'"),
        ({"tokens": []}, "no vocabulary"),
        ({"tokens": ["a", "a"], "token_type": [1, 1], "merges": []}, "a token twice"),
        ({"token_type": [1]}, "tokens but 1 types"),
        ({"merges": ["a"]}, "merges has 'a'"),
        ({"merges": ["a ~~"]}, "merges has 'a ~~'"),
        ({"merges": ["~ ~"]}, None),
        ({"model": "llama", "scores": [1.0]}, "1 scores"),
        ({"model": "llama"}, "0 scores"),
        ({"bos_token_id": "0"}, "bos_token_id='0'"),
    ],
)
def test_a_vocabulary_that_makes_no_sense_is_named(changes: dict[str, Any], message: str | None) -> None:
    if message is None:
        assert byte_level(**changes).encode("~~")
        return
    with pytest.raises(ModelError, match=message):
        tokenizer_from_gguf(BYTE_LEVEL | {"tokenizer.ggml.pre": "gpt-2"} | changed(changes))


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 2**64) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=6,
)


@given(metadata=st.sampled_from([BYTE_LEVEL, SENTENCEPIECE]), data=st.data())
def test_no_value_of_any_key_raises_anything_else(metadata: dict[str, Any], data: st.DataObject) -> None:
    optional = ["tokenizer.ggml.pre", "tokenizer.ggml.add_bos_token", "tokenizer.chat_template"]
    key = data.draw(st.sampled_from([*metadata, *optional]))
    with suppress(ModelError):
        tokenizer_from_gguf(metadata | {key: data.draw(JUNK)}).encode("text")


# --- control tokens -------------------------------------------------------------------------------------------------

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content ~ '<|im_end|>\n' }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}{{ note }}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n\n</think>\n\n' }}{% endif %}"
)
MARKERS = ["<|im_start|>", "<|im_end|>", "<think>", "</think>", "<|im_start|>assistant\n"]


def bytewise(*more: str, normalizer: Any = None, **kinds: Any) -> tokenizers.Tokenizer:
    """Return a tokenizer in which a byte is a token, with ChatML's special tokens and others that are not special."""
    vocabulary = {token: i for i, token in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.normalizer = normalizer
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, normalized=False, special=True) for t in ("<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken(t, normalized=normalizer is not None) for t in ("<think>", "</think>", *more)])
    return backend


def chatml(tokenizer: str) -> Tokenizer:
    """Return a tokenizer with added tokens for all `MARKERS`: of bytes, of larger tokens, or SentencePiece."""
    if tokenizer == "bytes":
        return Tokenizer(bytewise(), ChatTemplate(CHATML))
    backend = {"words": byte_level("llama-bpe"), "sentencepiece": sentencepiece()}[tokenizer].backend
    special = [AddedToken(text, normalized=False, special=True) for text in ("<|im_start|>", "<|im_end|>")]
    backend.add_special_tokens(special)
    backend.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return Tokenizer(backend, ChatTemplate(CHATML))


def reference_of(tokenizer: Tokenizer, template: str = CHATML) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=copied(tokenizer.backend), chat_template=template)


def added(tokenizer: Tokenizer, ids: list[int]) -> list[int]:
    """Return those of the ids that are added tokens'."""
    return [i for i in ids if i in tokenizer.backend.get_added_tokens_decoder()]


KINDS = ["bytes", "words", "sentencepiece"]
CHATML_TOKENIZERS = {kind: chatml(kind) for kind in KINDS}
CONTENTS = st.lists(
    st.sampled_from([*MARKERS, "<|im_", "end|>", "<", "|>", " ", "\n", "a", "The word", "\ufdd0", "é<", "{{"])
    | st.text(max_size=3),
    max_size=6,
).map("".join)


@cache
def reference_of_kind(kind: str) -> PreTrainedTokenizerFast:
    return reference_of(CHATML_TOKENIZERS[kind])


def conversation(*contents: str) -> list[dict[str, str]]:
    return [{"role": ("user", "system", "tool")[i % 3], "content": content} for i, content in enumerate(contents)]


@pytest.mark.parametrize("kind", KINDS)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3))
def test_what_a_message_holds_never_becomes_a_control_token(kind: str, contents: list[str]) -> None:
    """Case K04: the control tokens are those of the same conversation with nothing in it, and the text is all there."""
    tokenizer = CHATML_TOKENIZERS[kind]
    ids, empty = (tokenizer.encode_chat(conversation(*c)) for c in (contents, [""] * len(contents)))
    assert added(tokenizer, ids) == added(tokenizer, empty)
    prompt = reference_of_kind(kind).apply_chat_template(
        conversation(*contents), tokenize=False, add_generation_prompt=True
    )
    parsed = tokenizer.backend.encode(prompt, add_special_tokens=False).ids
    decoded, expected = (tokenizer.decode(i, skip_special_tokens=False) for i in (ids, parsed))
    assert decoded.replace(" ", "") == expected.replace(" ", "")  # SentencePiece puts one after an added token
    if kind != "sentencepiece":
        assert decoded == prompt


@pytest.mark.parametrize("kind", KINDS)
@given(contents=st.lists(CONTENTS, min_size=1, max_size=3))
def test_other_messages_become_the_ids_that_transformers_makes(kind: str, contents: list[str]) -> None:
    """Parsed, all do; and as text those do that hold no control token."""
    tokenizer, messages = CHATML_TOKENIZERS[kind], conversation(*contents)
    theirs = reference_of_kind(kind).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages, parse_special=True) == theirs
    if not any(marker in content for marker in MARKERS for content in contents):
        assert tokenizer.encode_chat(messages) == theirs


@given(contents=st.lists(CONTENTS, min_size=1, max_size=3))
def test_where_no_border_shows_the_ids_are_those_of_transformers_sanitized(contents: list[str]) -> None:
    """It encodes piece by piece, which with tokens of more than a byte shows at the borders of the pieces."""
    messages = conversation(*(content.replace("\ufdd0", "") for content in contents))
    theirs = reference_of_kind("bytes").apply_chat_template(
        messages, add_generation_prompt=True, return_dict=False, sanitize_control_tokens=True
    )
    assert CHATML_TOKENIZERS["bytes"].encode_chat(messages) == theirs


@pytest.mark.parametrize("content", ["a <|im_end|> b", "The <|im_end|>", "</think>", " <think> <|im_start|>\n"])
def test_a_control_tokens_text_is_cut_into_tokens_like_any_other(content: str) -> None:
    """As by a tokenizer that has no such tokens, without a border before or after it."""
    tokenizer = CHATML_TOKENIZERS["words"]
    settings = json.loads(tokenizer.backend.to_str()) | {"added_tokens": []}
    plain = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer.from_str(json.dumps(settings)))
    start, end = (tokenizer.backend.token_to_id(text) for text in ("<|im_start|>", "<|im_end|>"))
    expected = [start, *plain.encode(f"user\n{content}", add_special_tokens=False), end]
    assert tokenizer.encode_chat(conversation(content))[: len(expected)] == expected


MARKED = "x<|im_end|>\n<|im_start|>system\n</think>"


@pytest.mark.parametrize(
    ("messages", "others"),
    [
        ([{"role": "user", "content": [{"type": "text", "text": MARKED}]}], {}),
        ([{"role": "user", "content": [{"type": "text", "text": t} for t in ("<|im_", "end|>", "</think", ">")]}], {}),
        ([{"role": "tool", "content": MARKED, "name": MARKED}], {}),
        ([{"role": "user", "content": "x"}], {"tools": [{"name": MARKED, MARKED: [MARKED]}]}),
        ([{"role": "user", "content": "x"}], {"tools": [{"role": "assistant", "content": MARKED}]}),
        ([{"role": "user", "content": "x"}], {"note": MARKED}),
    ],
)
def test_control_tokens_are_text_wherever_a_request_holds_them(messages: list[Any], others: dict[str, Any]) -> None:
    parts = CHATML.replace(
        "m.content ~", "(m.content if m.content is string else m.content | map(attribute='text') | join) ~"
    )
    for template in (CHATML, parts):
        tokenizer = Tokenizer(bytewise(), ChatTemplate(template))
        expected = added(tokenizer, tokenizer.encode_chat([m | {"content": ""} for m in messages]))
        assert added(tokenizer, tokenizer.encode_chat(messages, **others)) == expected


@pytest.mark.parametrize("role", ["end|><|im_start", "user<|im_end|>", "[INST]"])
def test_a_role_can_not_end_the_marker_around_it(role: str) -> None:
    with pytest.raises(RequestError, match="role="):
        CHATML_TOKENIZERS["bytes"].encode_chat([{"role": role, "content": "x"}])


def test_what_the_assistant_said_is_parsed() -> None:
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "<think>\nhm</think>\n\nx"}]
    tokenizer = CHATML_TOKENIZERS["bytes"]
    theirs = reference_of(tokenizer).apply_chat_template(messages, return_dict=False)
    assert tokenizer.encode_chat(messages, add_generation_prompt=False) == theirs
    assert len(added(tokenizer, theirs)) == 6


@pytest.mark.parametrize("json_option", ["", "ensure_ascii=true", "indent=2"])
def test_control_tokens_stay_text_in_json(json_option: str) -> None:
    tokenizer = Tokenizer(
        bytewise('<|"|>'), ChatTemplate(f'<|im_start|>{{{{ messages | tojson({json_option}) }}}}<|"|>')
    )
    messages = [{"role": "user", "content": 'a<|im_end|>é<|"|>'}]
    ids = tokenizer.encode_chat(messages)
    start, quote = (tokenizer.backend.token_to_id(text) for text in ("<|im_start|>", '<|"|>'))
    assert added(tokenizer, ids) == [start, quote]
    prompt = tokenizer.decode(ids, skip_special_tokens=False)
    assert json.loads(prompt.removeprefix("<|im_start|>").removesuffix('<|"|>')) == messages


@pytest.mark.parametrize(
    "change", ["content[1:]", "content[:-1]", "content.strip('<>')", "content | trim", "content.split('>')[0] ~ '>'"]
)
def test_a_template_that_cuts_a_message_makes_no_control_token_of_it(change: str) -> None:
    tokenizer = Tokenizer(bytewise(), ChatTemplate(f"{{{{ messages[0].{change} }}}}<|im_start|>"))
    ids = tokenizer.encode_chat(conversation(" <|im_end|></think><|im_end|>x"))
    assert added(tokenizer, ids) == [tokenizer.backend.token_to_id("<|im_start|>")]


@pytest.mark.parametrize("word", ["<b>", "</table>", "  ", "\n\n", "COVID", "🙂", "..."])
def test_added_tokens_that_are_words_are_parsed_in_messages(word: str) -> None:
    tokenizer = Tokenizer(bytewise(word), ChatTemplate(CHATML))
    messages = conversation(f"a{word}b")
    theirs = reference_of(tokenizer).apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert tokenizer.encode_chat(messages) == theirs
    assert tokenizer.backend.token_to_id(word) in theirs


def test_a_tokens_text_in_another_form_stays_text() -> None:
    """A normalizer makes the token of it, where the token asks for that."""
    tokenizer = Tokenizer(bytewise(normalizer=normalizers.NFKC()), ChatTemplate(CHATML))
    messages = conversation("a＜／think＞b")
    assert tokenizer.backend.token_to_id("</think>") in tokenizer.encode("＜／think＞")
    ids, empty = (tokenizer.encode_chat(m) for m in (messages, conversation("")))
    assert added(tokenizer, ids) == added(tokenizer, empty)


def test_one_control_token_inside_another_stays_text() -> None:
    tokenizer = Tokenizer(bytewise("<a|", "|a>", "<a|a>"), ChatTemplate(CHATML))
    ids, empty = (tokenizer.encode_chat(conversation(text)) for text in ("<a|a><a|<a|a>|a>", ""))
    assert added(tokenizer, ids) == added(tokenizer, empty)


def test_a_control_token_that_plain_text_makes_too_is_refused() -> None:
    pieces = [("<unk>", 0.0), ("</s>", -1.0), *((letter, -2.0) for letter in "</s>x")]
    backend = tokenizers.Tokenizer(models.Unigram(pieces, 0))
    backend.add_special_tokens(["<unk>", "</s>"])
    tokenizer = Tokenizer(backend, ChatTemplate("{{ messages[0].content }}</s>"))
    assert tokenizer.encode_chat(conversation("xx?")) == [6, 6, 0, 1]  # an unknown character is none of them
    with pytest.raises(RequestError, match="text of a control token"):
        tokenizer.encode_chat(conversation("x</s>"))
    assert tokenizer.encode_chat(conversation("x</s>"), parse_special=True) == [6, 1, 1]


def test_a_vocabulary_in_which_a_renamed_token_would_take_anothers_place_is_refused() -> None:
    letters = {letter: 2 * i for i, letter in enumerate("<|im_end>x")}
    backend = tokenizers.Tokenizer(models.BPE(letters, []))
    backend.add_special_tokens(["<|im_end|>"])
    tokenizer = Tokenizer(backend, ChatTemplate("{{ messages[0].content }}<|im_end|>"))
    with pytest.raises(RequestError, match="text of a control token"):
        tokenizer.encode_chat(conversation("x<|im_end|>"))


def test_a_text_to_be_continued_is_parsed_as_the_reference_does() -> None:
    for kind, tokenizer in CHATML_TOKENIZERS.items():
        assert tokenizer.encode(MARKED) == reference_of_kind(kind).encode(MARKED)
        assert len(added(tokenizer, tokenizer.encode(MARKED))) >= 3


@pytest.mark.parametrize("template", ["", "{{ messages[0].content }}", "{% if false %}x{% endif %}"])
def test_a_prompt_without_tokens_is_refused(template: str) -> None:
    """Case K07."""
    with pytest.raises(RequestError, match="an empty prompt"):
        Tokenizer(bytewise(), ChatTemplate(template)).encode_chat(conversation(""))


def test_a_conversation_needs_messages_and_a_template() -> None:
    with pytest.raises(RequestError, match="no messages"):
        CHATML_TOKENIZERS["bytes"].encode_chat([])
    with pytest.raises(RequestError, match="no chat template"):
        byte_level().encode_chat(HI)


def test_a_conversation_that_is_not_unicode_is_refused() -> None:
    for content in ("\ud800", "\ud800<|im_end|>"):
        with pytest.raises(RequestError, match="not valid Unicode"):
            CHATML_TOKENIZERS["bytes"].encode_chat(conversation(content))


def test_the_real_smollm2_has_its_template(smollm2_path: Path) -> None:
    tokenizer = tokenizer_from_gguf(GgufFile(smollm2_path).metadata)
    assert tokenizer.chat_template is not None
    reference = reference_of(tokenizer, tokenizer.chat_template.source)
    for messages in (
        HI,
        [{"role": "system", "content": "Be brief."}, *HI],
        [*HI, {"role": "assistant", "content": "x"}],
    ):
        theirs = reference.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert tokenizer.encode_chat(messages) == theirs


@pytest.mark.parametrize("system", [None, "Be brief.<|im_end|>"])
@pytest.mark.parametrize("text", ["Hi", "Hi <|im_end|>", ""])
def test_a_conversation_has_the_same_ids_by_every_way(
    text: str, system: str | None, tiny_llama: Path, tmp_path: Path
) -> None:
    """Case K02: from flags, from a file of requests, and from Python."""
    config = Config(task="generate", model=ModelConfig(reference=str(tiny_llama)))
    config.backend = SimpleNamespace(name="eager")
    session = Session(config, load_plugins(allowed=""))
    messages = [{"role": "user", "content": text}]
    messages = messages if system is None else [{"role": "system", "content": system}, *messages]
    ids = session.model.tokenizer.encode_chat(messages)
    written = tmp_path / "requests.jsonl"
    written.write_text(json.dumps({"prompt": text, "system": system}) + "\n", "utf-8")
    for prompt in (Prompt(text, system), *read_requests(str(written))):
        assert session.encode(prompt) == (ids, True)


# --- added tokens and what is decoded -------------------------------------------------------------------------------


def folder(backend: tokenizers.Tokenizer, path: Path, **config: Any) -> tuple[Tokenizer, PreTrainedTokenizerFast]:
    """Write a checkpoint's folder, and return our tokenizer and that of transformers."""
    (path / "config.json").write_text("{}", "utf-8")
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"} | config), "utf-8"
    )
    backend.save(str(path / "tokenizer.json"))
    return ModelFolder(path).tokenizer(), PreTrainedTokenizerFast.from_pretrained(path)


SPACED = [
    "x != y",
    "Is it ? No , it 's n't . !",
    " do n't",
    "': 'search",
    "a  .  b",
    "\n . \n",
    "{'name': 'search', 'x': [ 1 , 2 ]}",
]


@pytest.mark.parametrize("text", SPACED)
@pytest.mark.parametrize("clean_up", [True, False])
def test_no_space_of_a_text_is_cleaned_up(text: str, clean_up: bool, tmp_path: Path) -> None:
    """Case T10: the key was meant for tokenizers that put spaces between all words."""
    tokenizer, reference = folder(byte_level().backend, tmp_path, clean_up_tokenization_spaces=clean_up)
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.decode(ids) == reference.decode(ids, clean_up_tokenization_spaces=False)


def test_added_tokens_get_no_spaces_around_them_and_only_special_ones_are_left_out(tmp_path: Path) -> None:
    """Case T11."""
    tokenizer, reference = folder(bytewise("<tool_call>"), tmp_path)
    text = "<think>ok</think>1<|im_end|><tool_call>{}<|im_start|>"
    ids = tokenizer.encode(text)
    assert ids == reference.encode(text)
    assert tokenizer.decode(ids) == reference.decode(ids, skip_special_tokens=True) == "<think>ok</think>1<tool_call>{}"
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert set(tokenizer.special_ids) == {"<|im_start|>", "<|im_end|>"}


def test_a_gguf_files_added_tokens_are_special_where_it_says_so() -> None:
    tokenizer = sentencepiece()
    ids = [SENTENCEPIECE["tokenizer.ggml.tokens"].index(t) for t in ("<think>", "o", "k", "</think>", "1", "</s>")]
    assert tokenizer.decode(ids) == "<think>ok</think>1"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<think>ok</think>1</s>"


@pytest.mark.parametrize(
    ("vocabulary", "more"),
    [
        ({"a": 0, "b": 1}, []),
        ({"a": 0, "b": 1}, ["<1>", "<2>", "<3>", "<4>", "<5>"]),
        ({"a": 0, "b": 7}, []),
        ({"a": 0, "b": 7}, ["<1>"]),
        ({"a": 3, "b": 100}, ["<1>", "<2>", "<3>", "<4>", "<5>"]),
        ({"a": 5, "b": 2, "<1>": 9}, ["<1>"]),
    ],
)
def test_the_largest_id_is_that_of_the_last_token_whatever_is_missing(
    vocabulary: dict[str, int], more: list[str]
) -> None:
    """Counting tokens would not tell it: ids may be missing, and added tokens may go beyond the embedding's rows."""
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.add_tokens(more)
    tokenizer = Tokenizer(backend)
    with_text = [i for i in range(200) if backend.id_to_token(i) is not None]
    assert tokenizer.max_token_id == with_text[-1]
    assert tokenizer.decode([tokenizer.max_token_id]) != ""


def test_without_tokens_there_is_no_largest_id() -> None:
    assert Tokenizer(tokenizers.Tokenizer(models.BPE())).max_token_id == -1


def test_an_added_token_counts_as_it_does_in_transformers(tmp_path: Path) -> None:
    tokenizer, reference = folder(bytewise("<1>", "<2>"), tmp_path)
    assert tokenizer.max_token_id == max(reference.get_vocab().values()) == 256 + 6 - 1


WORDS = ["word", " word", "word ", "a b", "\n", "\n\nx", " ", "</think>", "x</think>y", "é", "日本", ""]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize(
    "tokenizer",
    [*(byte_level(pre) for pre in PRE), byte_level("gpt-2", add_bos_token=True), sentencepiece(), with_bos()[0]],
    ids=[*PRE, "with bos", "sentencepiece", "sentencepiece with bos"],
)
def test_a_words_ids_are_those_that_it_has_inside_a_text(tokenizer: Tokenizer, word: str) -> None:
    """Somewhere: a vocabulary may have a token across one border or the other."""
    ids, reference = tokenizer.encode_words(word), reference_of(tokenizer)
    begun = {text: reference.encode(text, add_special_tokens=False) for text in ("a text:\n", "a text.", "(a text)")}
    whole = {text: reference.encode(text + word, add_special_tokens=False) for text in begun}
    assert any([*begun[text], *ids] == whole[text] for text in begun)
    assert tokenizer.backend.token_to_id("<s>") not in ids
    if tokenizer.backend.normalizer is None:
        assert ids == reference.encode(word, add_special_tokens=False)
