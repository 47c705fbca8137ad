"""A text to measure and to calibrate on, which lies beside this module: about 12,800 tokens of SmolLM2's, in 20 pieces.

It goes four times through a story, code, a treatise, talk (conversation, questions, instructions), and another story,
so that any 4,096 tokens in a row hold some of each. Who calibrates and measures should take different ones.

Story: Lewis Carroll, Alice's Adventures in Wonderland (1865). Treatise: Charles Darwin, On the Origin of Species
(1859). Other story: Arthur Conan Doyle, The Adventures of Sherlock Holmes (1892). All three are in the public domain
and taken from Project Gutenberg's transcriptions, with each paragraph on one line and without marks for italics. Code
and talk were written for this purpose and are under the project's own licence.
"""

__all__ = ["sample_text"]

from functools import cache
from importlib.resources import files


@cache
def sample_text() -> str:
    """Return the text."""
    return files(__package__).joinpath("sample.txt").read_text("utf-8")
