"""What do rounded weights cost? Each scheme's distance from the same model in float32, its bits, and llama.cpp's.

    python experiments/quantization.py [--model REFERENCE] [--backend onnx] [--set accuracy_level=1 ...]
        [--schemes int4-32-asym-gptq,...] [--tokens 4096] [--speed] [--llama PYTHON FILE.gguf ...]

Text is what ships with the package, in windows of 512 tokens, each from an empty context; what calibrates takes the
tokens behind the measured ones. Of all positions: the Kullback-Leibler divergence from float32's distribution over the
whole vocabulary, in nats a token, mean and 99th percentile; how often the likeliest token is the same; the perplexity.
All of it as the backend computes, inputs rounded too where its kernels do that (`--set accuracy_level=1` has ONNX
Runtime keep them float32). Bits a weight are those of all that is stored, scales (float32), zero points and what stays
float32 counted, a tied head once.

A scheme is written KIND-BLOCK-asym|sym-METHOD; `-all` behind it rounds everything to the same bits, where usually
embedding, head and value projections have eight. Without `--schemes` it is all of them. `--llama` names a Python that
has llama-cpp-python, and files of the same model.

The default model's file is quantized itself: Q4_1 in blocks of 32, the embedding Q8_0. "float32" is what that stands
for. Q4_1's zero points are no whole numbers, so four bits can't give its weights back; eight give back its embedding.
"""

import argparse
import itertools
import json
import math
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path

import gguf
import numpy as np
import onnxruntime
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
from xinfer.models.spec import DecoderSpec
from xinfer.plugins import Plugins, load_plugins
from xinfer.testing.stepper import Stepper

WINDOW, ROWS = 512, 256
LLAMA = """
import json, os, sys
out = os.fdopen(os.dup(1), "wb")
os.dup2(2, 1)  # what the library prints
import numpy as np
import onnxruntime
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
Windows = list[list[int]]


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
    words = itertools.product(("int8", "int4"), ("32", "64", "128"), ("sym", "asym"), ("rtn", "hqq", "gptq"))
    return ["-".join(each) for each in words] + ["int4-32-sym-rtn-all", "int4-32-asym-gptq-all"]


def bits_a_weight(spec: DecoderSpec, scheme: Scheme) -> float:
    chosen = {name: scheme.of(name, shape) for name, shape in spec.tensors.items()}
    sizes = (4 * math.prod(s) if chosen[n] is None else chosen[n].nbytes(s) for n, s in spec.tensors.items())
    return 8 * sum(sizes) / spec.parameters


class Bench:
    """Makes runners of one model on one backend, whose configuration has these settings."""

    def __init__(self, plugins: Plugins, reference: str, backend: str, settings: dict[str, object]) -> None:
        self.path, self.reference, self.plugins = resolve(reference), reference, plugins
        self.backend, self.settings = plugins.backend(backend), settings
        self.limits = Limits(
            max_model_len=WINDOW, max_num_seqs=1, max_num_batched_tokens=ROWS, max_logits_rows=ROWS, kv_memory=256e6
        )

    def model(self, scheme: Scheme | None = None) -> Model:
        """Return the model, rounded if there is a scheme."""
        families = self.plugins.families.values()
        return Model(self.reference, lambda: self.path, families, dtype="float32", quantization=scheme)

    def runner(self, scheme: Scheme | None = None) -> ModelRunner:
        """Return a runner of it."""
        config = self.backend.config(**self.settings)
        return self.backend.create(BackendContext(self.model(scheme), config, self.limits))


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
    parser.add_argument("--backend", default="onnx")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="of the backend's configuration")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--schemes", default=",".join(every_scheme()))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--llama", nargs="+", default=[])
    options = parser.parse_args()
    settings = {key: json.loads(value) for key, value in (word.split("=", 1) for word in options.set)}
    bench = Bench(load_plugins(), options.model, options.backend, settings)
    model = bench.model()
    ids = model.tokenizer.encode(sample_text())
    count = options.tokens // WINDOW
    measured = [ids[first : first + WINDOW] for first in range(0, count * WINDOW, WINDOW)]
    said = " ".join([f"backend={bench.backend.name}", *(f"backend.{word}" for word in options.set)])
    print(f"{hardware.describe().cpu}, onnxruntime {onnxruntime.__version__}, {said}, {date.today()}")
    print(f"{options.model}: {WINDOW * len(measured)} tokens\n")
    extra = ("prefill tok/s", "decode tok/s") if options.speed else ()
    heads = ("scheme", "bits a weight", "KL mean", "KL 99 %", "same token", "perplexity", *extra)
    print(f"| {' | '.join(heads)} |\n|{' --- |' * len(heads)}")
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
