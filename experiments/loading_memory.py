"""How much memory does loading take, and how long? `python experiments/loading_memory.py [--runs 3]`

Loads synthetic checkpoints of about 1 GB, each in a process of its own, and compares the most that was resident while
it loaded, less what was before, with the parameters that stay. `+ layer` allows for one layer on top, which the bound
of 1.15 does. Quoted is the worst of the peaks and the median of the times, with the file in the page cache.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from xinfer.testing.hollow import hollow_folder, hollow_gguf
from xinfer.testing.tiny import tiny_config

MEASURE = """
import json, re, sys, time
from pathlib import Path

from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.engine.types import Limits
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model

def memory(field):
    return int(re.search(rf"{field}:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

before = memory("VmRSS")
path = Path(sys.argv[1])
model = Model(str(path), lambda: path, xinfer_model_families(), dtype=sys.argv[2])
started = time.perf_counter()
runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), Limits()))
took = time.perf_counter() - started
layer = sum(p.numel() * p.element_size() for p in runner.model.layers[0].parameters())
print(json.dumps({"peak": memory("VmHWM") - before, "resident": runner.info.resident_weight_bytes,
                  "after": memory("VmRSS") - before, "layer": layer, "seconds": took}))
"""


def measure(path: Path, dtype: str) -> dict[str, float]:
    """Load a model in a process of its own and return bytes and seconds."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(path), dtype], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    return json.loads(done.stdout)


def config(layers: int, tied: bool = False) -> dict:
    """Return a llama of 33 million parameters and 16 more for each layer."""
    return tiny_config(
        "llama", vocab_size=32_000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=layers,
        num_attention_heads=16, num_key_value_heads=8, tie_word_embeddings=tied
    )  # fmt: skip


def cases() -> dict[str, tuple[Callable[[Path], Path], str]]:
    return {
        "float32 file": (lambda p: hollow_folder(p, config(13)), "float32"),
        "float32 file, 4 shards": (lambda p: hollow_folder(p, config(13), shards=4), "float32"),
        "float32 file, tied": (lambda p: hollow_folder(p, config(13, tied=True)), "float32"),
        "bfloat16 file in float32": (lambda p: hollow_folder(p, config(28), "BF16"), "float32"),
        "bfloat16 file in float32, tied, 4 shards": (
            lambda p: hollow_folder(p, config(28, True), "BF16", 4),
            "float32",
        ),
        "bfloat16 file": (lambda p: hollow_folder(p, config(28), "BF16"), "bfloat16"),
        "bfloat16 file, tied, 4 shards": (lambda p: hollow_folder(p, config(28, True), "BF16", 4), "bfloat16"),
        "float32 file in bfloat16": (lambda p: hollow_folder(p, config(13)), "bfloat16"),
        "GGUF F16 in float32": (lambda p: hollow_gguf(p, config(13), "F16"), "float32"),
        "GGUF Q8_0 in float32": (lambda p: hollow_gguf(p, config(13), "Q8_0"), "float32"),
        "GGUF Q4_1 in bfloat16": (lambda p: hollow_gguf(p, config(13), "Q4_1"), "bfloat16"),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    options = parser.parse_args()
    print("| case | resident MB | peak MB | peak / resident | (peak - layer) / resident | after MB | s |")
    print("| --- " * 7 + "|")
    for name, (write, dtype) in cases().items():
        with tempfile.TemporaryDirectory() as folder:
            path = write(Path(folder) / "model.gguf")
            measure(path, dtype)
            rows = [measure(path, dtype) for _ in range(options.runs)]
        peak, resident, layer = max(row["peak"] for row in rows), rows[0]["resident"], rows[0]["layer"]
        after, took = max(row["after"] for row in rows), statistics.median(row["seconds"] for row in rows)
        print(
            f"| {name} | {resident / 1e6:.0f} | {peak / 1e6:.0f} | {peak / resident:.2f} | "
            f"{(peak - layer) / resident:.2f} | {after / 1e6:.0f} | {took:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
