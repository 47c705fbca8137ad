"""What backend=compile and streaming reach on a device, with random weights alone: `experiments/gpu_check.sh` runs it.

Each part can be asked for by itself (`--parts serve,decode`), the most important come first by default, and what is
known is written after each, so that a run that is stopped keeps what it had.

- parity: a llama of SmolLM2's shape computes a prompt and 32 greedy tokens on the CPU in float32, by backend=eager, and
  on the device in float32 and bfloat16, by backend=compile; the bounds are those of `gpu_check.py`. Then 40 random
  requests share steps, and nothing is compiled.
- small, large: decode of one request, of SmolLM2's shape (asked: 900 tokens/s) and of an 8B llama in bfloat16 (asked:
  80 % of the bandwidth that is measured).
- serve: 256 requests of 512 + 256 tokens of the 8B at once (asked: 10,000 generated tokens/s).
- int8, int4: decode of one request of the 8B with rounded weights; of eight requests too, whose steps make weights.
- stream: decode of one request of the 8B by backend=eager with 4 layers on the device at once, the others in pinned
  memory (random weights would be drawn anew where a checkpoint's are read again).
- ranks: decode of the small one in two processes, where there are two devices.
"""

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpu_check import folder, logits, seconds

from xinfer import Engine, Limits, SamplingParams, hardware
from xinfer.backends import BackendContext
from xinfer.backends.torch import CompileConfig, EagerConfig
from xinfer.backends.torch.compiled import CompiledRunner
from xinfer.backends.torch.runner import TorchRunner
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme

LLAMA = {"model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_theta": 5e5}
LARGE = LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"num_hidden_layers": 6, "vocab_size": 300}
ASKED = {"small": ("tokens_per_second", 900.0), "large": ("read_share", 0.8), "serve": ("tokens_per_second", 10_000.0)}


@dataclass
class Lab:
    """Where parts are run, and the runner that the last one left, since making one takes longer than most parts.

    Attributes:
        tiny: whether all models are tiny, to try the script itself.
    """

    root: Path
    device: str
    tiny: bool
    held: dict[str, TorchRunner] = field(default_factory=dict)

    def runner(self, name: str, dtype: str, limits: Limits, scheme: Scheme | None = None, **config: Any) -> TorchRunner:
        """Return a runner of the `small` or `large` model; by backend=eager where layers are streamed or it is a CPU's.

        `config` are keys of the backend, `stream_layers` is the model's.
        """
        key = repr((name, dtype, limits, scheme, config))
        if key not in self.held:
            self.close()
            path = self._folder(name)
            slots, device = config.pop("stream_layers", None), config.pop("device", self.device)
            model = Model(name, lambda: path, xinfer_model_families(), dtype=dtype, load_format="dummy")
            model.quantization, model.stream_layers = scheme, slots
            if slots is not None or device != self.device:
                made = TorchRunner(BackendContext(model, EagerConfig(device=device, **config), limits))
            else:
                made = CompiledRunner(BackendContext(model, CompileConfig(device=device, **config), limits))
            self.held[key] = made
        return self.held[key]

    def _folder(self, name: str) -> Path:
        if name == "small" and not self.tiny:
            return folder(self.root, "135M")
        path = self.root / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps(LARGE | (TINY if self.tiny else {})))
        return path

    def close(self) -> None:
        """Give back the memory of what is held."""
        while self.held:
            self.held.popitem()[1].close()
        gc.collect()

    def limits(self) -> Limits:
        """Return those of all parts that measure."""
        return Limits(max_model_len=128, max_num_seqs=8) if self.tiny else Limits(1024, 256, 8192)


def parity(lab: Lab) -> dict[str, Any]:
    limits = Limits(max_model_len=128, max_num_seqs=8, max_num_batched_tokens=64)
    reference = lab.runner("small", "float32", limits, device="cpu")
    prompt = np.random.default_rng(0).integers(0, reference.info.vocab_size, 48).tolist()
    engine = Engine(reference, None, limits)
    engine.add_request(prompt, SamplingParams(temperature=0, max_tokens=32, ignore_eos=True))
    tokens = [token.token_id for step in engine.run() for token in step.tokens]
    exact = logits(reference, prompt + tokens[:-1], len(prompt))
    rows: dict[str, Any] = {"good": True}
    for dtype in ("float32", "bfloat16"):
        made = lab.runner("small", dtype, limits)
        difference = (logits(made, prompt + tokens[:-1], len(prompt)) - exact).abs() / exact.std()
        largest, mean = float(difference.max()), float(difference.mean())
        compiled = compiled_in(lambda made=made: random_work(made, limits))
        rows[dtype] = {"largest": largest, "mean": mean, "compiled": compiled, "notes": made.info.notes}
        rows["good"] &= (largest < 1e-3 if dtype == "float32" else mean < 0.05) and not compiled
    return rows


def compiled_in(work: Callable[[], object]) -> int:
    """Return how many graphs were compiled in the course of something."""

    def count() -> int:
        return int(torch._dynamo.utils.counters["stats"]["unique_graphs"]) + len(made)

    made, make = list[object](), torch._inductor.aoti_compile_and_package
    torch._inductor.aoti_compile_and_package = lambda *args, **named: made.append(args) or make(*args, **named)
    try:
        before = count()
        work()
        return count() - before
    finally:
        torch._inductor.aoti_compile_and_package = make


