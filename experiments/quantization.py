"""What do rounded weights cost? Each scheme's distance from the same model in float32, and its bits, and llama.cpp's.

    python experiments/quantization.py [--model REFERENCE] [--backend eager] [--tokens 4096]
        [--schemes int4-32-asym-hqq,...] [--calibrate 4096] [--speed] [--llama PYTHON FILE.gguf ...]

Text is what ships with the package, in windows of 512 tokens, each from an empty context. Of all positions: the
Kullback-Leibler divergence from float32's distribution over the whole vocabulary, in nats a token, mean and 99th
percentile; how often the likeliest token is the same; the perplexity. Bits a weight are those of all that is stored,
scales (float32; half of that where a backend keeps float16), zero points and what stays float32 counted, a tied head
once.

A scheme is written KIND-BLOCK-asym|sym-METHOD; `-all` behind it rounds everything to the same bits, where usually
embedding, head and value projections have eight. Without `--schemes` it is all of them. A backend that rounds weights
itself gets the scheme; others get weights that were rounded and are float32 again (fake quantization), with the same
figures. `--calibrate` has `hqq` weigh errors by the mean squares of inputs on so many tokens of the text, those behind
the measured ones (eager only). `--llama` names a Python that has llama-cpp-python, and files of the same model.

The default model's file is quantized itself: Q4_1 in blocks of 32, the embedding Q8_0. "float32" is what that stands
for. Q4_1's zero points are no whole numbers, so four bits can't give its weights back; eight give back its embedding.
"""

import argparse
import itertools
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import gguf
import numpy as np
import torch
from torch import Tensor

from xinfer import Limits, hardware
from xinfer.backends import BackendContext
from xinfer.composing import default_model
from xinfer.engine.runner import ModelRunner
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme, quantize
from xinfer.models.quantize.text import sample_text
from xinfer.models.sources import resolve
from xinfer.models.spec import DecoderSpec
from xinfer.models.weights import Weights
from xinfer.plugins import Plugins, load_plugins
from xinfer.testing.stepper import Stepper

WINDOW, ROWS = 512, 256
LLAMA = """
import json, os, sys
out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what the library prints
import numpy as np
from llama_cpp import Llama
windows = json.load(sys.stdin)
longest = max(map(len, windows))
model = Llama(sys.argv[1], n_ctx=longest, n_batch=longest, logits_all=True, verbose=False)
for window in windows:
    model.reset()
    model.eval(window)
    out.write(np.ascontiguousarray(model.scores[: len(window)], np.float32).tobytes())
    out.flush()
"""
# What eager's modules compute of a llama's canonical tensors, for the inputs that they get.
MODULES = {"attn.qkv": ("attn.q", "attn.k", "attn.v"), "attn.o": ("attn.o",), "mlp.down": ("mlp.down",)}
MODULES["mlp.up"] = ("mlp.gate", "mlp.up")

Windows = list[list[int]]


class Rounded(Weights):
    """Weights that were rounded and are float32 again."""

    def __init__(self, weights: Weights, scheme: Scheme, importance: dict[str, Tensor]) -> None:
        vars(self).update(vars(weights))
        self._whole, self._scheme, self._importance = weights, scheme, importance

    def load(self, canonical: str) -> Tensor:
        """Return one tensor."""
        tensor = self._whole.load(canonical)
        scheme = self._scheme.of(canonical, tuple(tensor.shape))
        if scheme is None:
            return tensor
        packed = quantize(tensor.flatten(0, -2), scheme, canonical, None)
        return packed.dequantize().view(tensor.shape)


