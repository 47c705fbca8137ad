"""Where a chat template runs: Jinja's sandbox, within bounds.

A template is a program from whoever made the checkpoint. Jinja's sandbox keeps Python's internals from it; here it
can't take the machine either.
"""

__all__ = ["Sandbox", "run"]

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, sandbox
from jinja2.exceptions import SecurityError
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from xinfer.errors import RequestError
from xinfer.models.text import bounds


class Sandbox(sandbox.ImmutableSandboxedEnvironment):
    """The environment that `transformers` gives to templates, with limits."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation])
        for name in ("urlize", "striptags", "wordwrap", "xmlattr"):  # for HTML, and slow for long texts
            del self.filters[name]
        del self.globals["lipsum"]
        self.globals |= {"raise_exception": _raise, "strftime_now": _now}
        # A function, since the class has methods that change objects.
        self.globals |= {"namespace": _Attributes, "dict": lambda *pairs, **items: dict(*pairs, **items)}
        self.filters["tojson"] = _to_json
        tables: list[dict[str, Any]] = [self.filters, self.tests]
        for table in tables:
            for name, function in list(table.items()):
                table[name] = bounds.guarded(name, function)
        self.filters |= {"~": bounds.concat, "[]": bounds.kept, "()": _ticked}  # names that no template can write

    concat = staticmethod(bounds.concat)  # what a template, a macro or a block printed

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Limited().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute what an operator makes, unless that is too large."""
        bounds.tick()
        if operator == "%" and isinstance(left, str):
            bounds.check_grown("format", left, [right])
        elif operator == "+":
            bounds.check_size(bounds.size(left, right))
        elif operator != "%" and isinstance(left, int) and isinstance(right, int):
            more = left.bit_length() * (right - 1) if operator == "**" else right.bit_length()
            bounds.check_bits(left.bit_length() + more)
        elif operator == "*":
            times, value = (left, right) if isinstance(left, int) else (right, left)
            bounds.check_size(bounds.size(value) * times if isinstance(times, int) else 0)
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, called: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call what a template calls, unless what goes in or comes out is too large."""
        bounds.tick()
        named = [value for name, value in kwargs.items() if name not in ("_loop_vars", "_block_vars")]  # Jinja's own
        bounds.check_size(bounds.size(*args, *named))
        name, owner = getattr(called, "__name__", None), getattr(called, "__self__", None)
        if isinstance(owner, str):
            args = tuple(map(bounds.listed, args)) if name == "join" else args
            first, *others = (*args, owner) if name == "join" else (owner, *args)
            bounds.check_grown(str(name), first, [*others, *named])
        return bounds.kept(super().call(context, called, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Return whether a template may use an attribute; it gets no bytes, which no prompt has."""
        return attr not in ("encode", "to_bytes") and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return what stands for a text's method `format`."""
        if super().wrap_str_format(value) is None:
            return None
        text: str = value.__self__

        def formatted(*args: Any, **kwargs: Any) -> str:
            bounds.check_size(len(text) + text.count("{") * bounds.size(*args, *kwargs.values()))
            if value.__name__ == "format_map":
                (kwargs,), args = args, ()
            return _Formatter(self).vformat(text, args, kwargs)

        return formatted


def run(template: jinja2.Template, given: Mapping[str, Any]) -> str:
    """Return what a `Sandbox`'s template makes of these variables; whatever it does wrong is a `RequestError`."""
    try:
        with bounds.clock():
            return template.render(given)
    except RequestError:
        raise
    except Exception as error:  # a template is a program, which can raise anything
        raise RequestError(f"the chat template refuses these messages: {error}") from error


@jinja2.pass_context  # so that Jinja does not compute it once and for all
def _ticked(context: Context, value: Any) -> Any:
    bounds.tick()
    return value


class _Limited(NodeTransformer):
    """Has a template look at the clock in loops and macros, and measure what `~` joins and the lists that it makes."""

    def visit_Macro(self, node: Any) -> Any:  # noqa: N802
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_filter(nodes.Const(None), "()"), lineno=node.lineno))
        return node

    def visit_For(self, node: Any) -> Any:  # noqa: N802
        node.test = node.test and _filter(node.test, "()")
        return self.visit_Macro(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(nodes.List(node.nodes, lineno=node.lineno), "~")

    def visit_List(self, node: nodes.Expr) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _filter(node, "[]") if getattr(node, "ctx", "load") == "load" else node

    visit_Tuple = visit_Dict = visit_List  # noqa: N815


def _filter(node: nodes.Expr, name: str) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


class _Formatter(sandbox.SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        bounds.check_widths(re.findall(r"\d+", format_spec))
        return str(super().format_field(value, format_spec))


class _Attributes(Namespace):
    """What `namespace` makes: an object whose attributes a template sets."""

    def __init__(self, /, *pairs: Any, **items: Any) -> None:
        super().__init__()
        for name, value in dict(*pairs, **items).items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace takes no name that begins with _ ({name!r:.80})")
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"  # not what is in it, which may be other ones, and without end


class _Generation(ext.Extension):
    """`{% generation %}` marks what the assistant said, for training; here it only has to be let through."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Callable[[], str]) -> str:
        return caller()


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    bounds.check_size(256 * len(layout))  # to which the C library may go
    return datetime.now().strftime(layout)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    bounds.check_widths([len(indent) if isinstance(indent, str) else indent or 0])
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return encoder.encode(value) if indent is None and separators is None else bounds.concat(encoder.iterencode(value))
