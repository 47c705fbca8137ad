"""What a model is, before any backend touches it: files, description, weights, tokenizer."""

__all__: list[str] = []
