"""Which of the processes that `torchrun` has started this one is."""

__all__ = ["count", "rank"]

import os


def rank() -> int:
    """Return the number of this process; 0 is the first, or the only one."""
    return _asked("RANK", 0)


def count(*, here: bool = False) -> int:
    """Return how many processes there are, or how many on this machine."""
    return _asked("LOCAL_WORLD_SIZE" if here else "WORLD_SIZE", 1)


def _asked(name: str, otherwise: int) -> int:
    # Others than torchrun set these names too, for programs of theirs.
    return int(os.environ.get(name, otherwise)) if "TORCHELASTIC_RUN_ID" in os.environ else otherwise
