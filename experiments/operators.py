"""How fast the operators in C++ are, beside torch's own, on this processor or as one that can do less would have them.

    python experiments/operators.py [x86-64-v3]

With an argument operators are compiled for processors with that much (`-march`), and torch and oneDNN are kept from the
rest. Products are those of all of SmolLM2's layers, with weights that lie in memory; attention is one of its layers'.
Ours and torch's take turns; of each the median is told. torch has no product with codes: there weights are made first.
Four rows of float32 are told of, but left to oneDNN by xinfer.
"""

import os
import statistics
import sys
from collections.abc import Callable
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional

from xinfer.backends.torch import kernels

TURNS = 9
LIMITS = {"x86-64-v2": ("default", "SSE41"), "x86-64-v3": ("avx2", "AVX2"), "x86-64-v4": ("avx512", "AVX512_CORE")}
LAYERS, SHAPES = 30, ((960, 576), (576, 576), (3072, 576), (576, 1536))
HEADS, KV_HEADS, DIM, BLOCK = 9, 3, 64, 16
NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
Work = Callable[[], object]


def products(rows: int, dtype: torch.dtype) -> tuple[Work, Work]:
    weights = [torch.randn(shape).to(dtype) for _ in range(LAYERS) for shape in SHAPES]
    inputs = {shape[1]: torch.randn(rows, shape[1]).to(dtype) for shape in SHAPES}
    ours = torch.ops.xinfer.linear
    return (
        lambda: [ours(inputs[weight.shape[1]], weight, None, rows) for weight in weights],
        lambda: [functional.linear(inputs[weight.shape[1]], weight) for weight in weights],
    )


def coded(rows: int, bits: int, block: int) -> tuple[Work, Work]:
    """Ours, and the same with weights made of the codes first."""

    def matrix(out: int, width: int) -> tuple[Tensor, Tensor, Tensor]:
        codes = torch.randint(0, 256, (out, width * bits // 8), dtype=torch.uint8)
        zeros = torch.randint(0, 1 << bits, (out, width // block), dtype=torch.uint8)
        return codes, torch.rand(out, width // block) / 100, zeros

    inputs = {shape[1]: torch.randn(rows, shape[1]) for shape in SHAPES}
    matrices = [(inputs[shape[1]], *matrix(*shape)) for _ in range(LAYERS) for shape in SHAPES]
    ours = torch.ops.xinfer.linear_codes
    return (
        lambda: [ours(*each, None, bits, rows) for each in matrices],
        lambda: [ours(*each, None, bits, 0) for each in matrices],
    )


def attention(tokens: int, context: int, dtype: torch.dtype) -> tuple[Work, Work]:
    """Ours of a cache in blocks, and torch's of keys and values that are there already."""
    blocks = -(-context // BLOCK)
    q = torch.randn(tokens, HEADS, DIM).to(dtype)
    pool = torch.randn(blocks * BLOCK, 2 * KV_HEADS * DIM).to(dtype)
    starts, contexts = torch.tensor([0, tokens], dtype=torch.int32), torch.tensor([context], dtype=torch.int32)
    tables = torch.randperm(blocks).int()[None]
    heads = q.transpose(0, 1)[None]
    k, v = torch.randn(2, 1, KV_HEADS, context, DIM).to(dtype)
    shape = (BLOCK, KV_HEADS, DIM, False, DIM**-0.5, 0.0, 0)
    causal = tokens > 1
    return (
        lambda: torch.ops.xinfer.attention(q, pool, starts, contexts, tables, None, *shape),
        lambda: functional.scaled_dot_product_attention(heads, k, v, is_causal=causal, enable_gqa=True),
    )


def milliseconds(work: Work, times: int) -> float:
    began = perf_counter()
    for _ in range(times):
        work()
    return (perf_counter() - began) / times * 1e3


def limit(architecture: str) -> None:
    """Keep torch and oneDNN from what such a processor lacks, which they must be told before they are imported."""
    names = ("ATEN_CPU_CAPABILITY", "ONEDNN_MAX_CPU_ISA")
    wanted = dict(zip(names, LIMITS.get(architecture, ()), strict=False))
    if not wanted.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | wanted)


@torch.inference_mode()
def main() -> None:
    architecture = sys.argv[1] if len(sys.argv) > 1 else "native"
    limit(architecture)
    flags = [each for each in kernels._FLAGS if not each.startswith("-march")]
    kernels._FLAGS = (*flags, f"-march={architecture}")
    if not kernels.available():
        sys.exit("the operators could not be compiled")
    works = {
        f"products, {NAMES[dtype]}, rows: {rows}": (products(rows, dtype), 1) for dtype in NAMES for rows in (1, 4)
    }
    works |= {
        f"products, {bits} bits, rows: {rows}": (coded(rows, bits, block), 1)
        for bits, block in ((8, 64), (4, 32))
        for rows in (1, 4)
    }
    for dtype in (torch.float32, torch.bfloat16):
        works[f"attention, {NAMES[dtype]}, a prompt of 512"] = attention(512, 512, dtype), 10
        works[f"attention, {NAMES[dtype]}, a token at 512"] = attention(1, 512, dtype), 100
    table = Table("", "ours, ms", "torch's, ms", title=f"-march={architecture}, {torch.get_num_threads()} threads")
    for name, (pair, times) in works.items():
        found: tuple[list[float], list[float]] = [], []
        for work in pair:
            work()
        for _ in range(TURNS):
            for work, measured in zip(pair, found, strict=True):
                measured.append(milliseconds(work, times))
        table.add_row(name, *(f"{statistics.median(each):.3g}" for each in found))
    Console().print(table)


if __name__ == "__main__":
    main()