def random_work(made: TorchRunner, limits: Limits) -> None:
    rng, engine = np.random.default_rng(1), Engine(made, None, limits)
    for _ in range(40):
        prompt = rng.integers(0, made.info.vocab_size, int(rng.integers(1, 90))).tolist()
        engine.add_request(prompt, SamplingParams(max_tokens=int(rng.integers(1, 30)), ignore_eos=True))
    for _ in engine.run():
        pass


def decode(lab: Lab, made: TorchRunner, rows: int = 1) -> dict[str, Any]:
    """Return the rate of requests of 32 + 129 tokens that decode together, and the share of bandwidth that it takes."""
    limits, new = lab.limits(), 16 if lab.tiny else 129
    seconds(made, limits, rows, 32, 4)
    taken = [seconds(made, limits, rows, 32, new) - seconds(made, limits, rows, 32, 1) for _ in range(3)]
    rate = rows * (new - 1) / sorted(taken)[1]
    read = made.info.step_read_bytes * rate / rows / hardware.measure(made.device).read_bytes_s
    return {"tokens_per_second": rate, "read_share": read, "weights": made.info.resident_weight_bytes}


def small(lab: Lab) -> dict[str, Any]:
    return decode(lab, lab.runner("small", "bfloat16", lab.limits()))


def large(lab: Lab) -> dict[str, Any]:
    return decode(lab, lab.runner("large", "bfloat16", lab.limits()))


def serve(lab: Lab) -> dict[str, Any]:
    made = lab.runner("large", "bfloat16", lab.limits())
    rows, prompt, new = (8, 16, 8) if lab.tiny else (256, 512, 256)
    seconds(made, lab.limits(), rows, prompt, 2)
    taken = [seconds(made, lab.limits(), rows, prompt, new) for _ in range(2)]
    return {"tokens_per_second": rows * new / min(taken), "seconds": taken}


def rounded(lab: Lab, kind: str) -> dict[str, Any]:
    made = lab.runner("large", "bfloat16", lab.limits(), Scheme.configured(kind, method="rtn"))
    return {"one": decode(lab, made), "eight": decode(lab, made, rows=8)}


def stream(lab: Lab) -> dict[str, Any]:
    limits, keys = Limits(max_model_len=128, max_num_seqs=1), {} if lab.device == "cpu" else {"pinned_memory": 0.5}
    made = lab.runner("large", "bfloat16", limits, stream_layers=4, **keys)
    seconds(made, limits, 1, 8, 2)  # in which all layers come to lie in pinned memory
    made.metrics()
    taken = [seconds(made, limits, 1, 8, 5) for _ in range(3)]
    steps = 5 / sorted(taken)[1]
    waited = made.metrics().get("stream_wait_ms", 0.0) / 1e3
    return {
        "tokens_per_second": steps,
        "bytes_per_second": steps * made.info.stream_bytes,
        "last_waited_seconds": waited,
    }


def ranks(lab: Lab) -> dict[str, Any]:
    if lab.device == "cpu" or torch.cuda.device_count() < 2:
        return {"skipped": "there are no two CUDA devices"}
    words = ["-m", "xinfer", "bench", "backend=eager", "parallel.tensor=2", f"model.reference={lab._folder('small')}"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", *words, "model.load_format=dummy"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return {"good": done.returncode == 0, "output": done.stdout[-2000:], "errors": done.stderr[-2000:]}


PARTS: dict[str, Callable[[Lab], dict[str, Any]]] = {
    "parity": parity,
    "small": small,
    "large": large,
    "serve": serve,
    "stream": stream,
    "int8": lambda lab: rounded(lab, "int8"),
    "int4": lambda lab: rounded(lab, "int4"),
    "ranks": ranks,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself, on tiny models")
    parser.add_argument("--parts", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}, in the order given")
    parser.add_argument("--json", type=Path, default=Path("gpu_check_compile.json"))
    options = parser.parse_args()
    names = options.parts.split(",")
    if unknown := [name for name in names if name not in PARTS]:
        parser.error(f"--parts: {', '.join(unknown)} is unknown (there are: {', '.join(PARTS)})")
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is there: run this on a machine that has one, or try the script with --device cpu")
    result: dict[str, Any] = {"hardware": asdict(hardware.describe()), "versions": hardware.versions(), "parts": {}}
    good = True
    with tempfile.TemporaryDirectory() as name:
        lab = Lab(Path(name), options.device, tiny=options.device == "cpu")
        for part in names:
            started = time.perf_counter()
            try:
                told = PARTS[part](lab)
            except Exception as error:  # the other parts may be all that a machine is lent for
                told = {"good": False, "error": f"{type(error).__name__}: {error}"}
                lab.close()
            if part in ASKED and "error" not in told and not lab.tiny:
                figure, asked = ASKED[part]
                told["good"] = told[figure] >= asked
            good &= told.get("good", True)
            result["parts"][part] = told | {"took_seconds": time.perf_counter() - started}
            print(f"{part}: {json.dumps(result['parts'][part])}", flush=True)
            options.json.write_text(json.dumps(result | {"good": good}, indent=2))
        lab.close()
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
