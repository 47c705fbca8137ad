"""Text to token ids and back, and conversations to prompts."""

__all__ = ["ChatTemplate", "Message", "Tokenizer"]

import hashlib
import json
import re
import secrets
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any

import tokenizers
from tokenizers import pre_tokenizers

from xinfer.errors import RequestError
from xinfer.models.text.chat import ChatTemplate, Message
from xinfer.models.text.merging import MergeSplit

# Elements of HTML, for which Gemma has tokens.
_HTML = re.compile(r"</?(?:b|blockquote|caption|code|em|h[1-6]|i|s|strong|su[bp]|t(?:able|body|d|foot|h|head|r)|u)>")
_NOT_AS_TEXT = (
    "a message has the text of a control token, which this tokenizer makes that token of in any case: "
    "leave it out, or have it parsed (parse_special)"
)


class Tokenizer:
    """A `tokenizers` object with what surrounds it.

    Args:
        backend: the tokenizer proper, special tokens added and post-processor set.
        chat_template: of an instruction-tuned model.
        split: a pre-tokenizer that the library doesn't have, to run after those that are set.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        chat_template: ChatTemplate | None = None,
        split: MergeSplit | None = None,
    ) -> None:
        backend.no_truncation()
        backend.no_padding()
        self.backend, self.chat_template, self._split = backend, chat_template, split
        self._written = backend.to_str() if split else None  # the library can't write one with a pre-tokenizer of ours
        self._set_split(backend)

    def _set_split(self, backend: tokenizers.Tokenizer) -> None:
        if self._split:
            own = pre_tokenizers.PreTokenizer.custom(self._split)
            before = [backend.pre_tokenizer] if backend.pre_tokenizer else []
            backend.pre_tokenizer = pre_tokenizers.Sequence([*before, own])

    def _to_str(self) -> str:
        return self._written or self.backend.to_str()

    @cached_property
    def max_token_id(self) -> int:
        """The largest id that stands for a text, added tokens counted; -1 where there is none."""
        return max(self.backend.get_vocab(with_added_tokens=True).values(), default=-1)

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text to be continued, with the beginning-of-sequence token where the model has one.

        Texts of added tokens become those tokens, wherever they stand. A text that already begins with the
        beginning-of-sequence token's own gets another. Both as with the reference.
        """
        return self._encode(text, True)

    def encode_words(self, text: str) -> list[int]:
        """Return the ids that a text has inside another one: nothing is put before or after it."""
        for before in ("\n", "."):  # behind which no tokenizer puts the space that it begins a text with
            begun, ids = self._encode(before, False), self._encode(before + text, False)
            if ids[: len(begun)] == begun:  # no token reaches over the border
                return ids[len(begun) :]
        return self._encode(text, False)

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        parse_special: bool = False,
        **variables: Any,
    ) -> list[int]:
        """Return the ids of a conversation up to where the assistant speaks; for the arguments see `ChatTemplate`.

        The template writes all control tokens, none is added. What reads like one in a message, a tool or a variable
        stays text, unless `parse_special`; an assistant's messages are parsed, for they are what the model said.
        """
        template = self.chat_template
        if template is None:
            raise RequestError("the model has no chat template: use --no-chat to continue the text as it is")
        if parse_special or not self._control:
            ids = self._encode(template.render(messages, add_generation_prompt, tools, **variables), False)
        else:
            prompt, mark = template.render_marked(self._pattern, messages, add_generation_prompt, tools, **variables)
            ids = self._encode_marked(prompt, mark)
        if not ids:
            raise RequestError("the chat template makes an empty prompt of these messages: give them a text")
        return ids

    def _encode_marked(self, prompt: str, mark: str) -> list[int]:
        """Return the ids of a prompt in which a control token's text with `mark` after its first character is text."""
        own = [match for match in self._pattern.finditer(prompt) if not prompt.startswith(mark, match.end())]
        control = set(self._control.values()) - self._unknown
        written = [self._control[match.group()] for match in own]

        def as_written(ids: list[int]) -> bool:
            return [i for i in ids if i in control] == [i for i in written if i in control]

        ids = self._encode(prompt.replace(mark, ""), False)
        if as_written(ids):
            return ids
        # The template's own get names that are in no text, and a tokenizer that knows them by these names alone takes
        # all the rest as text: in one piece, so that no border shows where none is.
        renamed, names, originals = self._renamed
        pieces, end = [], 0
        for match in own:
            pieces += [prompt[end : match.start()], names[match.group()]]
            end = match.end()
        text = "".join([*pieces, prompt[end:]]).replace(mark, "")
        shielded = [originals.get(i, i) for i in _ids(renamed, text, False)]
        if as_written(shielded):
            return shielded
        if mark not in prompt:  # nobody's text, but a template that writes them in a way of its own
            return ids
        raise RequestError(_NOT_AS_TEXT)

    def _encode(self, text: str, special: bool) -> list[int]:
        return _ids(self.backend, text, special)

    @cached_property
    def _control(self) -> dict[str, int]:
        """Tokens that say who speaks, what is thought and the like, by their text."""
        added = self.backend.get_added_tokens_decoder().items()
        return {t.content: i for i, t in added if t.content.strip() and (t.special or _is_marker(t.content))}

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        return re.compile(_any_of(self._control))

    @cached_property
    def _unknown(self) -> set[int]:
        """What stands for a character that is in no token, where that is a token."""
        with suppress(Exception):  # a model without one raises what it likes
            return {token.id for token in self.backend.model.tokenize("\U0010ffff")}
        return set()

    @cached_property
    def _renamed(self) -> tuple[tokenizers.Tokenizer, dict[str, str], dict[int, int]]:
        """The tokenizer with its control tokens renamed, their names by their texts, and its ids' originals."""
        content = json.loads(self._to_str())
        names = {text: f"<|{secrets.token_hex(16)}|>" for text in self._control}
        for token in content["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        _rename(content["model"], names)
        renamed = tokenizers.Tokenizer.from_str(json.dumps(content))
        self._set_split(renamed)
        added = self.backend.get_added_tokens_decoder()
        ids = renamed.get_vocab(with_added_tokens=True)
        originals = {ids[names.get(t.content, t.content)]: i for i, t in added.items()}
        words = set(renamed.get_vocab(with_added_tokens=False).values())
        if any(new in words and new != old for new, old in originals.items()):  # in a vocabulary with holes
            raise RequestError(_NOT_AS_TEXT)
        return renamed, names, originals

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
        settings = self._split.settings() if self._split else ""
        return hashlib.sha256((self._to_str() + settings).encode()).hexdigest()

    @cached_property
    def template_hash(self) -> str | None:
        """Hash of the chat template, and of the one for tools where there is another."""
        if self.chat_template is None:
            return None
        return hashlib.sha256((self.chat_template.source + self.chat_template.tool_use).encode()).hexdigest()


def _ids(backend: tokenizers.Tokenizer, text: str, special: bool) -> list[int]:
    try:
        return list(backend.encode(text, add_special_tokens=special).ids)
    except (UnicodeEncodeError, TypeError) as error:
        raise RequestError(f"the text is not valid Unicode ({error})") from error
    except BaseException as error:  # the library's own: where its code panics, as for a text on which a pattern
        # takes too long, that is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise RequestError(f"this model's tokenizer fails on the text ({str(error)[:200]}): change the text") from error


def _rename(model: Mapping[str, Any], names: Mapping[str, str]) -> None:
    """Rename tokens that the vocabulary itself has, unless merges or the model's settings speak of them."""
    vocabulary, named = model["vocab"], {model.get("unk_token")}
    if isinstance(vocabulary, dict):
        parts = {part for merge in model.get("merges") or [] for part in (*merge, "".join(merge))}
        for text, name in names.items():
            if text in vocabulary and text not in parts and text not in named:
                vocabulary[name] = vocabulary.pop(text)


def _is_marker(text: str) -> bool:
    """Whether an added token that is not special is a marker, like `</think>`, and no word of texts."""
    within_signs = not text[:1].isalnum() and not text[-1:].isalnum() and any(map(str.isalpha, text))
    return within_signs and not _HTML.fullmatch(text)


def _any_of(texts: Iterable[str]) -> str:
    """Return a regular expression for any of these texts, the longest that fits: a tree, for there can be thousands."""
    rests: dict[str, list[str]] = {}
    for text in texts:
        rests.setdefault(text[:1], []).append(text[1:])
    ends = "" in rests
    branches = [re.escape(first) + _any_of(rest) for first, rest in rests.items() if first]
    return f"(?:{'|'.join([*branches, ''] if ends else branches)})" if branches else ""
