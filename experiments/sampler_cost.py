"""What choosing tokens costs: 32 rows of 49,152 logits, and what sorting the whole vocabulary would cost.

    python experiments/sampler_cost.py

The candidates of top-k and top-p are compared with those of a full sort, row by row.
"""

import statistics
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from xinfer.engine.filters import candidates
from xinfer.engine.sampler import sample
from xinfer.engine.types import Request, SamplingParams, Sequence

ROWS, WIDTH = 32, 49_152
SETTINGS = {
    "greedy": {"temperature": 0},
    "temperature 0.8": {"temperature": 0.8},
    "0.8, top-k 40, top-p 0.95": {"temperature": 0.8, "top_k": 40, "top_p": 0.95},
    "0.8, top-p 0.95": {"temperature": 0.8, "top_p": 0.95},
    "0.8, min-p 0.05": {"temperature": 0.8, "min_p": 0.05},
}


def by_sorting(row: torch.Tensor, temperature: float, top_k: int, top_p: float) -> set[int]:
    """The tokens that may be drawn, from the definition of each filter."""
    values, ids = row.sort(descending=True, stable=True)
    weights = ((values.double() - values[0]) / temperature).exp()[:top_k]
    share = weights.cumsum(0) / weights.sum()
    return set(ids[: 1 + int((share < top_p).sum())].tolist())


def main():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(ROWS, WIDTH, generator=generator) * 3
    table = Table("sampling", "ms, median of 50", "best")
    for name, setting in SETTINGS.items():
        params = SamplingParams(**setting)
        sequences = [Sequence(Request("0", 0, (1, 2), params, seed), [1, 2], 100) for seed in range(ROWS)]
        times = []
        for _ in range(55):
            began = perf_counter()
            sample(logits, sequences)
            times.append((perf_counter() - began) * 1e3)
        table.add_row(name, f"{statistics.median(times[5:]):.2f}", f"{min(times):.2f}")
    columns = (torch.full((ROWS,), value, dtype=torch.float64) for value in (0.8, 40, 0.95))
    temperature, top_k, top_p = columns
    kept = candidates(logits, temperature, top_k.long(), top_p, None)
    ours = [set(ids[weights > 0].tolist()) for ids, weights in zip(kept.ids, kept.weights, strict=True)]
    same = sum(mine == by_sorting(row, 0.8, 40, 0.95) for mine, row in zip(ours, logits, strict=True))
    console = Console()
    console.print(table)
    console.print(f"{same} of {ROWS} rows have the candidates of a full sort; {torch.get_num_threads()} threads")


if __name__ == "__main__":
    main()
