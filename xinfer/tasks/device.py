"""`python -m xinfer device`: devices, memory, measured speed, library versions, providers, plugins."""

__all__ = ["run"]

from dataclasses import replace
from pathlib import Path

import rich.box
import rich.table
import torch

from xinfer import hardware
from xinfer.config import Config
from xinfer.hardware import Speed, gibibytes
from xinfer.models.cache import cache_folder
from xinfer.models.sources import is_here
from xinfer.session import Session
from xinfer.tasks import Job
from xinfer.tasks.console import console


def run(config: Config, job: Job) -> int:
    """Print the page on standard output; speeds are measured anew, and the best of all times is remembered.

    What the backend says of the model is shown if no weights need be fetched for it. With
    `engine.determinism=invariant`, how the model's rows have to be padded for it is found out and shown.
    """
    page = console()
    cache, machine = cache_folder(), hardware.describe()
    cpu = torch.device("cpu")
    table = rich.table.Table(box=rich.box.SIMPLE, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column()
    table.add_row("processor", f"{machine.cpu}, {machine.logical_cores} cores, {machine.threads} threads in use")
    table.add_row("instructions", f"{' '.join(machine.instruction_sets)} (torch uses {machine.torch_kernels})")
    table.add_row("system", f"{machine.platform}, Python {machine.python}")
    table.add_row("memory", f"{gibibytes(machine.memory)}, {gibibytes(hardware.available_memory(cpu))} free")
    table.add_row("cpu", _speed(hardware.speed(cpu, cache=cache, again=True)))
    for index, gpu in enumerate(machine.gpus):
        device = torch.device("cuda", index)
        free = gibibytes(hardware.available_memory(device))
        driver = f", driver {gpu.driver}" if gpu.driver else ""
        table.add_row(f"cuda:{index}", f"{gpu.name}, {gibibytes(gpu.memory)}, {free} free, {gpu.capability}{driver}")
        table.add_row("", _speed(hardware.speed(device, cache=cache, again=True)))
    table.add_row("versions", "  ".join(f"{name} {version}" for name, version in hardware.versions().items()))
    table.add_row("ONNX Runtime", ", ".join(hardware.onnx_providers()) or "can't be imported")
    table.add_row("backends", ", ".join(sorted(job.plugins.backends)))
    table.add_row("plugins", ", ".join(plugin.name for plugin in job.plugins.loaded))
    table.add_row("cache", str(_short(cache)))
    session = Session(config, job.plugins)
    for note in _notes(session):
        table.add_row(session.backend.name, note)
    if config.engine.determinism == "invariant":  # what that takes depends on the model's own matrices
        runner = session.runner
        for note in runner.info.notes:
            table.add_row("invariant", f"{runner.info.dtype} on {runner.info.device}: {note}")
    page.print(table)
    if warning := hardware.onnxruntime_shadowed():
        page.print(f"warning: {warning}", markup=False)
    for name, reason in job.plugins.failed.items():
        page.print(f"warning: plugin {name} could not be loaded: {reason}", markup=False)
    return 0


def _notes(session: Session) -> tuple[str, ...]:
    """Return what the backend says of the model, if that is here."""
    reference, notes = session.config.model.reference, session.backend.notes
    if notes is None or not session.computes_checkpoint:
        return ()
    if not is_here(reference):
        return (f"the model {reference.partition('#')[0]} is not here yet, so nothing can be said of it",)
    return notes(replace(session.context, model=session.described))


def _speed(speed: Speed) -> str:
    figures = f"reads {speed.read_bytes_s / 1e9:.1f} GB/s, multiplies {speed.fp32_flop_s / 1e9:.0f} GFLOP/s in float32"
    halves = f"{speed.bf16_flop_s / 1e9:.0f} in bfloat16, {speed.fp16_flop_s / 1e9:.0f} in float16"
    return f"{figures}, {halves} (measured {speed.measured})"


def _short(path: Path) -> Path:
    return Path("~") / path.relative_to(Path.home()) if path.is_relative_to(Path.home()) else path
