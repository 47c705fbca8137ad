"""How near to what memory allows does each backend and precision decode, beside other engines, in one picture?

    python experiments/speed_picture.py FILE.json [FILE.json ...] --out picture.png [picture.svg]

Draws and prints what `speed.py --save` kept, of one sitting or of several on the same machine with the same model and
work: rounds of one name are put together, quoted are medians over all of them, and ratios are medians of the rounds'
own, so that two engines which never took turns have none.

The memory floor is the least time that a token takes at batch 1, which is that of reading all weights once, at the
bandwidth that was measured; drawn is the most tokens per second that this leaves. Each configuration of xinfer's has
its own, by the bytes that its step reads; another engine is held to that of xinfer's smallest of the same precision.
Of several bandwidths the highest counts, for a disturbance only lowers it.
"""

import argparse
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from speed_sittings import KINDS, Row, Study, median, put_together, ratio, read, refuse

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

PEERS: dict[str, Any] = {"facecolor": "#dcdcdc", "edgecolor": "#808080", "linewidth": 0.7}
FLOOR = "#d55e00"
COLOURS = {"eager": "#56b4e9", "compile": "#0072b2", "onnx": "#009e73"}  # of Okabe and Ito, told apart by everybody
OTHERS = ("#cc79a7", "#e69f00", "#f0e442")
WIDTH, ROW, LINE, ABOVE = 12.0, 0.25, 0.137, 0.95  # inches: the picture, a row, a line below, what is above the panels


def title(study: Study) -> str:
    """Return what was measured, and in a second line where and when."""
    days = sorted({sitting.started[:10] for sitting in study.sittings})
    count = f"{len(study.rounds)} round" + "s" * (len(study.rounds) > 1)
    if len(study.sittings) > 1:
        count += f" in {len(study.sittings)} sittings"
    when = " to ".join(dict.fromkeys((days[0], days[-1])))
    where = f"{study.sittings[0].on}; memory is read at {study.read_bytes_s / 1e9:.1f} GB/s"
    what = f"{study.model or 'Other engines'}: tokens per second beside what memory allows"
    return f"{what}\n{where}; {when}, {count}"


def table(study: Study) -> str:
    """Return medians, and ratios of xinfer's configurations to the other engines of the same precision."""
    head = ["precision", "engine", "prefill tok/s", "decode tok/s", "memory allows", "reached", "batch tok/s", "rounds"]
    lines = [head, ["---"] * len(head)]
    ratios = [["ratio, median of rounds", "prefill", "decode", "batch"], ["---"] * 4]
    for precision, rows in study.groups().items():
        for row in rows:
            prefill, decode, batch = (median(study.rounds, row.name, kind) for kind in KINDS)
            floor, count = f"{row.floor:.1f}" if row.floor else "", len(study.rates(row, KINDS[0]))
            figures = [f"{prefill:.0f}", f"{decode:.1f}", floor, study.share(row), f"{batch:.0f}", str(count)]
            lines.append([precision, row.label, *figures])
        for ours in (row for row in rows if row.backend):
            for peer in (row for row in rows if not row.backend):
                found = [ratio(study.rounds, ours.name, peer.name, kind) for kind in KINDS]
                words = ["" if each is None else f"{each:.2f}" for each in found]
                ratios.append([f"{precision}: {ours.label} / {peer.label}", *words])
    tables = (lines, ratios) if len(ratios) > 2 else (lines,)
    return "\n\n".join("\n".join(f"| {' | '.join(words)} |" for words in each) for each in tables)


def footnotes(study: Study) -> str:
    """Return the commands, the versions of what computed here, and what a reader must know of the floors."""
    found: dict[str, None] = {}
    for sitting in study.sittings:
        known = [
            f"{name} {each}" for name, each in sitting.versions.items() if name.startswith(("torch", "onnxruntime"))
        ]
        if sitting.git:
            known.insert(0, f"xinfer {sitting.git['commit'][:7]}")
        found[", ".join(known)] = None
    notes = [f"$ {sitting.command}" for sitting in study.sittings]
    notes += [f"{'; '.join(found)}. Other engines have the floor of xinfer's smallest weights of the same precision."]
    return "\n".join(textwrap.fill(each, 200, subsequent_indent="  ") for each in dict.fromkeys(notes))


@dataclass(frozen=True)
class Places:
    """Where rows (middle and height) and heads of groups lie, from the top, in rows' heights; all panels share it."""

    rows: list[tuple[Row, float, float]]
    heads: dict[str, float]
    bottom: float


def places(study: Study) -> Places:
    rows: list[tuple[Row, float, float]] = []
    heads: dict[str, float] = {}
    bottom = 0.0
    for precision, group in study.groups().items():
        heads[precision] = bottom + 0.6
        bottom += 1.2
        for row in group:
            tall = 1.4 if "\n" in wrapped(row.label) else 1.0
            rows.append((row, bottom + tall / 2, tall))
            bottom += tall
    return Places(rows, heads, bottom)


def wrapped(text: str) -> str:
    return textwrap.fill(text, 34, break_long_words=False)


def heading(study: Study, precision: str) -> str:
    """Return a precision and its floor in words."""
    floors = sorted({row.floor for row in study.rows if row.floor and row.precision == precision})
    if not floors:
        return precision
    ends = (floors[0], floors[-1])
    rates = " to ".join(dict.fromkeys(f"{floor:.0f}" for floor in ends))
    sizes = " to ".join(dict.fromkeys(f"{study.read_bytes_s / floor / 1e6:.0f}" for floor in ends))
    return f"{precision}: memory allows {rates} tokens/s ({sizes} MB a token)"


