"""Text to token ids and back, and conversations to prompts."""

__all__ = ["ChatTemplate", "Message", "Tokenizer"]

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import tokenizers

from xinfer.errors import ModelError, RequestError

Message = Mapping[str, str]

_MAX_TEMPLATE = 1 << 20  # characters; the longest in use have some 20,000


@dataclass(frozen=True)
class ChatTemplate:
    """A checkpoint's Jinja template, rendered as the `transformers` library does, in a sandbox.

    Attributes:
        source: the template.
        special: texts of the special tokens that it may name (`bos_token`, `eos_token`, ...).
    """

    source: str
    special: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def _compiled(self) -> jinja2.Template:
        if len(self.source) > _MAX_TEMPLATE:
            raise ModelError(f"the chat template has {len(self.source)} characters; at most {_MAX_TEMPLATE} are taken")
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _raise, "strftime_now": lambda f: datetime.now().strftime(f)}
        try:
            return environment.from_string(self.source)
        except Exception as error:  # jinja's own, or what Python says of the code that jinja makes of it
            raise ModelError(f"the chat template is not valid: {error}") from error

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> str:
        """Return the prompt for a conversation; a message that the template refuses is a `RequestError`."""
        template, given = self._compiled, {"tools": None, "documents": None, **self.special}
        try:
            return template.render(messages=list(messages), add_generation_prompt=add_generation_prompt, **given)
        except Exception as error:  # a template is a program, which can raise anything
            raise RequestError(f"the chat template refuses these messages: {error}") from error


class _Generation(jinja2.ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only has to be let through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class Tokenizer:
    """A `tokenizers` object with what surrounds it.

    Args:
        backend: the tokenizer proper, special tokens added and post-processor set.
        chat_template: of an instruction-tuned model.
    """

    def __init__(self, backend: tokenizers.Tokenizer, chat_template: ChatTemplate | None = None) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.chat_template = backend, chat_template

    @property
    def vocab_size(self) -> int:
        """Ids that there are, added tokens counted."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text to be continued, with the beginning-of-sequence token where the model has one.

        A text that already begins with that token's own text gets another, as with the reference.
        """
        return self._encode(text, True)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation up to where the assistant speaks; the template writes all special tokens."""
        if self.chat_template is None:
            raise RequestError("the model has no chat template: use --no-chat to continue the text as it is")
        if not messages:
            raise RequestError("the conversation has no messages: give it at least one")
        return self._encode(self.chat_template.render(messages), False)

    def _encode(self, text: str, special: bool) -> list[int]:
        try:
            return list(self.backend.encode(text, add_special_tokens=special).ids)
        except (UnicodeEncodeError, TypeError) as error:
            raise RequestError(f"the text is not valid Unicode ({error})") from error

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these tokens, nothing cleaned up."""
        return self.backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    @cached_property
    def special_ids(self) -> dict[str, int]:
        """Special tokens, which `decode` leaves out, by their text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    @cached_property
    def content_hash(self) -> str:
        """Hash of everything that decides which ids a text has."""
        return hashlib.sha256(self.backend.to_str().encode()).hexdigest()

    @cached_property
    def template_hash(self) -> str | None:
        """Hash of the chat template."""
        return hashlib.sha256(self.chat_template.source.encode()).hexdigest() if self.chat_template else None
