"""Conversations to prompts, by a checkpoint's own template."""

__all__ = ["ChatTemplate", "Message"]

import json
import re
import secrets
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import jinja2

from xinfer.errors import ModelError, RequestError
from xinfer.models.text.sandbox import Sandbox, run

Message = Mapping[str, Any]

_MAX_TEMPLATE = 1 << 17  # characters; the longest in use have some 20,000
_MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters, which Unicode leaves to programs' own use
_REASONING = ("reasoning_content", "thinking", "reasoning")


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's Jinja template, rendered as the `transformers` library does, in a sandbox.

    Attributes:
        source: the template.
        special: texts of the special tokens that it may name (`bos_token`, `eos_token`, ...).
        tool_use: the template for conversations with tools, where the checkpoint has one of its own.
    """

    source: str
    special: Mapping[str, str] = field(default_factory=dict)
    tool_use: str = ""

    @classmethod
    def of(cls, templates: Mapping[str, str], special: Mapping[str, str]) -> "ChatTemplate | None":
        """Return a checkpoint's templates by name as one: `default`, and `tool_use` where tools are given."""
        default, tool_use = templates.get("default"), templates.get("tool_use", "")
        return cls(default, special, tool_use) if default else None

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return _compiled(self.source)

    @cached_property
    def _compiled_for_tools(self) -> jinja2.Template:
        return _compiled(self.tool_use) if self.tool_use else self._compiled

    def render(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Return the prompt for a conversation.

        A message has a `role` and a `content`: a text or a list of parts `{"type": "text", "text": ...}`; that of an
        assistant may lack it where it has `tool_calls`. Parts are passed on to a template that shows the text of each,
        and joined by newlines for one that expects a text. `tools` are JSON schemas, `variables` what else a template
        asks for. What is not of that kind, what the template refuses, and what takes it too long or grows too large
        is a `RequestError`.
        """
        return self.render_marked(None, messages, add_generation_prompt, tools, **variables)[0]

    def render_marked(
        self,
        marked: re.Pattern[str] | None,
        /,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> tuple[str, str]:
        """Return the prompt, and a character that splits what was given wherever `marked` fits.

        It stands after the first character of what fits, where no template cuts it off. An assistant's messages are not
        searched: they are what the model said, and a control token in them is one.
        """
        compiled = self._compiled if tools is None else self._compiled_for_tools
        try:
            given = {**_plain(variables, "variables"), "messages": _messages(messages), "tools": _tools(tools)}
            mark = ""
            if marked is not None:
                text = repr(given)  # in which noncharacters are escaped
                mark = next((m for m in _MARKS if f"\\u{ord(m):x}" not in text), _MARKS[0])
                given = _with_marks(given, marked, mark)
        except RecursionError:
            raise RequestError("the messages are nested too deeply: flatten them") from None
        given = {"documents": None, **self.special, **given, "add_generation_prompt": add_generation_prompt}
        prompt = run(compiled, given | {"messages": _settled(compiled, given)})
        return prompt.replace(f"\\u{ord(mark):x}", mark) if mark else prompt, mark  # JSON may have escaped it


def _compiled(source: str) -> jinja2.Template:
    if len(source) > _MAX_TEMPLATE:
        raise ModelError(f"the chat template has {len(source)} characters; at most {_MAX_TEMPLATE} are taken")
    try:
        return Sandbox().from_string(source)
    except Exception as error:  # jinja's own, or what Python says of the code that jinja makes of it
        raise ModelError(f"the chat template is not valid: {error}") from error


# --- what is given --------------------------------------------------------------------------------------------------


def _messages(messages: Any) -> list[dict[str, Any]]:
    if not isinstance(messages, list | tuple):
        raise RequestError(f"the conversation is of type {type(messages).__name__}: a list of messages is expected")
    if not messages:
        raise RequestError("the conversation has no messages: give it at least one")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is of type {type(message).__name__}: an object with role and content is expected")
    role, content = message.get("role"), message.get("content")
    # Some templates write a marker around the role; one with a marker's signs could end it and begin another.
    if not isinstance(role, str) or not role or not {*"<>|[]"}.isdisjoint(role):
        raise RequestError(f"{where}: role={role!r:.80} is none: a word like 'user' is expected")
    if isinstance(content, list | tuple):
        for i, part in enumerate(content):
            _check_part(part, f"{where}.content[{i}]")
    elif content is None and not (role == "assistant" and message.get("tool_calls")):
        raise RequestError(f"{where} has no content: only an assistant's message with tool_calls can be without")
    elif not isinstance(content, str | None):
        raise RequestError(
            f"{where}: content is of type {type(content).__name__}: a text or a list of parts is expected"
        )
    # As in the reference: what is null is left out, and a reasoning is there under each name that templates read.
    plain = {name: value for name, value in _plain(message, where).items() if value is not None}
    if isinstance(plain.get("tool_calls"), list):
        plain["tool_calls"] = [
            _tool_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(plain["tool_calls"])
        ]
    names = [name for name in _REASONING if name in plain]
    return {"thinking": plain[names[0]], **plain, "reasoning_content": plain[names[0]]} if names else plain


def _tool_call(call: Any, where: str) -> Any:
    """Return a call whose arguments are an object: clients send them as JSON, and templates look into them."""
    if not isinstance(call, dict):
        return call
    if isinstance(call.get("function"), dict):
        return call | {"function": _tool_call(call["function"], f"{where}.function")}
    arguments = call.get("arguments")
    if not isinstance(arguments, str):
        return call
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except ValueError as error:
        raise RequestError(f"{where}.arguments is not valid JSON ({error}): {arguments!r:.80}") from error
    if not isinstance(parsed, dict):
        raise RequestError(f"{where}.arguments is JSON, but no object: {arguments!r:.80}")
    return call | {"arguments": parsed}


def _check_part(part: Any, where: str) -> None:
    if not isinstance(part, Mapping):
        raise RequestError(f"{where} is of type {type(part).__name__}: an object with type and text is expected")
    if part.get("type") != "text":
        raise RequestError(
            f"{where} is a part of type {part.get('type')!r:.80}: only parts of type 'text' can be given"
        )
    if not isinstance(part.get("text"), str):
        raise RequestError(f"{where}: text is of type {type(part.get('text')).__name__}: a string is expected")


def _tools(tools: Any) -> list[Any] | None:
    if tools is None:
        return None
    if not isinstance(tools, list | tuple):
        raise RequestError(f"tools is of type {type(tools).__name__}: a list of JSON schemas is expected")
    for i, tool in enumerate(tools):
        if not isinstance(tool, Mapping):
            raise RequestError(f"tools[{i}] is of type {type(tool).__name__}: a JSON schema is expected")
    return [_plain(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _plain(value: Any, where: str) -> Any:
    """Return a copy in JSON's own types: an object's methods could do anything, and the caller's stays as it is."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner, f"{where}.{name}") for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner, f"{where}[{i}]") for i, inner in enumerate(value)]
    if isinstance(value, str):  # of a subclass, as below
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    raise RequestError(f"{where} is of type {type(value).__name__}: texts, numbers, lists and objects can be given")


def _settled(compiled: jinja2.Template, given: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the messages with parts left as they are where the template shows each one's text, else joined."""
    messages: list[dict[str, Any]] = given["messages"]
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages
    joined, probe, words = [], [], []
    for message in messages:
        parts = message.get("content")
        if isinstance(parts, list):
            texts = [part["text"] for part in parts]
            words += (new := [secrets.token_hex(8) for _ in parts])
            probe.append(message | {"content": [p | {"text": w} for p, w in zip(parts, new, strict=True)]})
            joined.append(message | {"content": "\n".join(texts)})
        else:
            probe.append(message)
            joined.append(message)
    try:
        shown = run(compiled, given | {"messages": probe})
    except RequestError:  # a text was expected, or the reason is another, which rendering the joined ones tells
        return joined
    # A quote before a word says that the list was printed as a list.
    return messages if all(re.search(f"(?<!['\"]){word}", shown) for word in words) else joined


def _with_marks(given: dict[str, Any], pattern: re.Pattern[str], mark: str) -> dict[str, Any]:
    """Return what is given with `mark` inside each match, an assistant's messages left as they are."""

    def in_texts(texts: list[str]) -> list[str]:
        """Search several texts as one, which a template may make of them."""
        whole, splits, ends = "".join(texts), list[int](), list(accumulate(map(len, texts), initial=0))
        while match := pattern.search(whole, splits[-1] if splits else 0):  # also where one begins inside another
            splits.append(match.start() + 1)
        cuts = [[a, *splits[bisect_right(splits, a) : bisect_right(splits, b)], b] for a, b in pairwise(ends)]
        return [mark.join(whole[a:b] for a, b in pairwise(cut)) for cut in cuts]

    def anywhere(value: Any) -> Any:
        if isinstance(value, str):
            return in_texts([value])[0]
        if isinstance(value, dict):
            return {n if n.isidentifier() else in_texts([n])[0]: anywhere(inner) for n, inner in value.items()}
        return [anywhere(inner) for inner in value] if isinstance(value, list) else value

    def in_message(message: dict[str, Any]) -> Any:
        parts = message.get("content")
        if message["role"] == "assistant":
            return message
        found = anywhere(message) | {"role": message["role"]}
        if isinstance(parts, list):
            texts = in_texts([part["text"] for part in parts])
            found["content"] = [p | {"text": text} for p, text in zip(found["content"], texts, strict=True)]
        return found

    others = {name: anywhere(value) for name, value in given.items() if name != "messages"}
    return others | {"messages": [in_message(message) for message in given["messages"]]}