def colours(rows: Sequence[Row]) -> dict[str, str]:
    """Return a colour for each backend that there is, in a fixed order."""
    backends = sorted({row.backend for row in rows if row.backend}, key=lambda name: [*COLOURS, name].index(name))
    others = iter(OTHERS * len(backends))
    return {name: COLOURS.get(name) or next(others) for name in backends}


def draw(study: Study, outs: Sequence[Path]) -> None:
    """Write the picture, in the format of each file's name."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure
        from matplotlib.layout_engine import ConstrainedLayoutEngine
    except ImportError:
        refuse("drawing needs matplotlib: pip install -e '.[dev]'")
    mpl.rcParams.update({"font.size": 9, "svg.hashsalt": "xinfer"})
    place, hues = places(study), colours(study.rows)
    foot = footnotes(study)
    below = 0.15 + LINE * len(foot.splitlines())
    height = ABOVE + ROW * place.bottom + 0.5 + below
    middle = ConstrainedLayoutEngine(rect=(0.005, below / height, 0.99, 1 - (ABOVE + below) / height))
    figure = Figure((WIDTH, height), layout=middle)
    what, where = title(study).splitlines()
    figure.text(0.012, 1 - 0.12 / height, what, va="top", fontsize=12, fontweight="bold")
    figure.text(0.012, 1 - 0.38 / height, where, va="top", fontsize=9.5)
    figure.text(0.012, 0.08 / height, foot, va="bottom", fontsize=7.5, color="#444444", linespacing=1.3)
    panels = figure.subplots(1, 3, sharey=True, width_ratios=[2.3, 1, 1])
    work = study.sittings[0].work
    names = {
        "decode_tok_s": "decode at batch 1, tokens/s, and share of the floor",
        "prefill_tok_s": f"prefill of {work['prefill'][1]}, tokens/s",
        "batch_tok_s": f"{work['batch'][0]} requests, tokens/s",
    }
    for axes, (kind, name) in zip(panels, names.items(), strict=True):
        panel(axes, study, kind, place, hues)
        axes.set_xlabel(name)
    panels[0].set_ylim(place.bottom + 0.2, 0)
    panels[0].set_yticks([y for _, y, _ in place.rows], [wrapped(row.label) for row, *_ in place.rows])
    for (row, *_), text in zip(place.rows, panels[0].get_yticklabels(), strict=True):
        text.set(fontweight="bold" if row.backend else "normal", fontsize=8.5, linespacing=1.0)
    for precision, y in place.heads.items():
        panels[0].text(0, y, f" {heading(study, precision)}", va="center", fontweight="bold")
    corner = (0.008, 1 - 0.57 / height)
    figure.legend(handles=legend(hues), loc="upper left", bbox_to_anchor=corner, ncols=8, frameon=False)
    for out in outs:
        figure.savefig(out, dpi=150, metadata={"Date": None} if out.suffix == ".svg" else None)


def legend(hues: dict[str, str]) -> "list[Artist]":
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    dots = Line2D([], [], color="black", linewidth=1, label="rounds, their median as bar")
    dots.set(marker="o", markersize=3.5, markerfacecolor="white", markeredgecolor="black")
    return [
        *(Patch(color=hue, label=f"xinfer {name}") for name, hue in hues.items()),
        Patch(label="other engines", **PEERS),
        Line2D([], [], color=FLOOR, linewidth=2, label="memory floor: weights read once a token"),
        dots,
    ]


def panel(axes: "Axes", study: Study, kind: str, place: Places, hues: dict[str, str]) -> None:
    """Draw one figure of all rows; of decoding also the floor and the share of it."""
    decode = kind == "decode_tok_s"
    drawn = [rate for row in study.rows for rate in study.rates(row, kind)]
    floors = [row.floor for row in study.rows if row.floor and decode]
    width = max([1.3 * max(drawn), *(1.06 * floor for floor in floors)])
    for row, y, tall in place.rows:
        rates = study.rates(row, kind)
        middle, right = median(study.rounds, row.name, kind), max(rates)
        look: dict[str, Any] = {"color": hues[row.backend]} if row.backend else PEERS
        axes.barh(y, middle, height=0.7, zorder=2, **look)
        axes.plot(
            sorted(rates), [y] * len(rates), "o-", color="black", linewidth=1, ms=3.5, mfc="white", mew=0.8, zorder=5
        )
        words = f"{middle:.0f}" if middle >= 100 or not decode else f"{middle:.1f}"
        if decode and row.floor:
            axes.vlines(row.floor, y - tall / 2, y + tall / 2, color=FLOOR, linewidth=2, zorder=3)
            words += f"  {study.share(row)}"
            if right < row.floor < right + 0.17 * width:  # the words would lie on the mark
                right = row.floor
        beside: dict[str, Any] = {"xytext": (5, 0), "textcoords": "offset points", "va": "center_baseline"}
        axes.annotate(words, (right, y), fontsize=8.5, zorder=6, **beside)
    for y in place.heads.values():
        axes.axhline(y - 0.6, color="#888888", linewidth=0.8)
    axes.set_xlim(0, width)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", color="#e4e4e4", linewidth=0.6, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE.json", help="what speed.py --save kept")
    parser.add_argument("--out", nargs="+", type=Path, default=[], metavar="PICTURE", help="a .png or .svg, or both")
    options = parser.parse_args()
    for out in options.out:
        if out.suffix not in (".png", ".svg"):
            refuse(f"--out {out}: only .png and .svg are drawn")
        if not out.parent.is_dir():
            refuse(f"--out {out}: there is no such folder")
    study = put_together(sitting for file in options.files for sitting in read(file))
    print(f"{title(study)}\n\n{table(study)}")
    if options.out:
        draw(study, options.out)


if __name__ == "__main__":
    main()
