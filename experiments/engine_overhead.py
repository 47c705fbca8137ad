"""What the engine itself costs a step: scheduling, batch building, stop checks and text, without any model.

    python experiments/engine_overhead.py

The model always says `a`, and `FakeTokenizer` has a token for each byte. Shown is the median of schedule_ms + output_ms
over decode steps, for more and more sequences; what a sequence costs must not grow with their number. Then the same for
100,000 requests in the queue, and what adding and aborting them costs.
"""

import statistics
from time import perf_counter

import torch
from rich.console import Console
from rich.table import Table

from xinfer.engine.engine import Engine
from xinfer.engine.types import Limits, SamplingParams
from xinfer.testing.fake import FakeRunner, FakeTokenizer

STEPS, ROUNDS = 60, 5


class Quick(FakeRunner):
    """A runner whose logits cost nothing."""

    def forward(self, batch):
        """The letter `a` is always the likeliest."""
        logits = torch.zeros(len(batch.sample_at), self.info.vocab_size)
        logits[:, ord("a")] = 1
        return logits


def engine(count: int) -> Engine:
    runner = Quick(num_blocks=count * 8, max_model_len=512)
    return Engine(runner, FakeTokenizer(), Limits(max_num_seqs=count, max_num_batched_tokens=64 * count))


def step_cost(count: int) -> tuple[float, float, float]:
    """Median milliseconds of a decode step of `count` sequences: schedule, output, and sampling beside them."""
    schedule, output, sampling = [], [], []
    for _ in range(ROUNDS):
        running = engine(count)
        for _ in range(count):
            running.add_request(range(32), SamplingParams(max_tokens=STEPS, temperature=0, stop=("never",)))
        stats = [step.stats for step in running.run()][5:-5]
        schedule.append(statistics.median(s.schedule_ms for s in stats))
        output.append(statistics.median(s.output_ms for s in stats))
        sampling.append(statistics.median(s.sample_ms for s in stats))
    return statistics.median(schedule), statistics.median(output), statistics.median(sampling)


def queue_cost(count: int) -> tuple[float, float, float]:
    """Microseconds a request for adding, milliseconds of a step in front of the queue, microseconds for aborting."""
    running = engine(32)
    began = perf_counter()
    for _ in range(count):
        running.add_request(range(8), SamplingParams(max_tokens=8, temperature=0))
    added = perf_counter() - began
    steps = [running.step().stats for _ in range(30)]
    began = perf_counter()
    for index in range(count):
        running.abort(str(index))
    aborted = perf_counter() - began
    return added / count * 1e6, statistics.median(s.schedule_ms + s.output_ms for s in steps), aborted / count * 1e6


def main():
    torch.set_num_threads(1)
    table = Table("sequences", "schedule ms", "output ms", "together ms", "µs a sequence", "sampling ms")
    for count in (1, 16, 64, 256, 1024):
        schedule, output, sampling = step_cost(count)
        together = schedule + output
        shown = (schedule, output, together, together / count * 1e3, sampling)
        table.add_row(str(count), *(f"{value:.3f}" for value in shown))
    queue = Table("queued requests", "µs to add", "ms a step", "µs to abort")
    for count in (1_000, 10_000, 100_000):
        queue.add_row(f"{count:,}", *(f"{value:.2f}" for value in queue_cost(count)))
    Console().print(table, queue)


if __name__ == "__main__":
    main()
