"""Whether a backend keeps its contract: `pytest --pyargs xinfer.testing --backend NAME` (see plugins/README.md).

What is compared is a row of logits with that of the same text alone, by `backend=eager` where the backend computes
checkpoints, else by the backend itself; then what the engine makes of requests. Quick tests (`-m quick`) come first.
"""

__all__: list[str] = []
