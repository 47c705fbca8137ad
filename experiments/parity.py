"""Does each backend compute what transformers computes? Every family, every shape, checkpoints that transformers wrote.

    python experiments/parity.py [--backends eager,...] [--families llama,...] [--summary]

Tiny models with random weights (`xinfer.testing.shapes`), a prompt of 48 tokens in several pieces, then 32 tokens
decoded greedily from the cache; the reference computes all 80 positions at once. In the table: the largest absolute
difference of logits in float32, over all positions and the whole vocabulary; the first position at which the reference
would have taken another token; the standard deviation of its logits. `--summary` has one line a family. Ends with 1 if
a difference exceeds 1e-4 or a token is another.
"""

import argparse
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers

from xinfer import Limits, hardware
from xinfer.backends import BackendContext
from xinfer.models.model import Model
from xinfer.plugins import Plugins, load_plugins
from xinfer.testing.gguf import ARCHITECTURES
from xinfer.testing.reference import Parity, parity, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper, cut

PROMPT, STEPS, TOLERANCE = 48, 32, 1e-4


@dataclass(frozen=True)
class Row:
    """One backend's parity on one shape."""

    family: str
    shape: str
    backend: str
    found: Parity

    @property
    def good(self) -> bool:
        """Whether it is what was asked for."""
        return self.found.difference <= TOLERANCE and self.found.first_other_token is None


def compare(plugins: Plugins, family: str, name: str, backends: list[str]) -> Iterator[Row]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        reference = write_reference(path, shape(family, name), seed=1)
        limits = Limits(max_model_len=PROMPT + STEPS, max_num_seqs=2, max_num_batched_tokens=256, kv_memory=64e6)
        prompt = np.random.default_rng(0).integers(0, reference.config.vocab_size, PROMPT).tolist()
        for backend in map(plugins.backend, backends):
            model = Model(str(path), lambda: path, plugins.families.values(), dtype="float32")
            runner = backend.create(BackendContext(model, backend.config(), limits))
            chunks = cut(PROMPT, np.random.default_rng(1))
            yield Row(family, name, backend.name, parity(Stepper(runner), reference, prompt, STEPS, chunks))
            runner.close()


def summary(rows: list[Row]) -> Iterator[str]:
    backends = list(dict.fromkeys(row.backend for row in rows))
    heads = [f"{backend}: {figure}" for backend in backends for figure in ("largest difference", "first other token")]
    yield f"| family | GGUF | shapes | {' | '.join(heads)} |\n| --- | --- | --- |{' --- |' * len(heads)}"
    for family in dict.fromkeys(row.family for row in rows):
        own = [row for row in rows if row.family == family]
        architecture = ARCHITECTURES.get(family)
        name = "" if architecture is None else gguf.MODEL_ARCH_NAMES[architecture]
        cells = [name, ", ".join(dict.fromkeys(row.shape for row in own))]
        for backend in backends:
            found = [row.found for row in own if row.backend == backend]
            others = [each.first_other_token for each in found if each.first_other_token is not None]
            cells += [f"{max(each.difference for each in found):.1e}", str(min(others, default="none"))]
        yield f"| {family} | {' | '.join(cells)} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backends", default="eager")
    parser.add_argument("--families", default=",".join(SHAPES))
    parser.add_argument("--summary", action="store_true", help="one line a family")
    options = parser.parse_args()
    torch.set_num_threads(1)
    plugins, versions = load_plugins(), hardware.versions()
    machine = f"{hardware.describe().cpu}, torch {versions['torch']}"
    print(f"{machine}, transformers {transformers.__version__}, {date.today()}\n")
    if not options.summary:
        print("| family | shape | backend | largest difference | first other token | spread |")
        print("| --- | --- | --- | --- | --- | --- |")
    rows = []
    for family in options.families.split(","):
        for name in SHAPES[family]:
            for row in compare(plugins, family, name, options.backends.split(",")):
                rows.append(row)
                if not options.summary:
                    figures = (
                        f"{row.found.difference:.1e} | {row.found.first_other_token or 'none'} | {row.found.spread:.2f}"
                    )
                    print(f"| {family} | {name} | {row.backend} | {figures} |", flush=True)
    if options.summary:
        print("\n".join(summary(rows)))
    return 0 if all(row.good for row in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
