"""A runner without a model, and a tokenizer of bytes: the engine tested with nothing but itself at work."""

__all__ = ["EOS", "FakeRunner", "FakeTokenizer", "context_logits"]

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.typing import NDArray

from xinfer.engine.runner import LEVELS, ModelRunner, RunnerInfo
from xinfer.engine.types import Batch

EOS = 256  # the first special token of `FakeTokenizer`

_POISON = -7  # in the cache where nothing was written, or what was there is freed
_SURE = 1e4  # logit of a scripted token

Tokens = NDArray[np.int32]
Words = NDArray[np.uint64]
Numbers = NDArray[np.float32]
Script = Mapping[int, int] | Callable[[list[int]], int | None]


def _mix(words: Words) -> Words:
    """Scramble 64-bit words (SplitMix64's finalizer)."""
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def _hash(tokens: Tokens, lengths: NDArray[np.int64]) -> Words:
    """Return one word for each row of `tokens` [K, L], of which the first `lengths[k]` count: [K]."""
    places = np.arange(tokens.shape[1], dtype=np.uint64)
    mixed = _mix(_mix(tokens.astype(np.uint64) + np.uint64(1)) + places * np.uint64(0x9E3779B97F4A7C15))
    counted: Words = np.where(places < lengths[:, None].astype(np.uint64), mixed, np.uint64(0))
    return _mix(counted.sum(1, dtype=np.uint64))


def _normal(hashes: Words, vocab_size: int) -> Numbers:
    """Return rows of roughly standard normal numbers [K, V]: sums of four 16-bit uniforms."""
    words = _mix(hashes[:, None] ^ _mix(np.arange(1, vocab_size + 1, dtype=np.uint64)))
    pieces = words.view(np.uint16).reshape(*words.shape, 4).astype(np.float32)
    numbers: Numbers = (pieces.sum(2) / np.float32(65536) - np.float32(2)) * np.float32(3**0.5)
    return numbers


def context_logits(context: Sequence[int], vocab_size: int) -> Numbers:
    """Return the logits [V] that `FakeRunner` gives after these tokens, without cache or batch."""
    tokens = np.array([context], np.int32)
    row: Numbers = _normal(_hash(tokens, np.array([len(context)])), vocab_size)[0]
    return row


