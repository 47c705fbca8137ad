"""From texts and conversations to token ids and back: tokenizers of all formats, and chat templates."""

__all__: list[str] = []
