"""An ONNX Runtime session: where it computes, with how many threads, from which graph and weights."""

__all__ = ["cores", "open_session"]

import os
from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort
import psutil
from torch import Tensor

from xinfer.backends.onnx.providers import Providers


def open_session(
    graph: Path | bytes, weights: Mapping[str, Tensor], providers: Providers, threads: int
) -> ort.InferenceSession:
    """Load a graph with weights that lie in memory already; what is packed for kernels is not held a second time."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # Not by DLPack: ONNX Runtime would never let go of the tensors.
    values = [ort.OrtValue.ortvalue_from_numpy(each.numpy()) for each in weights.values()]
    options.add_external_initializers(list(weights), values)
    return ort.InferenceSession(graph, options, providers=providers, enable_fallback=0)


def cores() -> int:
    """Return how many physical cores this process may use."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(allowed, psutil.cpu_count(logical=False) or allowed)
