"""GGUF files, translated to the words and names of the other formats."""

__all__: list[str] = []
