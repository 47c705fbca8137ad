"""`backend=bigram backend.corpus=FILE`: the next byte, as often as it followed the last one in a text."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from xinfer import Backend, BackendContext, Batch, ModelRunner, RunnerInfo, hookimpl
from xinfer.errors import ConfigError

END = 256  # a token after the 256 bytes: the end of the text


@dataclass
class BigramConfig:
    """Keys of `backend=bigram`."""

    corpus: str = ""
    smoothing: float = 0.01


class ByteTokenizer:
    """Bytes are tokens."""

    chat_template = None
    eos_token_ids = (END,)

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(t for t in token_ids if t < END).decode(errors="replace")


class BigramRunner(ModelRunner):
    """Its logits are the logarithms of how often a byte followed the last one: no state, so no cache to speak of."""

    def __init__(self, context: BackendContext) -> None:
        corpus = Path(context.config.corpus).expanduser()
        if not corpus.is_file():
            raise ConfigError(f"backend.corpus={context.config.corpus!r} is no file: name a text to learn from")
        if not context.config.smoothing > 0:
            raise ConfigError(f"backend.smoothing={context.config.smoothing} is out of range: take a number above zero")
        self.logits = learn(corpus.read_bytes(), context.config.smoothing)
        size = self.logits.numel() * self.logits.element_size()
        self.info = RunnerInfo(
            vocab_size=END + 1,
            max_model_len=1 << 16,
            block_size=1 << 16,  # a sequence is one block
            num_blocks=context.limits.max_num_seqs,
            resident_weight_bytes=size,
            levels=frozenset({"rerun", "batch", "chunk", "preempt", "cache"}),
        )

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.logits[torch.from_numpy(batch.token_ids[batch.sample_at]).long()]


def learn(text: bytes, smoothing: float) -> torch.Tensor:
    """Return the logarithm of P(next | last), [257, 257], a text's end counted as a token; rows add up to one."""
    tokens = np.frombuffer(text, np.uint8).astype(np.int64)
    counts = np.full((END + 1, END + 1), smoothing)
    np.add.at(counts, (tokens[:-1], tokens[1:]), 1)
    if len(tokens):
        counts[tokens[-1], END] += 1
    return torch.from_numpy(np.log(counts / counts.sum(1, keepdims=True))).float()


@hookimpl
def xinfer_backends() -> list[Backend]:
    return [
        Backend(
            "bigram", BigramConfig, BigramRunner, "byte pairs counted in a text", tokenizer=lambda _: ByteTokenizer()
        )
    ]
