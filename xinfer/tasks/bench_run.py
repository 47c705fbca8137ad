"""One side of a benchmark in this process: an engine as users have it, and its times."""

__all__ = ["Bench"]

from collections.abc import Sequence as Rows
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from xinfer import hardware
from xinfer.config import Config
from xinfer.engine.engine import Engine, Observers
from xinfer.engine.outputs import RequestOutput
from xinfer.engine.types import Sequence
from xinfer.plugins import Plugins
from xinfer.records.bench_samples import Repeat, RequestSample, Side
from xinfer.session import Session
from xinfer.tasks.bench_facts import build, facts
from xinfer.tasks.bench_work import Work, plan
from xinfer.tasks.energy import EnergyMeter
from xinfer.tasks.roofline import Roofline

_CHOICE_BYTES = 8 + 1  # what the sampler reads of a row on a device: the likeliest token's id, and if it is finite


class Bench:
    """A model on a backend that runs work when told to.

    What is timed is what a user's generation does: scheduling, the model, the choice of tokens, their text, the
    plugins that listen; not the record. Tokens are chosen as configured (by the task's own file greedily), one sample
    of each request, and ends of sequences are ignored. Prompts are random token ids by `sampling.seed` (0 without), no
    two alike, so that none finds another in the prefix cache.

    Args:
        alone: whether this process holds nothing else, so that its peak memory is this side's.
    """

    def __init__(self, config: Config, plugins: Plugins, *, alone: bool = True) -> None:
        self.config, self._plugins, self._alone = config, plugins, alone
        self._session = Session(config, plugins)
        self._session.check()
        self._seed = config.sampling.seed or 0
        self._rng = np.random.default_rng(self._seed)
        self._roofline = Roofline()
        self.engine: Engine

    def load(self) -> Side:
        """Read the weights, make the engine, and return what is known before anything is measured.

        Work that the engine could not run as it is meant is a `ConfigError`.
        """
        info, plugins = self._session.runner.info, self._plugins.observers()
        steps = (lambda step: self._roofline.add(step), *plugins.on_step)
        self.engine = self._session.engine(self._seed, Observers(steps, plugins.on_token, plugins.on_request_finished))
        for work in plan(self.config.bench):
            work.check(self.engine)
        self._device = torch.device(info.device)
        self._energy = EnergyMeter(self._device)
        self._threads = torch.get_num_threads()
        resources = {
            "resident_weight_bytes": info.resident_weight_bytes,
            "kv_cache_bytes": info.kv_cache_bytes,
            "read_back_bytes_per_token": self._read_back(),
            "energy_source": self._energy.source,
        }
        return Side(facts(self._session), build(), resources, [])

    def __call__(self, work: Work) -> Repeat:
        """Run work once."""
        torch.set_num_threads(self._threads)  # which another side in this process may want otherwise
        usual = self._session.params
        params = replace(usual, n=1, min_tokens=0, max_tokens=work.new_tokens, ignore_eos=True, seed=None)
        prompts = self._rng.integers(0, self.engine.admission.vocab_size, (work.batch, work.prompt_tokens)).tolist()
        self._roofline = Roofline()
        outputs: list[RequestOutput] = []
        _synchronize(self._device)
        self._energy.start()
        began = self.engine.clock()
        for prompt in prompts:
            self.engine.add_request(prompt, params)
        for step in self.engine.run():
            outputs += step.finished
        _synchronize(self._device)
        duration = self.engine.clock() - began
        joules, self._threads = self._energy.stop(), torch.get_num_threads()
        roofline = self._roofline.figures(self.engine.runner.info)
        return Repeat(
            requests=tuple(RequestSample.of(output) for output in sorted(outputs, key=lambda output: output.index)),
            duration_ms=duration * 1e3,
            cached_tokens=sum(output.stats.cached_tokens for output in outputs),
            roofline=None if roofline is None else roofline["share"],
            energy_j=joules,
            peak_memory_bytes=hardware.peak_memory() if self._alone else None,
        )

    def close(self) -> None:
        """Give the model back."""
        self._session.close()

    def _read_back(self) -> int | None:
        """Return the bytes that a token's choice brings to the host; None on a CPU, where nothing is brought."""
        if self._device.type == "cpu":
            return None
        seen, sampler = _Seen(), self.engine.sampler
        usual = sampler.processors
        sampler.processors = [*usual, seen]
        self(Work.parse("tg1", 1))
        sampler.processors = usual
        return seen.row_bytes if seen.on_host else _CHOICE_BYTES


class _Seen:
    """Looks where a runner's logits lie, in the place of a logits processor, and changes nothing."""

    name = "seen"

    def __init__(self) -> None:
        self.on_host, self.row_bytes = False, 0

    def check(self, arguments: Any) -> None:
        """Nobody asks for it."""

    def apply(self, logits: torch.Tensor, sequences: Rows[Sequence]) -> torch.Tensor:
        """Note the device, and what a row takes."""
        self.on_host, self.row_bytes = logits.device.type == "cpu", logits.shape[1] * logits.element_size()
        return logits


def _synchronize(device: torch.device) -> None:
    """Wait for the device, so that nothing is timed that was asked for before; only benchmarks do that."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)
