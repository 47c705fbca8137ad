"""The core loop, in the order of a request's way.

    Engine.add_request ─ admission ─ Scheduler ◄─ BlockPool        who computes what next, and where it lies
                                         │
                           Schedule ─ make_batch ─► Batch ─► ModelRunner.forward ─► logits
                                                                                      │
      StepOutput ◄─ results ◄─ TextStream ◄─ Sampler ◄─ filters ◄─ penalties and masks ◄──┘

It knows no backend, no server and no file. Begin with `engine.py`; `types.py` has the data on its way, `outputs.py`
what comes out, `params.py` what a user may ask for. `speculative.py` guesses, `logprobs.py` and `stats.py` tell.
"""

__all__: list[str] = []
