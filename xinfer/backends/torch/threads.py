"""OpenMP's threads: every thread that computes has some of its own, which wait for work by looking for it.

As soon as there are more of them than cores, they give up looking at once, and waking them takes longer than a product
of a few rows: where one thread loaded a model and another stepped it, a token of SmolLM2 took 14 ms instead of 7
(bfloat16, two Zen 5 cores, torch 2.13, 2026-11-30).
"""

__all__ = ["compute_alone", "end_threads"]

import ctypes
import sys

import torch

_HARD = 2  # of OpenMP's `omp_pause_resource_t`: everything is given back


def end_threads() -> None:
    """End those of the thread that calls this; it gets others when it computes again."""
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "omp_pause_resource_all"):
        library.omp_pause_resource_all(_HARD)


def compute_alone() -> None:
    """Have the thread that calls this compute without others, for good: it works beside one that has them."""
    torch.get_num_threads()  # with which torch sets this thread up as all others
    if sys.platform == "linux" and hasattr(library := ctypes.CDLL(None), "omp_set_num_threads"):
        library.omp_set_num_threads(1)
