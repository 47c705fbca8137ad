"""The page that `python -m xinfer inspect` prints, from what it found."""

__all__ = ["show"]

from collections.abc import Iterator
from typing import Any

import rich.box
import rich.table
from rich.markup import escape

from xinfer.hardware import gibibytes
from xinfer.tasks.console import console

_WIDE = 100  # columns at most: longer lines are hard to read


def show(found: dict[str, Any]) -> None:
    """Print the page on standard output, on a narrow terminal too."""
    page = console()
    where, floors = f"{found['dtype']} on {found['device']}", found["floors"]
    sections = [
        ("", _pairs(_model(found))),
        ("parts", _parts(found)),
        (f"memory  {where}", _pairs(_memory(found))),
        (f"least time  {where}", _floors(found)),
        ("", _pairs(_how(floors))),
        ("backends", _pairs(_backends(found))),
    ]
    width = min(page.width, _WIDE)
    for title, table in sections:
        if title:
            head, _, rest = title.partition("  ")
            page.print(f"[bold]{head}[/bold]  {escape(rest)}".rstrip())
        page.print(table, soft_wrap=False, width=width)
    for note in found["notes"]:
        page.print(f"note: {note}", markup=False, soft_wrap=False, width=width)


def _pairs(rows: Iterator[tuple[str, str]]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, text in rows:
        table.add_row(escape(name), escape(text))
    return table


def _model(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    yield "model", found["path"]
    yield "family", found["family"]
    active = found["active_parameters"]
    share = f", {_count(active)} of them for a token" if active != found["parameters"] else ""
    yield "parameters", f"{_count(found['parameters'])} ({found['parameters']:,}){share}"
    yield "decoder", found["outline"]
    for kind in found["layer_kinds"]:
        yield f"layers {kind['layers']}", f"{kind['count']} x attention: {kind['attention']}"
        yield "", f"mlp: {kind['mlp']}"
        yield "", f"norms: {kind['norms']}"
    yield "context", f"{found['max_model_len']:,} tokens"
    source = f" ({found['license_source']})" if found["license"] else ""
    yield "licence", f"{found['license'] or 'not stated'}{source}"


def _parts(found: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    sparse, stored = found["active_parameters"] != found["parameters"], found["stored_weight_bytes"] is not None
    headers = ["", "parameters", *(["for a token"] if sparse else []), found["dtype"]]
    for header in headers:
        table.add_column(header, justify="right" if header else "left")
    if stored:
        table.add_column("in the files", justify="right")
        table.add_column("as", overflow="fold")
    for part in found["parts"]:
        row = [part["name"], _count(part["parameters"])]
        row += [_count(part["active_parameters"])] if sparse else []
        row.append(gibibytes(part["weight_bytes"]))
        if stored:
            sizes: dict[str, int] = part["stored_bytes"]
            row += [gibibytes(sum(sizes.values())), ", ".join(sizes)]
        table.add_row(*map(escape, row))
    total = ["together", _count(found["parameters"]), *([_count(found["active_parameters"])] if sparse else [])]
    total.append(gibibytes(found["weight_bytes"]))
    if stored:
        unused = found["unused_bytes"]
        rest = f"and {gibibytes(unused)} that it does not need" if unused else ""
        total += [gibibytes(found["stored_weight_bytes"]), rest]
    table.add_section()
    table.add_row(*total)
    return table


def _memory(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    memory = found["memory"]
    sequences, length = memory["max_num_seqs"], memory["max_model_len"]
    twice = memory["weight_bytes"] > found["weight_bytes"]
    yield (
        "weights",
        f"{gibibytes(memory['weight_bytes'])}{', the embedding twice: a CPU lays out the head apart' * twice}",
    )
    each = f"{found['kv_bytes_per_token']:,} bytes a token x {length:,} (engine.max_model_len)"
    full = f"{each} x {sequences:,} (engine.max_num_seqs) sequences, all full"
    yield "KV cache", f"{gibibytes(memory['kv_cache_bytes'])}: {full}"
    yield "activations", f"about {gibibytes(memory['activation_bytes'])}"
    verdict = "fits" if memory["fits"] else "does not fit"
    yield "together", f"{gibibytes(memory['total_bytes'])}, {verdict}: {gibibytes(memory['free_bytes'])} are free"
    most, longest = memory["largest_max_num_seqs"], memory["largest_max_model_len"]
    if longest < 1:
        smaller = "a smaller precision (model.dtype=bfloat16) or " if found["dtype"] == "float32" else ""
        yield "would fit", f"not one token for each of {sequences:,} sequences: take {smaller}a smaller model"
    else:
        many = f"{most:,} sequences of {length:,} tokens, or " if most else ""
        yield "would fit", f"{many}{sequences:,} of {longest:,}"


def _floors(found: dict[str, Any]) -> rich.table.Table:
    table = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    for number, header in enumerate(("", "tokens cached", "needs", "ms", "tokens/s")):
        table.add_column(header, justify="right" if number else "left")
    for case in found["floors"]["decode"]:
        who = "one sequence" if case["num_seqs"] == 1 else f"{case['num_seqs']:,} sequences"
        times = f"{case['floor_ms']:,.1f}", f"{case['tok_s']:,.1f}"
        each = " each" if case["num_seqs"] > 1 else ""
        table.add_row(f"decode, {who}", f"{case['tokens']:,}{each}", gibibytes(case["read_bytes"]), *times)
    prefill = found["floors"]["prefill"]
    needs, least = f"{prefill['flop_per_token'] / 1e9:.3g} GFLOP", f"{prefill['floor_ms_per_token']:.3g}"
    table.add_row("prefill, one token", "", needs, least, f"{prefill['tok_s']:,.0f}")
    return table


def _how(floors: dict[str, Any]) -> Iterator[tuple[str, str]]:
    active = _count(floors["prefill"]["flop_per_token"] // 2)
    yield "decode", f"bytes that a step must read / {floors['read_bandwidth_bytes_s'] / 1e9:,.1f} GB/s read"
    products = f"{floors['flop_s'] / 1e9:,.0f} GFLOP/s in matrix products"
    yield "prefill", f"2 x {active} parameters of layers for a token, without attention's scores / {products}"
    yield "measured", f"{floors['measured']} (python -m xinfer device measures again)"


def _backends(found: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for name, said in found["backends"].items():
        yield name, f"can run it ({said['summary'] or 'no summary'})" if said["runs"] else f"can't: {said['reason']}"


def _count(number: int) -> str:
    """Return a number for people, with three digits or more."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
