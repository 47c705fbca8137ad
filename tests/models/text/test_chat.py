"""Conversations become the prompts that transformers makes, by templates that can do no more than that."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from transformers import PreTrainedTokenizerFast

from xinfer.errors import ModelError, RequestError
from xinfer.models.text import bounds
from xinfer.models.text.chat import ChatTemplate

# Short ones in the manner of each family, with what of the language that family uses; `others` has more of it.
TEMPLATES = {
    path.stem: path.read_text("utf-8")
    for path in sorted((Path(__file__).parents[2] / "data" / "chat_templates").glob("*.jinja"))
}
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}

SYSTEM = {"role": "system", "content": "  Be brief.\n"}
USER = {"role": "user", "content": "What's <b>2 & 3</b>?\n  \"Quoted\" 'text'\t"}
ASSISTANT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\nFünf 五 🙂 {{ not.a.template }} {% endfor %}"}
FUNCTION = {"name": "weather", "arguments": {"city": "Zürich", "days": 3, "units": ["C", None]}}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "id": "c1", "function": FUNCTION}]}
RESULT = {"role": "tool", "name": "weather", "tool_call_id": "c1", "content": '{"sun": true, "°C": [18, 21]}'}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tell the <weather> & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "units": {"type": "array", "items": {"type": "string"}},
                    "city": {"type": "string", "description": "Zürich, say"},
                    "days": {"type": "integer"},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "nothing", "parameters": {"type": "object", "properties": {}}}},
]
CONVERSATIONS = {
    "user": [USER],
    "system-user": [SYSTEM, USER],
    "turns": [SYSTEM, USER, ASSISTANT, USER, ASSISTANT, USER],
    "no system": [USER, ASSISTANT, USER],
    "trailing assistant": [USER, ASSISTANT],
    "trailing assistant after system": [SYSTEM, USER, ASSISTANT],
    "call": [USER, CALL],
    "calls": [SYSTEM, USER, CALL, RESULT, RESULT, ASSISTANT, USER],
    "empty content": [USER, {"role": "assistant", "content": ""}, USER],
    "blank content": [{"role": "user", "content": " \n\t "}, ASSISTANT, {"role": "user", "content": ""}],
    "content beside a call": [USER, CALL | {"content": "I'll look."}, RESULT],
    "reasoning": [USER, {"role": "assistant", "content": "5", "reasoning_content": "2 and 3"}, USER],
    "reasoning under another name": [USER, {"role": "assistant", "content": "5", "reasoning": "2 and 3"}],
    "two systems": [SYSTEM, USER, SYSTEM, USER],
    "assistant first": [ASSISTANT, USER],
    "unknown role": [{"role": "developer", "content": "x"}, USER],
    "more keys": [USER | {"name": "me", "weight": 1.5, "extra": {"a": [1, None, True]}}],
}


@pytest.fixture(scope="module")
def reference() -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(tokenizers.models.BPE()), **SPECIAL)


def assert_same(reference: PreTrainedTokenizerFast, source: str, messages: list[Any], /, **options: Any) -> None:
    """Check that both render the same, or that both refuse."""
    options = {"add_generation_prompt": True} | options
    try:
        theirs = reference.apply_chat_template(messages, chat_template=source, tokenize=False, **options)
    except Exception as error:  # whatever it raises
        theirs = error
    try:
        ours = ChatTemplate(source, SPECIAL).render(messages, **options)
    except RequestError as error:
        ours = f"{theirs}" if isinstance(theirs, Exception) and f"{theirs}" in f"{error}" else f"{error}"
    assert ours == (f"{theirs}" if isinstance(theirs, Exception) else theirs)


@pytest.mark.parametrize("generate", [True, False])
@pytest.mark.parametrize("messages", CONVERSATIONS.values(), ids=CONVERSATIONS)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_conversation_becomes_the_prompt_that_transformers_makes(
    source: str, messages: list[Any], generate: bool, reference: PreTrainedTokenizerFast
) -> None:
    assert_same(reference, source, messages, add_generation_prompt=generate)


@pytest.mark.parametrize("messages", [CONVERSATIONS[name] for name in ("user", "system-user", "calls")])
@pytest.mark.parametrize("tools", [TOOLS, TOOLS[:1], []], ids=len)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_tools_are_given_to_the_template_as_transformers_gives_them(
    source: str, tools: list[Any], messages: list[Any], reference: PreTrainedTokenizerFast
) -> None:
    assert_same(reference, source, messages, tools=tools)


@pytest.mark.parametrize(
    "variables",
    [
        {"enable_thinking": False},
        {"enable_thinking": True},
        {"date_string": "1 May"},
        {"documents": [{"title": "t", "text": "the text"}], "tools": TOOLS},
        {"bos_token": "<other>"},
        {"given": {"a": [1, 2]}, "source": "x", "marked": "y"},
    ],
    ids=lambda variables: next(iter(variables)),
)
@pytest.mark.parametrize("source", TEMPLATES.values(), ids=TEMPLATES)
def test_a_template_gets_further_variables(
    source: str, variables: dict[str, Any], reference: PreTrainedTokenizerFast
) -> None:
    assert_same(reference, source, [SYSTEM, USER], **variables)


def test_the_templates_tell_the_variables_apart(reference: PreTrainedTokenizerFast) -> None:
    """The last tests bite: most templates show tools, and some show each variable."""
    templates = {name: ChatTemplate(source, SPECIAL) for name, source in TEMPLATES.items()}
    shown = {name for name, template in templates.items() if "weather" in template.render([USER], tools=TOOLS)}
    assert shown >= {"mistral", "llama3", "qwen2", "qwen3", "granite", "command-r", "glm"}
    for name, variables in {
        "qwen3": {"enable_thinking": False},
        "llama3": {"date_string": "1 May"},
        "granite": {"documents": [{"text": "x"}]},
        "gemma3": {"bos_token": "<other>"},
    }.items():
        assert templates[name].render([USER]) != templates[name].render([USER], **variables)


def test_what_a_tokenizers_config_lacks_is_not_defined() -> None:
    assert ChatTemplate("{{ bos_token }}{{ bos_token is defined }}").render([USER]) == "False"


# --- content --------------------------------------------------------------------------------------------------------


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


LISTS = {name: TEMPLATES[name] for name in ("gemma3", "glm")}
TEXTS = {name: source for name, source in TEMPLATES.items() if name not in (*LISTS, "tojson", "whitespace", "qwen3")}


@pytest.mark.parametrize("texts", [["one"], ["one", " two", ""]], ids=len)
@pytest.mark.parametrize("source", LISTS.values(), ids=LISTS)
def test_parts_are_passed_to_a_template_that_knows_them(
    source: str, texts: list[str], reference: PreTrainedTokenizerFast
) -> None:
    for messages in (
        [{"role": "user", "content": parts(*texts)}],
        [USER, ASSISTANT | {"content": parts(*texts)}, USER],
    ):
        assert_same(reference, source, messages)


@pytest.mark.parametrize("texts", [["one"], ["one", " two", ""], ["'", "</s>"]], ids=repr)
@pytest.mark.parametrize("source", TEXTS.values(), ids=TEXTS)
def test_parts_are_joined_by_newlines_for_a_template_that_expects_a_text(
    source: str, texts: list[str], reference: PreTrainedTokenizerFast
) -> None:
    """transformers would raise, or print the list as Python does."""
    joined = [USER, ASSISTANT, USER | {"content": "\n".join(texts)}]
    theirs = reference.apply_chat_template(joined, chat_template=source, tokenize=False, add_generation_prompt=True)
    given = [*joined[:2], USER | {"content": parts(*texts)}]
    assert ChatTemplate(source, SPECIAL).render(given) == theirs


@pytest.mark.parametrize(
    "source", ["{{ messages[0].content }}", "{{ messages[0].content | tojson }}", "{{ messages }}"]
)
def test_no_list_is_printed_as_one(source: str) -> None:
    prompt = ChatTemplate(source).render([{"role": "user", "content": parts("a'b", "c")}])
    assert "'type'" not in prompt and '"type"' not in prompt


def test_no_part_is_lost_where_a_template_takes_the_first() -> None:
    system = {"role": "system", "content": parts("first", "second")}
    prompt = ChatTemplate(TEMPLATES["gemma3"]).render([system, {"role": "user", "content": parts("third", "fourth")}])
    assert [word in prompt for word in ("first", "second", "third", "fourth")] == [True] * 4


def test_a_template_that_refuses_tells_why_whatever_the_content() -> None:
    with pytest.raises(RequestError, match="No system role here"):
        ChatTemplate(TEMPLATES["gemma2"]).render([{"role": "system", "content": parts("x")}, USER])


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ([], "no messages"),
        ({}, "the conversation is of type dict"),
        ("Hi", "the conversation is of type str"),
        (None, "the conversation is of type NoneType"),
        ([USER, "Hi"], r"messages\[1\] is of type str"),
        ([None], r"messages\[0\] is of type NoneType"),
        ([[USER]], r"messages\[0\] is of type list"),
        ([{"content": "x"}], r"messages\[0\]: role=None"),
        ([USER, {"role": 1, "content": "x"}], r"messages\[1\]: role=1"),
        ([{"role": "", "content": "x"}], r"messages\[0\]: role=''"),
        ([{"role": "end|><|system", "content": "x"}], r"messages\[0\]: role='end\|><\|system'"),
        ([{"role": "user"}], r"messages\[0\] has no content"),
        ([USER, {"role": "user", "content": None}], r"messages\[1\] has no content"),
        ([USER, {"role": "assistant", "content": None, "tool_calls": []}], r"messages\[1\] has no content"),
        ([{"role": "user", "content": None, "tool_calls": [1]}], r"messages\[0\] has no content"),
        ([{"role": "user", "content": 5}], r"messages\[0\]: content is of type int"),
        ([{"role": "user", "content": {"type": "text", "text": "x"}}], r"messages\[0\]: content is of type dict"),
        ([{"role": "user", "content": b"x"}], r"messages\[0\]: content is of type bytes"),
        ([USER, {"role": "user", "content": ["x"]}], r"messages\[1\].content\[0\] is of type str"),
        (
            [{"role": "user", "content": [*parts("x"), {"type": "image_url", "image_url": {}}]}],
            r"messages\[0\].content\[1\] is a part of type 'image_url': only parts of type 'text'",
        ),
        ([{"role": "user", "content": [{"text": "x"}]}], r"messages\[0\].content\[0\] is a part of type None"),
        ([{"role": "user", "content": [{"type": "text"}]}], r"messages\[0\].content\[0\]: text is of type NoneType"),
        ([USER | {"extra": {"when": [object()]}}], r"messages\[0\].extra.when\[0\] is of type object"),
    ],
)
def test_a_conversation_of_another_shape_is_refused_with_the_place(messages: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        ChatTemplate(TEMPLATES["glm"]).render(messages)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("spelled", ['{"city": "Zürich", "days": 3, "units": ["C", null]}', " {} ", ""])
def test_arguments_in_json_are_an_object_for_the_template(name: str, spelled: str) -> None:
    """Clients send them as they got them, and templates look into them; nothing stands for no arguments."""
    arguments = {"city": "Zürich", "days": 3, "units": ["C", None]} if "city" in spelled else {}
    written, whole = (
        [
            USER,
            CALL | {"content": "", "tool_calls": [{"type": "function", "function": FUNCTION | {"arguments": value}}]},
        ]
        for value in (spelled, arguments)
    )
    template = ChatTemplate(TEMPLATES[name], SPECIAL)
    assert template.render(written) == template.render(whole)
    assert written[1]["tool_calls"][0]["function"]["arguments"] == spelled  # the caller's own stays as it is


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ('{"city": ', r"messages\[1\].tool_calls\[0\].function.arguments is not valid JSON"),
        ("city", "arguments is not valid JSON"),
        ("[1]", "arguments is JSON, but no object"),
        ('"x"', "arguments is JSON, but no object"),
        ("[" * 100_000, "not valid JSON|nested too deeply"),
    ],
)
def test_arguments_that_are_no_object_are_refused(arguments: str, message: str) -> None:
    call = {"type": "function", "id": "c1", "function": FUNCTION | {"arguments": arguments}}
    with pytest.raises(RequestError, match=message):
        ChatTemplate("x").render([USER, CALL | {"tool_calls": [call]}])


def test_a_template_for_tools_is_taken_where_tools_are_given() -> None:
    """Even where the list is empty, as the reference does."""
    template = ChatTemplate("{{ bos_token }}plain", SPECIAL, "{{ bos_token }}{{ tools | length }} tools")
    assert [template.render([USER], tools=tools) for tools in (None, [], TOOLS)] == [
        "<s>plain",
        "<s>0 tools",
        "<s>2 tools",
    ]


def test_tools_and_variables_of_another_shape_are_refused() -> None:
    template = ChatTemplate(TEMPLATES["glm"])
    for tools, message in (
        ({}, "tools is of type dict"),
        ("x", "tools is of type str"),
        ([TOOLS[0], 1], r"tools\[1\] is of type int"),
    ):
        with pytest.raises(RequestError, match=message):
            template.render([USER], tools=tools)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match=r"variables.x is of type set"):
        template.render([USER], x={1})


def test_what_is_nested_without_end_is_refused() -> None:
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(RequestError, match="nested too deeply"):
        ChatTemplate("x").render([USER | {"extra": nested}])


def test_objects_are_seen_as_plain_values(reference: PreTrainedTokenizerFast) -> None:
    class Text(str):
        def secret(self) -> str:
            return "secret"

    message = {"role": "user", "content": Text("x"), "whole": type("Whole", (int,), {})(3), "half": 0.5, "both": (1, 2)}
    prompt = ChatTemplate("{{ messages[0].content.secret }}{{ messages | tojson }}").render([message])
    assert prompt == '[{"role": "user", "content": "x", "whole": 3, "half": 0.5, "both": [1, 2]}]'


# --- what a template can't do ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "messages", "message"),
    [
        ("gemma2", [SYSTEM, USER], "No system role here"),
        ("gemma2", [USER, USER], "Roles must alternate user/assistant"),
        ("llama2", [SYSTEM, USER, USER], "The roles must alternate: user, assistant, user, ..."),
        ("mistral", [{"role": "developer", "content": "x"}], r"Who is developer\?"),
        ("llama3", [USER, CALL | {"tool_calls": CALL["tool_calls"] * 2}], "One call at a time!"),
    ],
)
def test_a_template_refuses_messages_in_its_own_words(name: str, messages: list[Any], message: str) -> None:
    """Case K05."""
    with pytest.raises(RequestError, match=f"the chat template refuses these messages: {message}$"):
        ChatTemplate(TEMPLATES[name], SPECIAL).render(messages)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.__class__.__bases__[0].__subclasses__() }}",
        "{{ raise_exception.__globals__['json'] }}",
        "{{ strftime_now.__globals__.x }}",
        "{{ dict.__globals__.x }}",
        "{{ dict.update(messages[0], role='system') }}",
        "{{ namespace.__init__.__globals__.x }}",
        "{{ namespace(__class__=1) }}",
        "{% set ns = namespace() %}{% set ns.__html__ = 1 %}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ joiner.__init__.__globals__.x }}",
        "{{ range.__wrapped__.x }}",
        "{{ lipsum.__globals__['os'].popen('id') }}",
        "{{ self.__init__.__globals__.x }}",
        "{{ self._TemplateReference__context.environment }}",
        "{{ loop.__class__.x }}",
        "{% macro f() %}{% endmacro %}{{ f.__call__.__globals__.x }}",
        "{% macro f() %}{% endmacro %}{{ f._func.__globals__.x }}",
        "{% for m in messages %}{{ loop._iterator.gi_frame.f_back }}{{ loop._iterator.x.y }}{% endfor %}",
        "{{ (messages | map('upper')).gi_frame.f_globals }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ '{0.__class__.__mro__}' | attr('format') | attr('__self__') | attr('x') | list }}{{ x.y }}",
        "{{ ('{0.__class__}' | attr('format'))('').x.y }}",
        "{{ ''.format_map.__self__.x }}",
        "{{ messages | map(attribute='__class__.__mro__') | first | list | join(1.x) }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{{ messages[0].content + 1 }}",
        "{{ 'x'.encode().x }}",
        "{{ nothing.at_all }}",
        "{{ 1 / 0 }}",
        "{{ messages[7].content }}",
        "{{ undefined_function() }}",
        "{% for i in range(10 ** 10) %}{% endfor %}",
        "{{ [nothing] | tojson }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% include 'secret' %}",
        "{% import 'secret' as s %}",
        "{% extends 'secret' %}",
    ],
)
def test_a_template_that_reaches_too_far_or_fails_refuses_the_request(source: str) -> None:
    """It is the request's error, whatever the template does, and never a traceback."""
    with pytest.raises((RequestError, ModelError), match="the chat template"):
        ChatTemplate(source).render([USER])


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__",
        "messages | attr('__class__') | attr('__mro__')",
        "raise_exception.__code__",
        "raise_exception.__globals__",
        "messages['__class__']",
        "messages | map(attribute='__class__') | first",
        "messages[0] | attr('__init__')",
        "(messages | map('upper')).gi_frame",
        "self._TemplateReference__context",
        "cycler.__init__",
        "strftime_now.__builtins__",
        "namespace().__class__",
        "dict.__self__",
        "range.__globals__",
        "lipsum",
    ],
)
def test_nothing_of_python_shows_in_a_prompt(expression: str) -> None:
    assert ChatTemplate(f"{{{{ {expression} }}}}").render([USER]) == ""