@dataclass
class Figures:
    """One scheme's distance from the reference."""

    divergences: list[Tensor] = field(default_factory=list)
    same: int = 0
    surprise: float = 0.0
    predicted: int = 0

    def add(self, window: list[int], reference: Tensor, logits: Tensor) -> None:
        """Compare log-probabilities [T, vocabulary] with logits."""
        found = torch.log_softmax(logits, -1)
        self.divergences.append((reference.exp() * (reference - found)).sum(-1))
        self.same += int((reference.argmax(-1) == found.argmax(-1)).sum())
        self.surprise -= float(found[:-1].gather(1, torch.tensor(window[1:])[:, None]).double().sum())
        self.predicted += len(window) - 1

    def __str__(self) -> str:
        all_of_them = torch.cat(self.divergences)
        share, perplexity = self.same / len(all_of_them), math.exp(self.surprise / self.predicted)
        return f"{all_of_them.mean():.5f} | {all_of_them.quantile(0.99):.4f} | {share:.2%} | {perplexity:.3f}"


def parse(word: str) -> Scheme:
    kind, block, zeros, method, *rest = word.split("-")
    wide = 4 if rest == ["all"] else 8
    return Scheme(int(kind.removeprefix("int")), int(block), zeros == "sym", method, wide)


def every_scheme() -> list[str]:
    words = itertools.product(("int8", "int4"), ("32", "64", "128"), ("sym", "asym"), ("rtn", "hqq"))
    return ["-".join(each) for each in words] + ["int4-32-sym-rtn-all", "int4-32-asym-hqq-all"]


def bits_a_weight(spec: DecoderSpec, scheme: Scheme) -> float:
    chosen = {name: scheme.of(name, shape) for name, shape in spec.tensors.items()}
    sizes = (4 * math.prod(s) if chosen[n] is None else chosen[n].nbytes(s) for n, s in spec.tensors.items())
    return 8 * sum(sizes) / spec.parameters


class Bench:
    """Makes runners of one model on one backend, and compares them with the first."""

    def __init__(self, plugins: Plugins, reference: str, backend: str) -> None:
        self.path, self.reference, self.plugins = resolve(reference), reference, plugins
        self.backend = plugins.backend(backend)
        self.importance: dict[str, Tensor] = {}
        self.limits = Limits(
            max_model_len=WINDOW, max_num_seqs=1, max_num_batched_tokens=ROWS, max_logits_rows=ROWS, kv_memory=256e6
        )

    def model(self, scheme: Scheme | None = None) -> Model:
        """Return the model, rounded if there is a scheme."""
        itself = getattr(self.backend, "quantizes", False)
        families = self.plugins.families.values()
        model = Model(
            self.reference, lambda: self.path, families, dtype="float32", quantization=scheme if itself else None
        )
        if scheme is not None and not itself:
            vars(model)["weights"] = Rounded(model.weights, scheme, self.importance)
        return model

    def runner(self, scheme: Scheme | None = None) -> ModelRunner:
        """Return a runner of it."""
        return self.backend.create(BackendContext(self.model(scheme), self.backend.config(), self.limits))

    def calibrate(self, windows: Windows) -> None:
        """Find the mean square of each input of each matrix, by looking at what eager's modules get."""
        runner, totals = self.runner(), {}

        def watch(name: str) -> Callable[..., None]:
            def hook(_: object, arguments: tuple[Tensor]) -> None:
                totals[name] = totals.get(name, 0) + arguments[0].double().square().sum(0)

            return hook

        for name, module in runner.model.named_modules():  # type: ignore[attr-defined]
            if ".".join(name.split(".")[2:]) in MODULES:
                module.register_forward_pre_hook(watch(name))
        for _ in logits_of(runner, windows):
            pass
        count = sum(map(len, windows))
        for name, total in totals.items():
            layer, part = name.rsplit(".", 2)[0], name.split(".", 2)[2]
            self.importance |= {f"{layer}.{own}.weight": (total / count).float() for own in MODULES[part]}


def logits_of(runner: ModelRunner, windows: Windows) -> Iterator[Tensor]:
    """Yield each window's logits [T, vocabulary]."""
    stepper = Stepper(runner)
    for window in windows:
        sequence = stepper.start(window)
        pieces = [min(ROWS, len(window) - first) for first in range(0, len(window), ROWS)]
        yield torch.cat([stepper.step([sequence], [count])[0].float().cpu() for count in pieces])
        stepper.finish(sequence)


