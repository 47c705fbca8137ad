"""For tests of xinfer and of backends: a runner without a model, tiny models, and what comes of them."""

__all__: list[str] = []
