"""Texts become the tokens that llama.cpp makes of them, and conversations the prompts that transformers makes."""

import json
import unicodedata
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from xinfer.errors import ModelError, RequestError
from xinfer.models.gguf import GgufFile
from xinfer.models.gguf_tokenizer import tokenizer_from_gguf
from xinfer.models.tokenizer import ChatTemplate, Tokenizer

DATA = Path(__file__).parents[1] / "data"
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


def test_a_conversation_begins_with_one_bos_and_a_text_gets_one() -> None:
    """Case K01: the template writes it, the tokenizer would add another. A text is taken as it is, and so keeps two."""
    tokenizer = tokenizer_from_gguf(SENTENCEPIECE | {"tokenizer.chat_template": BOS_TEMPLATE})
    bos = SENTENCEPIECE["tokenizer.ggml.bos_token_id"]
    conversation = [{"role": "user", "content": "Hi"}]
    reference = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer.backend, bos_token="<s>", chat_template=BOS_TEMPLATE, add_bos_token=True
    )
    ids = tokenizer.encode_chat(conversation)
    assert ids == reference.apply_chat_template(conversation, tokenize=True, return_dict=True)["input_ids"]
    assert ids.count(bos) == 1
    assert tokenizer.encode("Hi") == [bos, *plain_ids(tokenizer, "Hi")]
    assert tokenizer.encode("<s>Hi")[:2] == [bos, bos]


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
        ({"model": "bert"}, "model='bert' is not supported.*gpt2, llama"),
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


# --- chat templates -------------------------------------------------------------------------------------------------

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou "
    "are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + "
    "message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|im_start|>assistant\n' }}{% endif %}"
)

LLAMA3 = """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if not tools is defined %}
    {%- set tools = none %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}
    {{- "Environment: ipython\\n" }}
{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""

MISTRAL = (
    "{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}"
    "{% elif message['role'] == 'assistant' %}{{ message['content'] + eos_token + ' ' }}{% else %}"
    "{{ raise_exception('Only user and assistant roles are supported!') }}{% endif %}{% endfor %}"
)

QWEN2 = """{% for message in messages %}
{% if loop.first and messages[0].role != 'system' %}
<|im_start|>system
You are a helpful assistant.<|im_end|>
{% endif %}
    {% if message.content is string %}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
    {% endif %}
{% endfor %}
{% if add_generation_prompt %}
<|im_start|>assistant
{% endif %}
"""

QWEN3 = """{%- if tools %}
    {{- '# Tools\\n' }}
    {%- for tool in tools %}{{- tool | tojson }}{%- endfor %}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and not(message.content.startswith('<tool_response>')) %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "tool" %}{%- continue %}{%- endif %}
    {%- if message.role == "assistant" %}
        {%- set content = message.content %}
        {%- set reasoning = '' %}
        {%- if '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last_query_index and (loop.last or (not loop.last and reasoning)) %}
            {{- '<|im_start|>assistant\\n<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

TO_JSON = """{{ messages | tojson }}
{{ messages[0] | tojson(indent=2) }}
{{ messages[-1] | tojson(ensure_ascii=true, separators=(',', ':'), sort_keys=true) }}
{{ {'b': 1, 'a': [true, none, "<&>'"]} | tojson }}"""

MARKED_GENERATION = """{% for message in messages %}
{% if message.role == 'assistant' %}
{% generation %}
    {% set kept = message.content %}
{{ kept }}{{ eos_token }}
{% endgeneration %}
{% else %}
{{ message.role }}: {{ message.content }}{{ kept }}
{% endif %}
{% endfor %}"""

NO_TOOLS = "{% if tools is none and documents is none %}none{% else %}some{% endif %}{{ messages[0].content }}"

TEMPLATES = {
    "smollm2": SMOLLM2,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "qwen2": QWEN2,
    "qwen3": QWEN3,
    "tojson": TO_JSON,
    "generation": MARKED_GENERATION,
    "no tools": NO_TOOLS,
}

USER = {"role": "user", "content": "What's <b>2 & 3</b>?\n  \"Quoted\" 'text'\t"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFünf 五 🙂 {{ not.a.template }} {% endfor %}"}
SYSTEM = {"role": "system", "content": "  Be brief.\n"}
CONVERSATIONS = [[USER], [USER, ASSISTANT], [USER, ASSISTANT, USER], [SYSTEM, USER], [SYSTEM, USER, ASSISTANT, USER]]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS, ids=lambda c: "-".join(m["role"] for m in c))
@pytest.mark.parametrize("template", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_becomes_the_prompt_that_transformers_makes(
    template: str, conversation: list[dict[str, str]], generate: bool, reference: PreTrainedTokenizerFast
) -> None:
    ours = ChatTemplate(template, SPECIAL)
    if template == MISTRAL and conversation[0] is SYSTEM:
        with pytest.raises(RequestError, match="Conversation roles must alternate"):
            ours.render(conversation, generate)
        return
    theirs = reference.apply_chat_template(
        conversation, chat_template=template, tokenize=False, add_generation_prompt=generate
    )
    assert ours.render(conversation, generate) == theirs


def test_the_real_smollm2_has_its_template(smollm2_path: Path, reference: PreTrainedTokenizerFast) -> None:
    tokenizer = tokenizer_from_gguf(GgufFile(smollm2_path).metadata)
    assert tokenizer.chat_template is not None
    for conversation in CONVERSATIONS:
        prompt = reference.apply_chat_template(
            conversation, chat_template=tokenizer.chat_template.source, tokenize=False, add_generation_prompt=True
        )
        assert tokenizer.chat_template.render(conversation) == prompt
        assert tokenizer.encode_chat(conversation) == tokenizer.encode(prompt)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__bases__[0].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__.x }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ lipsum.__globals__['os'].popen('id') }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ''.format_map.__self__.x }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{{ undefined_function() }}",
        "{% for i in range(10 ** 10) %}{% endfor %}",
        "{{ [nothing] | tojson }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% include 'secret' %}",
    ],
)
def test_a_template_that_reaches_too_far_or_fails_refuses_the_request(source: str) -> None:
    """Case K05: it is the request's error, whatever the template does, and never a traceback."""
    with pytest.raises(RequestError, match="the chat template refuses these messages"):
        ChatTemplate(source).render([USER])


def test_nothing_of_python_shows_in_a_prompt() -> None:
    for name in ("''.__class__", "messages | attr('__class__') | attr('__mro__')", "raise_exception.__code__"):
        assert ChatTemplate(f"{{{{ {name} }}}}").render([USER]) == ""


def test_a_template_can_not_change_the_messages() -> None:
    messages = [dict(USER)]
    ChatTemplate("{% set messages = [] %}{{ messages }}").render(messages)
    assert messages == [USER]


@pytest.mark.parametrize(
    "source", ["{% if %}", "{{", "{% unknown %}", "{{ x | nofilter }}", "{% generation %}", "x" * (1 << 21)]
)
def test_a_template_that_is_not_valid_is_the_models_error(source: str) -> None:
    with pytest.raises(ModelError, match="the chat template"):
        ChatTemplate(source).render([USER])


def test_an_empty_conversation_or_a_model_without_a_template_is_refused() -> None:
    with pytest.raises(RequestError, match="no messages"):
        Tokenizer(tokenizers.Tokenizer(tokenizers.models.BPE()), ChatTemplate("x")).encode_chat([])
    with pytest.raises(RequestError, match="no chat template"):
        byte_level().encode_chat([USER])
