"""`python -m xinfer diff A B`: two backends or runs over the same tokens, the whole vocabulary at every place."""

__all__ = ["run"]

from dataclasses import asdict
from typing import Any

from rich.markup import escape

from xinfer.config import Config
from xinfer.errors import ConfigError
from xinfer.records import RunRecord
from xinfer.records.record import write_json
from xinfer.tasks import Job
from xinfer.tasks.console import Progress, console
from xinfer.tasks.diff_page import layer_name, write_diff_page
from xinfer.tasks.diff_rows import Layers, Measured, compared_layers, compared_texts
from xinfer.tasks.diff_sides import Side, Text, side_of, texts_for
from xinfer.tasks.recording import recording


def run(config: Config, job: Job) -> int:
    """Print on standard output in one line how far the sides are apart; 1 if a threshold is passed."""
    wanted = config.diff
    for name in ("max_kl", "min_top1", "max_difference"):
        value = getattr(wanted, name)
        if value is not None and not value >= 0:
            raise ConfigError(f"diff.{name}={value} is out of range: a number from zero is expected")
    a, b = side_of(wanted.a, wanted.a_overrides, job), side_of(wanted.b, wanted.b_overrides, job)
    record = RunRecord(job.folder if config.record.enabled else None, config.record.text, config.record.steps)
    with recording(record, job) as figures:
        with Progress("loading the models"):
            texts = texts_for((a, b), config, job)
        _check_vocabularies(a, b)
        with Progress("comparing", total=sum(len(text.token_ids) - text.first for text in texts)) as progress:
            found = Measured()
            for place in compared_texts(a, b, texts):
                found.places.append(place)
                progress.advance(1)
        found.layers = compared_layers(a, b, texts[0]) if wanted.layers else None
        figures |= found.figures()
        verdict, failures = _verdict(a, b, texts, found), _failures(config, figures)
        record.update(diff={"a": a.name, "b": b.name, "verdict": verdict, "failures": failures})
        if record.folder is not None:
            write_json(record.folder / "diff.json", _plain(a, b, texts, found, verdict, failures))
            write_diff_page(record.folder / "diff.html", (a, b), texts, found, verdict, failures)
    console().print(verdict, markup=False)
    for failure in failures:
        console().print(failure, markup=False)
    if record.folder is not None:
        console(stderr=True).print(f"report  {escape(str(record.folder / 'diff.html'))}")
    for side in (a, b):
        side.session.close()
    return 1 if failures else 0


def _check_vocabularies(a: Side, b: Side) -> None:
    hashes = [getattr(side.session.tokenizer, "content_hash", None) for side in (a, b)]
    if hashes[0] != hashes[1]:
        raise ConfigError(f"{a.name} and {b.name} have different tokenizers: their tokens can't be compared")


def _verdict(a: Side, b: Side, texts: list[Text], found: Measured) -> str:
    figures, parting, session = found.figures(), found.parting, a.session
    said = [
        f"{a.name} and {b.name}: divergence {figures['kl']:.3g} nats a token",
        f"the other way {figures['kl_reverse']:.3g}",
        f"likeliest token the same at {figures['top1']:.2%} of {figures['places']} places",
        f"logits at most {figures['largest_difference']:.3g} apart",
    ]
    if figures["perplexity_a"] is not None:
        said.append(f"perplexity {figures['perplexity_a']:.4g} and {figures['perplexity_b']:.4g}")
    if parting is None:
        said.append("the same token taken everywhere")
    else:
        one, other = (f"{session.token_text(token)} ({token})" for token in parting.chosen)
        said.append(f"first other token at {texts[parting.text].name}, {parting.at}: {one} and {other}")
    if (layers := found.layers) is not None:
        said.append(_of_layers(layers))
    return "; ".join(said)


def _of_layers(layers: Layers) -> str:
    if layers.differs is None:
        return f"no layer further apart than float32 rounds ({layers.apart[-1]:.2g} of its size at the end)"
    steepest = f"steepest at {layer_name(layers.steepest)}"
    if layers.wrong is None:
        begins = layer_name(layers.differs)
        return (
            f"layers differ from {begins} on, none by more than the precision rounds ({layers.rounding:g}), {steepest}"
        )
    off = layers.apart[layers.wrong]
    return (
        f"{layer_name(layers.wrong)} is the first that is off by more than the precision rounds ({off:.2g}), {steepest}"
    )


def _failures(config: Config, figures: dict[str, Any]) -> list[str]:
    """Return which thresholds are passed, in words."""
    wanted = config.diff
    checks = (
        ("max_kl", wanted.max_kl, max(figures["kl"], figures["kl_reverse"]), 1),
        ("max_difference", wanted.max_difference, figures["largest_difference"], 1),
        ("min_top1", wanted.min_top1, figures["top1"], -1),
    )
    return [
        f"fails: {value:.4g} is {'above' if sign > 0 else 'below'} diff.{name}={limit:g}"
        for name, limit, value, sign in checks
        if limit is not None and not sign * value <= sign * limit
    ]


def _plain(a: Side, b: Side, texts: list[Text], found: Measured, verdict: str, failures: list[str]) -> dict[str, Any]:
    return {
        "a": a.name,
        "b": b.name,
        "verdict": verdict,
        "failures": failures,
        "figures": found.figures(),
        "layers": None if found.layers is None else asdict(found.layers),
        "texts": [{"name": text.name, "tokens": len(text.token_ids), "first": text.first} for text in texts],
        "places": [asdict(place) for place in found.places],
    }
