"""torch on one thread, where ONNX Runtime's threads would spin against those of torch, and torch's against theirs.

Between two runs the engine samples with torch. Several threads of torch are slower there than one, and so is the next
run: a decode step of SmolLM2 in int8 that draws from all tokens took 11.9 ms with two and 6.0 with one, 32 sequences
with top-k and top-p 44 and 38 (two shared EPYC cores, onnxruntime 1.31.1, torch 2.13, 2026-11-30).
"""

__all__ = ["OneThread"]

import threading

import torch


class OneThread:
    """Has torch compute on one thread, for the threads that ask for it only."""

    def __init__(self) -> None:
        self._usual: dict[int, int] = {}

    def take(self) -> None:
        """Limit the thread that calls this; a second time does nothing."""
        thread = threading.get_ident()
        if thread not in self._usual:
            self._usual[thread] = usual = torch.get_num_threads()
            torch.set_num_threads(1)
            # That was also for threads that come later; a thread of its own takes it back for them alone.
            other = threading.Thread(target=torch.set_num_threads, args=(usual,))
            other.start()
            other.join()

    def give_back(self) -> None:
        """Undo it for the thread that calls this."""
        if (usual := self._usual.pop(threading.get_ident(), None)) is not None:
            torch.set_num_threads(usual)