class FakeRunner(ModelRunner):
    """Keeps tokens where a model keeps keys and values, and hashes a row's whole context into its logits.

    A token that was lost, a wrong block table or a row mixed up with another therefore change what is generated, or
    fail an `assert` that names the broken part of the `Batch` contract.

    Args:
        vocab_size, max_model_len, block_size, num_blocks: as in `RunnerInfo`.
        hash_size, kv_tokens, capabilities: as in `RunnerInfo`. With `decode_differs`, logits depend on how the tokens
            of the context were computed: several of a prompt in a call, or one alone; the two never in one call.
        max_logits_rows: rows of logits that one step may ask for; None for any number.
        script: tokens to be generated: by position, or by a function of the context; None leaves it to the hash.
        nan_rows: whether the logits after this context are NaN.
    """

    def __init__(
        self,
        *,
        vocab_size: int = 260,
        max_model_len: int = 512,
        block_size: int = 16,
        num_blocks: int = 256,
        hash_size: int = 16,
        kv_tokens: int = 0,
        capabilities: frozenset[str] = frozenset({"copy", "free"}),
        max_logits_rows: int | None = None,
        script: Script | None = None,
        nan_rows: Callable[[list[int]], bool] | None = None,
    ) -> None:
        self.info = RunnerInfo(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            block_size=block_size,
            num_blocks=num_blocks,
            hash_size=hash_size,
            kv_tokens=kv_tokens,
            levels=LEVELS,
            capabilities=capabilities,
        )
        self.max_logits_rows = max_logits_rows
        self.freed: list[int] = []
        self.steps = self.steps_ahead = 0
        self.closed = False
        self._script, self._nan_rows = script, nan_rows
        self._tokens: Tokens = np.full(num_blocks * block_size, _POISON, np.int32)
        self._places: Tokens = np.full(num_blocks * block_size, _POISON, np.int32)
        self._single: Tokens = np.zeros(num_blocks * block_size, np.int32)  # whether a token was computed alone

    def forward(self, batch: Batch) -> torch.Tensor:
        """Keep the new tokens, and hash each sampled row's context as it is read back from the cache."""
        assert not self.closed
        batch = self._seen(batch)
        self._check(batch)
        self.steps += 1
        self._tokens[batch.slot_mapping] = batch.token_ids
        self._places[batch.slot_mapping] = batch.positions
        if "decode_differs" in self.info.capabilities:
            self._single[batch.slot_mapping] = self._alone(batch)
        lengths = batch.positions[batch.sample_at].astype(np.int64) + 1
        contexts = self._read(batch, lengths)
        logits = torch.from_numpy(_normal(_hash(contexts, lengths), self.info.vocab_size))
        if self._script is not None or self._nan_rows is not None:
            for row, context, length in zip(logits, contexts, lengths, strict=True):
                self._alter(row, context[:length].tolist())
        return logits

    def copy(self, source: int, target: int, tokens: int) -> None:
        """Copy the beginning of one block into another."""
        size = self.info.block_size
        assert 0 < tokens <= size
        assert "copy" in self.info.capabilities
        for kept in (self._tokens, self._places, self._single):
            kept[target * size :][:tokens] = kept[source * size :][:tokens]

    def free(self, blocks: Sequence[int]) -> None:
        """Poison these blocks, so that nobody can go on reading them."""
        assert len(set(blocks)) == len(blocks), "a block is freed twice"
        assert all(0 <= block < self.info.num_blocks for block in blocks)
        self.freed += blocks
        for kept in (self._tokens, self._places):
            kept.reshape(-1, self.info.block_size)[list(blocks)] = _POISON

    def close(self) -> None:
        """Allow nothing more."""
        self.closed = True

    def _alone(self, batch: Batch) -> bool:
        """Whether each sequence of this step has a single token; some having one and others several is not allowed."""
        lengths = np.diff(batch.query_starts)
        assert (lengths == 1).all() or (lengths > 1).all(), "generated tokens share a step with a prompt"
        return bool((lengths == 1).all())

    def _seen(self, batch: Batch) -> Batch:
        """Return a batch with the tokens that the last step drew."""
        if batch.drawn is None:
            return batch
        assert "ahead" in self.info.capabilities
        self.steps_ahead += 1
        drawn, ids = batch.drawn.clamp(min=0).numpy(), batch.token_ids
        seen: Tokens = np.where(ids < 0, drawn[np.maximum(-1 - ids, 0)], ids).astype(np.int32)
        return replace(batch, token_ids=seen, drawn=None)

    def _slots(self, batch: Batch, rows: NDArray[np.intp], places: Tokens) -> NDArray[np.int64]:
        """Return where the block tables of these rows say that these places lie."""
        size = self.info.block_size
        return batch.block_tables[rows, places // size].astype(np.int64) * size + places % size

    def _read(self, batch: Batch, lengths: NDArray[np.int64]) -> Tokens:
        """Return the contexts of the sampled rows [K, L] by way of their block tables, checked; L is the longest."""
        owners = np.searchsorted(batch.query_starts, batch.sample_at, side="right") - 1
        places = np.arange(int(lengths.max(initial=0)), dtype=np.int32)
        slots = self._slots(batch, owners[:, None], places[None])
        inside = places < lengths[:, None]
        assert (slots[inside] >= 0).all(), "a context reaches past its blocks"
        assert (self._tokens[slots] != _POISON)[inside].all(), "a context has tokens that were never written, or freed"
        assert (self._places[slots] == places)[inside].all(), "a context has tokens of other positions"
        tokens: Tokens = self._tokens[slots] + self.info.vocab_size * self._single[slots]
        return tokens

    def _alter(self, row: torch.Tensor, context: list[int]) -> None:
        token = self._script(context) if callable(self._script) else (self._script or {}).get(len(context))
        if token is not None:
            row[token] = _SURE
        if self._nan_rows is not None and self._nan_rows(context):
            row[:] = torch.nan

    def _check(self, batch: Batch) -> None:
        """Hold the batch against its contract."""
        b, info = batch, self.info
        for name in ("token_ids", "positions", "query_starts", "context_lens", "block_tables", "sample_at", "adapters"):
            assert getattr(b, name).dtype == np.int32, name
        assert b.slot_mapping.dtype == np.int64
        total, count = len(b.token_ids), len(b.context_lens)
        assert b.positions.shape == b.slot_mapping.shape == (total,)
        assert b.query_starts.shape == (count + 1,)
        assert b.adapters.shape == (count,)
        assert len(b.block_tables) == count
        lengths = np.diff(b.query_starts)
        assert b.query_starts[0] == 0
        assert b.query_starts[-1] == total
        assert (lengths > 0).all(), "a sequence without new tokens"
        assert ((b.token_ids >= 0) & (b.token_ids < info.vocab_size)).all()
        assert (b.context_lens <= info.max_model_len).all()
        owners = np.repeat(np.arange(count), lengths)
        expected = np.arange(total) - b.query_starts[:-1][owners] + (b.context_lens - lengths)[owners]
        assert (b.positions == expected).all(), "positions don't end at context_lens"
        assert (b.slot_mapping == self._slots(b, owners, b.positions)).all(), "slot_mapping and block_tables differ"
        used = b.block_tables >= 0
        blocks = b.block_tables[used]
        assert ((blocks < info.num_blocks) & (blocks >= 0)).all()
        assert (b.block_tables[~used] == -1).all()
        assert (np.sort(~used, axis=1) == ~used).all(), "a hole in a block table"
        assert (used.sum(1) * info.block_size >= b.context_lens).all(), "too few blocks"
        assert len(np.unique(b.slot_mapping)) == total, "two tokens go to one place"
        assert (np.diff(b.sample_at) > 0).all()
        assert ((b.sample_at >= 0) & (b.sample_at < total)).all()
        assert self.max_logits_rows is None or len(b.sample_at) <= self.max_logits_rows


class FakeTokenizer:
    """A token is a byte; ids from 256 on are special tokens, written `<|256|>`."""

    def encode(self, text: str) -> list[int]:
        """Return a text's bytes."""
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of these bytes; those that make no character become U+FFFD."""
        special = "" if skip_special_tokens else "<|{}|>"
        return b"".join(bytes([t]) if t < EOS else special.format(t).encode() for t in token_ids).decode(
            errors="replace"
        )
