"""Parity and speed of the kernels for paged attention on a device: `experiments/gpu_check.sh OUT attention` runs it.

Parity: ragged steps of prompts and single tokens, in blocks of random order, against the same numbers in float32 on the
CPU. In float32 the largest difference is within 1e-4 of the results' deviation, in half precision the mean one within
1e-2. No step may make the host wait for the device. Speed: the median of 20 calls, of 32 sequences at 1,000 tokens of
context with one new token each, and of a prompt of 2,048, for the heads of an 8B llama.
"""

import argparse
import json
import statistics
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from xinfer import hardware
from xinfer.backends.torch.choosing import Choice, Device, block_size_of
from xinfer.backends.torch.flex import warm_up
from xinfer.backends.torch.paged import Kernel, plan_paged
from xinfer.engine.types import Batch
from xinfer.models.spec import AttentionSpec

HEADS = AttentionSpec(32, 8, 128)
KINDS: dict[str, AttentionSpec] = {
    "plain": HEADS,
    "window": replace(HEADS, window=200),
    "sinks": replace(HEADS, sinks=True),
    "capped": replace(HEADS, softcap=30.0),
}
STEPS = {"mixed": [(300, 0), (1, 700), (40, 512), (1, 1), (1, 255)], "decode": [(1, 700), (1, 1), (1, 255), (1, 256)]}
WORK = {"decode 32 x 1,000": [(1, 999)] * 32, "prefill 2,048": [(2048, 0)]}
SLOTS = 32 * 1024  # of every cache, so that no kernel is compiled for another size
CASES: dict[str, list[tuple[Kernel, torch.dtype, list[str]]]] = {
    "cuda": [
        ("varlen", torch.bfloat16, ["plain", "window", "sinks"]),
        ("flex", torch.bfloat16, ["plain", "window", "sinks", "capped"]),
        ("flex", torch.float32, ["plain"]),
        ("sdpa", torch.bfloat16, ["plain", "window", "sinks", "capped"]),
        ("sdpa", torch.float32, ["plain"]),
    ],
    "cpu": [("cpp", torch.float32, list(KINDS)), ("sdpa", torch.bfloat16, list(KINDS))],
}


