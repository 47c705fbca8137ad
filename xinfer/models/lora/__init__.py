"""LoRA adapters, merged into weights as these are read."""

__all__: list[str] = []
