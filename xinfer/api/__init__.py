"""xinfer inside a program: `LLM` for plain code, `AsyncEngine` for asyncio, both on a thread that steps the engine."""

__all__: list[str] = []