def llama_logits(python: str, file: Path, windows: Windows, vocabulary: int) -> Iterator[Tensor]:
    """Yield the same of llama.cpp, which computes in a process of its own."""
    command = [python, "-c", LLAMA, str(file)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(json.dumps(windows).encode())
        other.stdin.close()
        for window in windows:
            stored = other.stdout.read(4 * len(window) * vocabulary)
            yield torch.from_numpy(np.frombuffer(stored, np.float32).reshape(len(window), vocabulary).copy())


def file_bits(file: Path) -> float:
    tensors = gguf.GGUFReader(file).tensors
    return 8 * sum(int(t.n_bytes) for t in tensors) / sum(int(t.n_elements) for t in tensors)


def speed(runner: ModelRunner, window: list[int], steps: int = 32) -> str:
    """Tokens a second of a prefill in pieces, and of a decode behind it."""
    stepper = Stepper(runner)
    sequence = stepper.start(window[: WINDOW - steps])
    started = time.perf_counter()
    for first in range(0, WINDOW - steps, ROWS):
        stepper.step([sequence], [min(ROWS, WINDOW - steps - first)])
    middle = time.perf_counter()
    for token in window[WINDOW - steps :]:
        sequence.token_ids.append(token)
        stepper.step([sequence], [1])
    end = time.perf_counter()
    stepper.finish(sequence)
    return f" | {(WINDOW - steps) / (middle - started):.0f} | {steps / (end - middle):.1f}"


def compared(windows: Windows, reference: list[Tensor], found: Iterable[Tensor]) -> Figures:
    figures = Figures()
    for window, expected, logits in zip(windows, reference, found, strict=True):
        figures.add(window, expected, logits)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=default_model())
    parser.add_argument("--backend", default="eager")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--schemes", default=",".join(every_scheme()))
    parser.add_argument("--calibrate", type=int, default=0)
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--llama", nargs="+", default=[])
    options = parser.parse_args()
    bench = Bench(load_plugins(), options.model, options.backend)
    model = bench.model()
    ids = model.tokenizer.encode(sample_text())
    count = options.tokens // WINDOW
    windows = [ids[first : first + WINDOW] for first in range(0, len(ids) - WINDOW + 1, WINDOW)]
    measured, others = windows[:count], windows[count : count + options.calibrate // WINDOW]
    versions = hardware.versions()
    print(f"{hardware.describe().cpu}, torch {versions['torch']}, backend {bench.backend.name}, {date.today()}")
    print(f"{options.model}: {WINDOW * len(measured)} tokens, calibrated on {WINDOW * len(others)} others\n")
    extra = ("prefill tok/s", "decode tok/s") if options.speed else ()
    heads = ("scheme", "bits a weight", "KL mean", "KL 99 %", "same token", "perplexity", *extra)
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
    if others:
        bench.calibrate(others)
    reference: list[Tensor] = []
    for word in ["float32", *filter(None, options.schemes.split(","))]:
        scheme = None if word == "float32" else parse(word)
        runner = bench.runner(scheme)
        if scheme is None:
            reference = [torch.log_softmax(logits, -1) for logits in logits_of(runner, measured)]
        figures = compared(measured, reference, reference if scheme is None else logits_of(runner, measured))
        bits = 32 if scheme is None else bits_a_weight(model.spec, scheme)
        rates = speed(runner, measured[0]) if options.speed else ""
        print(f"| {word} | {bits:.2f} | {figures}{rates} |", flush=True)
        runner.close()
    for file in map(Path, options.llama[1:]):
        found = llama_logits(options.llama[0], file, measured, model.spec.vocab_size)
        rates = " | - | -" if options.speed else ""
        print(
            f"| llama.cpp {file.stem} | {file_bits(file):.2f} | {compared(measured, reference, found)}{rates} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
