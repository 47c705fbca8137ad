"""An ONNX Runtime session: where it computes, with how many threads, from which graph and weights."""

__all__ = ["open_session"]

from collections.abc import Mapping
from pathlib import Path

import onnxruntime as ort
from torch import Tensor

from xinfer.backends.onnx.providers import Providers


def open_session(
    graph: Path, weights: Mapping[str, Tensor], providers: Providers, threads: int
) -> ort.InferenceSession:
    """Load a graph with weights that lie in memory already; what is packed for kernels is not held a second time."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # Not by DLPack: ONNX Runtime would never let go of the tensors.
    values = [ort.OrtValue.ortvalue_from_numpy(each.numpy()) for each in weights.values()]
    options.add_external_initializers(list(weights), values)
    return ort.InferenceSession(str(graph), options, providers=providers, enable_fallback=0)
