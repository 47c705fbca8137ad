"""The core loop, in the order of a request's way.

    Engine.add_request ─ Scheduler.schedule ─► Batch ─► ModelRunner.forward ─► logits
      StepOutput ◄─ TextStream ◄─ sample ◄───────────────────────────────────────┘

It knows no backend, no server and no file. Begin with `engine.py`; `types.py` has the data.
"""

__all__: list[str] = []
