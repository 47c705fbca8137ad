"""What does a KV cache of codes cost, and what does it spare? Each precision beside a cache of activations.

    python experiments/kv_cache.py [--model REFERENCE] [--backend eager] [--kinds int8,fp8] [--threads 2]
        [--text FILE] [--quantization int8] [--rounds 9] [--skip quality speed]

Quality: the Kullback-Leibler divergence from the distribution with a cache of activations over the whole vocabulary, in
nats a token, mean and 99th percentile, and how often the likeliest token is the same. Text is what ships with the
package (or FILE), in windows of 512 tokens, of all positions; and in windows of 3,500, of the last 1,000. Each window
begins with an empty context and is computed in pieces of 256, which read what the ones before left in the cache.

Noise is that of `xinfer/tasks/noise.py`: half of what separates the differences of a row's likely tokens (those of at
least a thousandth) from each other, in standard deviations of the row, its 99th percentile.

Speed: ms of a prefill of 512 tokens, and of a token of decode behind 64, 1,000 and 4,000: the kinds take turns, and the
best of all counts, for others may use the machine. Memory: bytes a token of the cache.
"""

import argparse
import json
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path

import torch
from torch import Tensor

from xinfer import Limits, hardware
from xinfer.backends import BackendContext
from xinfer.composing import default_model
from xinfer.engine.runner import ModelRunner
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme
from xinfer.models.quantize.text import sample_text
from xinfer.models.sources import resolve
from xinfer.plugins import load_plugins
from xinfer.testing.stepper import Stepper

PIECE, LONGEST = 256, 4096
WINDOWS = {512: (8, 512), 3500: (3, 1000)}  # tokens of a window: how many, and of how many last positions of each
CONTEXTS, STEPS = (64, 1000, 4000), 8


def make(options: argparse.Namespace, kind: str | None) -> ModelRunner:
    plugins, path = load_plugins(), resolve(options.model)
    backend, scheme = plugins.backend(options.backend), None
    if options.quantization is not None:
        scheme = Scheme(int(options.quantization.removeprefix("int")))
    families = plugins.families.values()
    model = Model(options.model, lambda: path, families, dtype=options.dtype, quantization=scheme)
    config = backend.config(device="cpu", threads=options.threads, kv_dtype=kind)
    limits = Limits(max_model_len=LONGEST, max_num_seqs=1, max_num_batched_tokens=PIECE, max_logits_rows=PIECE)
    return backend.create(BackendContext(model, config, limits))


def logits_of(runner: ModelRunner, window: list[int], last: int) -> Tensor:
    """Return log-probabilities [last, vocabulary] of a window's last positions."""
    stepper = Stepper(runner)
    sequence = stepper.start(window)
    pieces = [min(PIECE, len(window) - first) for first in range(0, len(window), PIECE)]
    found: list[Tensor] = []
    for left, piece in zip([*range(len(window), 0, -PIECE)], pieces, strict=True):
        rows = stepper.step([sequence], [piece])[0]
        if left - piece < last:
            found.append(rows.float())
    return torch.log_softmax(torch.cat(found)[-last:], -1)


def noise(theirs: Tensor, ours: Tensor) -> Tensor:
    """Return [T] of log-probabilities [T, vocabulary]; what is the same for a whole row does not count."""
    off, likely = ours - theirs, theirs.exp() >= 1e-3
    least, most = off.masked_fill(~likely, torch.inf).amin(-1), off.masked_fill(~likely, -torch.inf).amax(-1)
    return (most - least) / 2 / theirs.std(-1)