def test_a_template_can_not_change_the_messages() -> None:
    messages, tools = [dict(USER)], [{"name": "x"}]
    ChatTemplate("{% set messages = [] %}{% set tools = 1 %}{{ messages }}").render(messages, tools=tools)
    assert (messages, tools) == ([USER], [{"name": "x"}])


@pytest.mark.parametrize(
    "source",
    ["{% if %}", "{{", "{% unknown %}", "{{ x | nofilter }}", "{% generation %}", "x" * (1 << 18), "{{" + "(" * 9999],
)
def test_a_template_that_is_not_valid_is_the_models_error(source: str) -> None:
    with pytest.raises(ModelError, match="the chat template"):
        ChatTemplate(source).render([USER])


# --- what a template may take of the machine ------------------------------------------------------------------------

MANY = "range(100000)"
ENDLESS = {
    "loops without output": "{% for i in RANGE %}{% for j in RANGE %}{% endfor %}{% endfor %}",
    "loops that do something": "{% for i in RANGE %}{% for j in RANGE %}{% set x = i %}{% endfor %}{% endfor %}",
    "a condition": "{% for i in RANGE %}{% for j in RANGE if false %}{% endfor %}{% endfor %}",
    "recursion": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a recursive loop": "{% for i in [60] recursive %}{{ loop([i - 1] * 2) if i }}{% endfor %}",
    "filters": "{% set r = RANGE | list %}{{ r | select('in', r) | list | length }}",
    "many filters": "{% set r = RANGE | list %}{{ [" + "r | sort | length, " * 2000 + "] }}",
    "calls": "{% macro f(n) %}{{ caller() if n else '' }}{% endmacro %}{% macro g(n) %}{% call f(n) %}{{ g(n - 1) }}"
    "{{ g(n - 1) }}{% endcall %}{% endmacro %}{{ g(40) }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_that_does_not_end_is_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.1)
    with pytest.raises(RequestError, match=r"longer than its time limit of 0.1 s"):
        ChatTemplate(source.replace("RANGE", MANY)).render([USER])


def test_the_time_limit_holds_on_any_thread_and_for_each_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 0.1)
    endless, found = ChatTemplate(ENDLESS["loops without output"].replace("RANGE", MANY)), []

    def render() -> None:
        for template in (endless, ChatTemplate("{{ messages[0].role }}")):
            try:
                found.append(template.render([USER]))
            except RequestError as error:
                found.append(str(error)[:35])

    threads = [threading.Thread(target=render) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(["the chat template takes longer than", "user"] * 2)


def test_a_template_that_waits_for_others_is_not_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine the clock runs on, the thread's own time does not."""
    monkeypatch.setattr(bounds, "SECONDS", 0.05)
    monkeypatch.setattr(bounds, "perf_counter", lambda: time.perf_counter() * 1000)
    assert ChatTemplate("{% for m in messages %}{{ m.role }}{% endfor %}").render([USER]) == "user"


DOUBLED = "{% set ns = namespace(x='x', l=[1]) %}{% for i in range(99) %}EXPRESSION{% endfor %}{{ ns.x }}{{ ns.l }}"


def doubled(name: str, expression: str) -> str:
    return DOUBLED.replace("EXPRESSION", f"{{% set ns.{name} = {expression} %}}")


LARGE = {
    "*": "{{ 'x' * 10 ** 10 }}",
    "* of a list": "{{ [1] * 10 ** 9 }}",
    "* from the left": "{{ 10 ** 10 * 'x' }}",
    "* of lists": "{{ [range(100000) | list] * 1000 }}",
    "**": "{{ 9 ** 99999 ** 9 }}",
    "** of products": "{% set n = 2 ** 8000 %}{{ (n * n * n) // n }}",
    "an int of digits": "{{ ('f' * 1000000) | int(0, 16) // 3 }}",
    "%": "{{ '%1000000000d' % 1 }}",
    "% with a precision": "{{ '%.1000000000f' % 1 }}",
    "% with a width elsewhere": "{{ '%*d' % (10 ** 9, 1) }}",
    "% with a name": "{{ '%(a)1000000000d' % {'a': 1} }}",
    "% of many": "{{ ('%(a)s' * 100000) % {'a': 'x' * 100000} }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:1000000000}'.format(1) }}",
    "format with a width elsewhere": "{{ '{:{}}'.format(1, '1000000000') }}",
    "format_map": "{{ '{a:1000000000}'.format_map({'a': 1}) }}",
    "format of many": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "+": doubled("x", "ns.x + ns.x"),
    "~": doubled("x", "ns.x ~ ns.x"),
    "% again": doubled("x", "'%s%s' % (ns.x, ns.x)"),
    "format again": doubled("x", "'{0}{0}'.format(ns.x)"),
    "join again": doubled("x", "[ns.x, ns.x] | join"),
    "replace": doubled("x", "ns.x.replace('x', 'xx')"),
    "the filter replace": doubled("x", "ns.x | replace('x', 'xx')"),
    "replace by name": doubled("x", "ns.x | replace(new='xx', old='x')"),
    "replace of nothing": doubled("x", "ns.x.replace('', 'x')"),
    "replace at once": "{{ ('x' * 1000000).replace('x', 'y' * 1000000) }}",
    "a block": "{% set x %}{% for i in range(99999) %}{{ 'x' * 999 }}{% endfor %}{% endset %}",
    "a macro": "{% macro f(n) %}{{ f(n - 1) ~ f(n - 1) if n else 'x' * 99999 }}{% endmacro %}{{ f(20) }}",
    "output": "{% for i in range(100000) %}{{ 'x' * 1000 }}{% endfor %}",
    "lists": doubled("l", "ns.l + ns.l"),
    "lists in lists": doubled("l", "[ns.l, ns.l]"),
    "tuples in tuples": doubled("l", "(ns.l, ns.l)"),
    "objects in objects": doubled("l", "{'a': ns.l, 'b': ns.l}"),
    "objects by name": doubled("l", "dict(a=ns.l, b=ns.l)"),
    "sums of lists": doubled("l", "[ns.l] | sum(start=ns.l)"),
    "arguments": "{% macro f() %}{{ varargs }}{% endmacro %}{% set x = 'x' * 9999999 %}{{ f(x, x, x) }}",
    "center": "{{ 'x'.center(10 ** 10) }}",
    "the filter center": "{{ 'x' | center(10 ** 10) }}",
    "a constant": "{{ 'x' | center(10000000000) }}",
    "ljust": "{{ 'x'.ljust(10 ** 10) }}",
    "zfill": "{{ 'x'.zfill(10 ** 10) }}",
    "expandtabs": "{{ '\t\t'.expandtabs(10 ** 10) }}",
    "indent": "{{ '\n' | indent(10 ** 9, true, true) }}",
    "translate": "{{ ('x' * 100000).translate({120: 'y' * 100000}) }}",
    "join": "{{ ('x' * 100000).join('y' * 100000) }}",
    "join of what comes": "{{ ''.join(range(1000) | map('center', 10 ** 7)) }}",
    "the filter join": "{{ ('x' * 100000) | join('y' * 100000) }}",
    "map": "{{ range(1000) | map('center', 10 ** 7) | list | length }}",
    "batch": "{{ [1] | batch(10 ** 10, 1) | list }}",
    "tojson": "{{ messages | tojson(indent=10 ** 9) }}",
    "tojson with separators": "{{ (range(1000) | list) | tojson(separators=(',' * 100000, ':')) }}",
    "split": "{{ ('x,' * 4000000).split(',') | length }}",
    "a date": "{{ strftime_now('%Y' * 1000000) }}",
}


@pytest.mark.parametrize("source", LARGE.values(), ids=LARGE)
def test_a_template_can_make_nothing_that_fills_the_memory(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "SECONDS", 600)
    monkeypatch.setattr(bounds, "LARGEST", 1 << 20)
    with pytest.raises(RequestError, match="size limit"):
        ChatTemplate(source).render([USER])


def test_a_namespace_does_not_print_what_it_holds() -> None:
    assert ChatTemplate(doubled("l", "namespace(a=ns.l, b=ns.l)")).render([USER]) == "x<Namespace>"


def test_a_long_conversation_is_not_too_much(reference: PreTrainedTokenizerFast) -> None:
    """Two million characters, and what templates do with them, of which each makes a little more."""
    text = "Some <text> with\tall {kinds} of %s signs.\n" * 50_000
    source = (
        "{% for m in messages %}{% set c = m.content | trim | replace('\n', '\\n') | replace('%', '') %}{{ '%s!' % c }}"
        "{{ '<{}>'.format(m.content.replace(' ', '  ')) }}{{ m.content | indent(2) }}"
        "{{ m.content.split('\n') | join(',') }}{{ m.content.ljust(80) ~ m.content | tojson }}{% endfor %}"
    )
    assert_same(reference, source, [{"role": "user", "content": text}])


def test_a_long_history_is_not_too_much(reference: PreTrainedTokenizerFast) -> None:
    kept = "{% for m in messages %}{% set ns.l = ns.l + [m] %}{% endfor %}{{ ns.l | tojson }}"
    for source in ("{% set ns = namespace(l=[]) %}" + kept, TEMPLATES["qwen3"], TEMPLATES["mistral"]):
        assert_same(reference, source, [USER, ASSISTANT] * 200)
