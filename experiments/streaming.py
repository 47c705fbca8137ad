r"""How fast is a model of which only some layers are in memory, and how much memory does it take?

    python experiments/streaming.py                                             # SmolLM2 in int8
    python experiments/streaming.py model.dtype=bfloat16 --slots 1 2 8 30
    python experiments/streaming.py --synthetic 4 --limit 1024 --slots 2 8      # larger than what is allowed

Each line is a process of its own, which computes 16 tokens after a prompt of 32: tokens per second once the first token
is there, bytes brought in a token, the share of the time spent waiting for them, and the most memory that was resident
(VmHWM: anonymous memory, and pages of files that were mapped), of which Python and torch alone take the first line's.

With `--synthetic N` a llama in bfloat16 is written whose layers take N times the limit (MiB). Processes then run in a
control group whose memory is limited, the system's cache of the files that they read included: layers really come
from the disk, and who takes more is killed. That needs Linux and root; where it can't be, it says so.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from xinfer.testing.hollow import hollow_folder
from xinfer.testing.tiny import tiny_config, write_folder

MEASURE = """
import json, random, re, sys, time
from pathlib import Path
from typing import Any
from xinfer import LLM, SamplingParams

def resident():
    return int(re.search(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[1]) * 1024

overrides, result = sys.argv[1:], {"before": resident()}
if overrides:
    llm = LLM(overrides=overrides)
    prompt = [random.Random(0).randrange(10, 250) for _ in range(32)]
    llm.generate([prompt], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    params = SamplingParams(temperature=0, max_tokens=17, ignore_eos=True)
    (out,) = llm.generate([prompt], params)
    info = llm.info
    result |= {"tpot_ms": out.outputs[0].stats.tpot_ms, "bytes": info.stream_bytes,
               "weights": info.resident_weight_bytes, "slots": info.stream_slots}
    llm.close()
print(json.dumps(result | {"peak": resident()}))
"""
_GROUPS = (  # of version 2 and of version 1: where they are, and what is written to limit them
    (Path("/sys/fs/cgroup"), "memory.max"),
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
)


def measure(overrides: list[str], group: Path | None) -> dict[str, Any] | str:
    """Return what a process tells of itself, or how it ended."""
    join = None if group is None else lambda: (group / "cgroup.procs").write_text(str(os.getpid()))
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, *overrides],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"XINFER_LOG": "error"},
        preexec_fn=join,
    )
    if done.returncode < 0:
        return f"killed by signal {-done.returncode}"
    if done.returncode:
        return done.stderr.strip().splitlines()[-1]
    return json.loads(done.stdout)


@contextmanager
def limited(limit: int) -> Iterator[Path | None]:
    """Make a control group whose processes share so many bytes."""
    for root, file in _GROUPS:
        group = root / f"xinfer-{os.getpid()}"
        with suppress(OSError):
            if not (root / "cgroup.procs").exists():
                continue
            group.mkdir()
            (group / file).write_text(str(limit))
            break
    else:
        print("no control group can be made here: memory is measured, but not limited", file=sys.stderr)
        yield None
        return
    try:
        yield group
    finally:
        group.rmdir()


def write_synthetic(folder: Path, size: int) -> None:
    """Write a llama of 24 MiB a layer, with layers of so many bytes."""
    config = tiny_config(
        "llama", vocab_size=1024, hidden_size=1024, intermediate_size=3072, num_attention_heads=16,
        num_key_value_heads=8, num_hidden_layers=size // (24 << 20),
    )  # fmt: skip
    write_folder(folder, tiny_config("llama"), 0)  # for the tokenizer
    hollow_folder(folder, config, "BF16")
    numbers = (torch.randn(32 << 20) / 40).to(torch.bfloat16).view(torch.uint8).numpy().data
    file = folder / "model.safetensors"
    with file.open("r+b") as opened:
        length = int.from_bytes(opened.read(8), "little")
        opened.seek(8 + length)
        left = file.stat().st_size - opened.tell()
        while left:
            left -= opened.write(numbers[:left])
        os.fsync(opened.fileno())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("overrides", nargs="*", default=["model.quantization=int8"], help="as for python -m xinfer")
    parser.add_argument("--slots", nargs="+", type=int, default=[1, 2, 4, 8, 16, 30])
    parser.add_argument("--synthetic", type=int, metavar="N", help="a model N times as large as the limit")
    parser.add_argument("--limit", type=int, metavar="MIB", help="memory that a process may have")
    options = parser.parse_args()
    if (options.synthetic is None) != (options.limit is None):
        parser.error("--synthetic and --limit go together")
    with tempfile.TemporaryDirectory(dir=".") as folder:
        overrides = [*options.overrides, "engine.kv_memory=64e6"]
        group: AbstractContextManager[Path | None] = nullcontext()
        if options.synthetic is not None:
            write_synthetic(Path(folder), options.synthetic * options.limit << 20)
            overrides = [f"model.reference={folder}", "model.dtype=bfloat16", "engine.kv_memory=64e6"]
            group = limited(options.limit << 20)
        print("| layers in memory | weights MiB | tokens/s | MiB a token | peak resident MiB |")
        print("| --- " * 5 + "|")
        with group as joined:
            for slots in [None, "all", *options.slots]:
                more = [] if slots in (None, "all") else [f"model.stream_layers={slots}"]
                print(row(slots, measure([] if slots is None else [*overrides, *more], joined)), flush=True)


def row(slots: object, found: dict[str, Any] | str) -> str:
    """Return a line of the table."""
    name = "nothing but Python and torch" if slots is None else slots
    if isinstance(found, str):
        return f"| {name} | {found} | | | |"
    if slots is None:
        return f"| {name} | | | | {found['peak'] / (1 << 20):.0f} |"
    each = [found["weights"] / (1 << 20), 1e3 / found["tpot_ms"], found["bytes"] / (1 << 20), found["peak"] / (1 << 20)]
    return "| {} | {:.0f} | {:.2f} | {:.0f} | {:.0f} |".format(name, *each)


if __name__ == "__main__":
    main()