def quality(runners: dict[str, ModelRunner], ids: list[int]) -> Iterator[str]:
    reference, *others = runners
    for length, (count, last) in WINDOWS.items():
        windows = [ids[first : first + length] for first in range(0, count * length, length)]
        assert all(len(window) == length for window in windows), f"the text has only {len(ids)} tokens"
        divergences: dict[str, list[Tensor]] = {kind: [] for kind in others}
        noises: dict[str, list[Tensor]] = {kind: [] for kind in others}
        same = dict.fromkeys(others, 0)
        for window in windows:
            theirs = logits_of(runners[reference], window, last)
            for kind in others:
                ours = logits_of(runners[kind], window, last)
                noises[kind].append(noise(theirs, ours))
                divergences[kind].append((theirs.exp() * (theirs - ours)).sum(-1))
                same[kind] += int((theirs.argmax(-1) == ours.argmax(-1)).sum())
        for kind in others:
            each = torch.cat(divergences[kind])
            share, noisy = same[kind] / len(each), torch.cat(noises[kind]).quantile(0.99)
            yield (
                f"| {kind} | {length - last + 1} to {length} | {len(each)} | {each.mean():.5f} | "
                f"{each.quantile(0.99):.4f} | {share:.2%} | {noisy:.3f} |"
            )


def decode_ms(runner: ModelRunner, ids: list[int], context: int, rounds: int) -> Iterator[float]:
    """Yield ms of the best of `STEPS` tokens behind so many."""
    stepper = Stepper(runner, blocks=range(runner.info.num_blocks))
    sequence = stepper.start(ids[:context])
    for first in range(0, context, PIECE):
        stepper.step([sequence], [min(PIECE, context - first)])
    for _ in range(rounds):
        taken = []
        for token in ids[:STEPS]:
            sequence.token_ids.append(token)
            started = time.perf_counter()
            stepper.step([sequence], [1])
            taken.append(time.perf_counter() - started)
        yield min(taken) * 1e3
        del sequence.token_ids[context:]
        sequence.num_computed = context


def prefill_ms(runner: ModelRunner, ids: list[int], rounds: int) -> Iterator[float]:
    """Yield ms of 512 tokens."""
    stepper = Stepper(runner)
    for _ in range(rounds):
        sequence = stepper.start(ids[:512])
        started = time.perf_counter()
        for _ in range(0, 512, PIECE):
            stepper.step([sequence], [PIECE])
        yield (time.perf_counter() - started) * 1e3
        stepper.finish(sequence)


def speed(runners: dict[str, ModelRunner], ids: list[int], rounds: int) -> Iterator[str]:
    for name in ("prefill of 512", *CONTEXTS):
        if isinstance(name, int):
            turns = {kind: decode_ms(runner, ids, name, rounds) for kind, runner in runners.items()}
        else:
            turns = {kind: prefill_ms(runner, ids, rounds) for kind, runner in runners.items()}
        best = [min(each) for each in zip(*zip(*turns.values(), strict=True), strict=True)]
        yield f"| {name} | {' | '.join(f'{each:.2f}' for each in best)} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--kinds", default="int8,fp8")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--quantization")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--text", type=Path)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--skip", nargs="+", default=[], choices=["quality", "speed"])
    options = parser.parse_args()
    runners = {kind or options.dtype: make(options, kind) for kind in (None, *options.kinds.split(","))}
    text = sample_text() if options.text is None else options.text.read_text("utf-8")
    plugins = load_plugins()
    path = resolve(options.model)
    ids = Model(options.model, lambda: path, plugins.families.values()).tokenizer.encode(text)
    bytes_of = {kind: runner.info.kv_token_bytes for kind, runner in runners.items()}
    print(f"{hardware.describe().cpu}, torch {torch.__version__}, backend={options.backend}, {date.today()}")
    print(f"{options.model}, {len(ids)} tokens of text; bytes a token of the cache: {json.dumps(bytes_of)}\n")
    if "quality" not in options.skip:
        print("| kv_dtype | tokens of context | positions | KL mean | KL 99 % | same token | noise |\n|" + " --- |" * 7)
        for line in quality(runners, ids):
            print(line, flush=True)
        print()
    if "speed" not in options.skip:
        print(f"| ms | {' | '.join(runners)} |\n|{' --- |' * (1 + len(runners))}")
        for line in speed(runners, ids, options.rounds):
            print(line, flush=True)


if __name__ == "__main__":
    main()