def batch_of(work: list[tuple[int, int]], block_size: int) -> Batch:
    """Return a step of (new tokens, tokens before them), in blocks of random order."""
    counts = np.array([count for count, _ in work], np.int32)
    contexts = np.array([sum(each) for each in work], np.int32)
    width = -(-int(contexts.max()) // block_size)
    tables = np.random.default_rng(0).permutation(len(work) * width).reshape(-1, width).astype(np.int32)
    places = np.concatenate([np.arange(before, before + count) for count, before in work])
    owner, ends = np.repeat(np.arange(len(work)), counts), np.cumsum(counts, dtype=np.int32)
    return Batch(
        token_ids=np.zeros(len(places), np.int32),
        positions=places.astype(np.int32),
        query_starts=np.concatenate([np.zeros(1, np.int32), ends]),
        context_lens=contexts,
        block_tables=tables,
        slot_mapping=tables[owner, places // block_size].astype(np.int64) * block_size + places % block_size,
        sample_at=ends - 1,
        adapters=np.zeros(len(work), np.int32),
    )


def inputs(batch: Batch, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, a cache full of numbers, and sinks, on the host."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((len(batch.token_ids), HEADS.heads, HEADS.head_dim), (SLOTS, HEADS.cache_width), (HEADS.heads,))
    q, pool, sinks = (torch.randn(*shape, generator=generator).to(dtype) for shape in shapes)
    return q, pool, sinks


def attended(kernel: Kernel, batch: Batch, kind: AttentionSpec, given: tuple[Tensor, Tensor, Tensor]) -> Tensor:
    """Return a step's attention, planned anew."""
    q, pool, sinks = given
    step = plan_paged(batch, block_size_of([Choice(kernel)]), q.device, {kind: kernel})
    return step.attend(q, q, pool, kind, sinks if kind.sinks else None)


def parity(kernel: Kernel, dtype: torch.dtype, name: str, device: torch.device) -> dict[str, Any]:
    kind, size = KINDS[name], block_size_of([Choice(kernel)])
    row: dict[str, Any] = {"kernel": kernel, "dtype": str(dtype).removeprefix("torch."), "kind": name, "good": True}
    for step, work in STEPS.items():
        batch = batch_of(work, size)
        host = inputs(batch, dtype)
        given = tuple(each.to(device) for each in host)
        if kernel == "flex" and device.type == "cuda":
            warm_up(kind, given[1], dtype, size)
        got = attended(kernel, batch, kind, given).float().cpu()
        exact = plan_paged(batch, size, torch.device("cpu"), {kind: "sdpa"}).attend(
            *(host[0].float(), host[0].float(), host[1].float(), kind), host[2].float() if kind.sinks else None
        )
        off = (got - exact).abs() / exact.std()
        waits = kernel != "sdpa" and device.type == "cuda" and waited(kernel, batch, kind, given)
        good = float(off.max()) < 1e-4 if dtype == torch.float32 else float(off.mean()) < 1e-2
        row |= {f"{step} largest": float(off.max()), f"{step} mean": float(off.mean()), f"{step} waits": waits}
        row["good"] &= good and not waits
    return row


def waited(kernel: Kernel, batch: Batch, kind: AttentionSpec, given: tuple[Tensor, ...]) -> bool:
    """Return whether the host waited for the device to plan a step or to attend; what is compiled for it is there."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        attended(kernel, batch, kind, given)
    except RuntimeError as error:
        print(f"{kernel}: {error}", file=sys.stderr)
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def speed(kernel: Kernel, dtype: torch.dtype, device: torch.device, calls: int) -> dict[str, Any]:
    row: dict[str, Any] = {"kernel": kernel, "dtype": str(dtype).removeprefix("torch.")}
    size = block_size_of([Choice(kernel)])
    for name, work in WORK.items():
        batch = batch_of(work, size)
        q, pool, _ = (each.to(device) for each in inputs(batch, dtype))
        step = plan_paged(batch, size, device, {HEADS: kernel})
        taken = []
        for _ in range(3 + calls):
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            started = time.perf_counter()
            step.attend(q, q, pool, HEADS)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            taken.append((time.perf_counter() - started) * 1e3)
        row[name] = statistics.median(taken[3:])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cpu tries the script itself where there is no GPU")
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        sys.exit("no CUDA device is there: run this on a machine that has one, or try the script with --device cpu")
    device, started = torch.device(options.device), time.perf_counter()
    found = Device.of(device)
    missing = {name for name, there in (("varlen", found.flash), ("flex", found.triton)) if not there}
    cases = [case for case in CASES[device.type] if case[0] not in missing]
    checks, speeds = [], []
    with torch.inference_mode():
        print("| kernel | precision | kind | largest / std | mean / std | |\n| --- | --- | --- | --- | --- | --- |")
        for kernel, dtype, kinds in cases:
            for kind in kinds:
                checks.append(c := parity(kernel, dtype, kind, device))
                largest, mean = (max(c[f"{step} {of}"] for step in STEPS) for of in ("largest", "mean"))
                verdict = "good" if c["good"] else "WRONG"
                print(f"| {kernel} | {c['dtype']} | {kind} | {largest:.1e} | {mean:.1e} | {verdict} |", flush=True)
        print(f"\n| kernel | precision | {' | '.join(WORK)} (ms) |\n| --- | --- | {'--- | ' * len(WORK)}")
        for kernel, dtype, _ in cases:
            speeds.append(row := speed(kernel, dtype, device, options.calls))
            print(f"| {kernel} | {row['dtype']} | {' | '.join(f'{row[work]:.3f}' for work in WORK)} |", flush=True)
    good = all(check["good"] for check in checks)
    result = {
        "good": good,
        "missing": sorted(missing),
        "hardware": asdict(hardware.describe()),
        "versions": hardware.versions(),
        "parity": checks,
        "milliseconds": speeds,
        "seconds": time.perf_counter() - started,
    }
    print(f"\n{'all good' if good else 'PARITY FAILED'} in {result['seconds']:.0f} s")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2))
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
