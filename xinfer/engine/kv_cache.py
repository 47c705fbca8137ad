"""The KV cache's blocks: who holds them, and which hold the beginning of a text that may come again.

Where a block's memory lies is the runner's affair; here a block is a number. Reuse works in chunks of `hash_size`
tokens: a chunk is known by a hash of all tokens up to its end, and once its keys and values are computed, a sequence
that begins alike takes them over: the same blocks where they are whole, else a copy of a block's beginning.
"""

__all__ = ["BlockPool", "Copy"]

import hashlib
from array import array
from collections import OrderedDict
from dataclasses import dataclass

from xinfer.engine.runner import RunnerInfo
from xinfer.engine.types import Sequence

Copy = tuple[int, int, int]  # of a block, to a block, so many tokens


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens whose keys and values are in these blocks."""

    blocks: tuple[int, ...]
    tokens: bytes


class BlockPool:
    """Hands out blocks of `block_size` tokens and counts who holds each.

    A block that nobody holds is free; if it has known chunks it keeps them until it is needed: those that were never
    used go first, then the one that was let go longest ago. Sequences share blocks; before one writes into a block that
    another holds too, it gets a copy.

    Args:
        info: the runner's; with `kv_tokens` below `num_blocks * block_size`, tokens are counted as well as blocks.
        prefix_cache: whether chunks are remembered.

    Attributes:
        copies: (source, target, tokens) that the runner has yet to make, in this order, before it computes.
    """

    def __init__(self, info: RunnerInfo, prefix_cache: bool = True) -> None:
        size, grain = info.block_size, info.hash_size
        self.num_blocks, self.block_size = info.num_blocks, size
        self.grain = grain if size % grain == 0 else -(-grain // size) * size  # blocks in a chunk, or chunks in a block
        self.kv_tokens, self._can_copy, self._caches = info.kv_tokens, "copy" in info.capabilities, prefix_cache
        self._free = list(range(info.num_blocks - 1, -1, -1))  # the last given back first, then the lowest
        self._idle: OrderedDict[int, None] = OrderedDict()  # free, with known chunks; the longest idle first
        self._holders = [0] * info.num_blocks
        self._filled = [0] * info.num_blocks  # tokens in each block
        self._tokens = 0
        self._chunks: dict[bytes, _Chunk] = {}
        self._known: dict[int, list[bytes]] = {}  # hashes of the chunks in a block
        self.copies: list[Copy] = []

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free) + len(self._idle)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - self.num_free

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    # ---- a sequence's blocks

    def admit(self, sequence: Sequence, most: int) -> bool:
        """Give a sequence without blocks what the cache has of its beginning, at most `most` tokens.

        Returns False, and changes nothing, where there is no room for all its tokens.
        """
        chunks = self._find(sequence, most)
        whole, rest = divmod(len(chunks) * self.grain, self.block_size)
        shared = [self._block(chunks, place) for place in range(whole)]
        source = (chunks[-1].blocks[0], rest) if rest and self._can_copy else None
        return self._attach(sequence, shared, source) or (source is not None and self._attach(sequence, shared, None))

    def _attach(self, sequence: Sequence, shared: list[int], source: tuple[int, int] | None) -> bool:
        """Give the sequence these whole blocks, and a copy of `source`'s first tokens, if all the rest has room too."""
        held = shared if source is None else [*shared, source[0]]
        for block in held:
            self._hold(block)
        total, whole = len(sequence.token_ids), len(shared)
        fits = self.blocks_for(total) - whole <= self.num_free and self._room(total - whole * self.block_size)
        if fits:
            sequence.blocks, sequence.num_computed = list(shared), whole * self.block_size
            if source is not None:
                sequence.blocks.append(self._take())
                sequence.num_computed += source[1]
                self._copy(source[0], sequence.blocks[-1], source[1])
                self._let_go(source[0])
            sequence.num_known = sequence.num_computed // self.grain
        else:
            for block in reversed(held):
                self._let_go(block)
        return fits

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence blocks of its own for `tokens` tokens in all; nothing and False where too few are free."""
        blocks, size = sequence.blocks, self.block_size
        place, inside = divmod(sequence.num_computed, size)
        missing = -(-tokens // size) - len(blocks)
        shared = inside > 0 and self._holders[blocks[place]] > 1
        if missing + shared > len(self._free) + len(self._idle):
            return False
        if self._bounded:
            there = sum(self._filled[block] for block in blocks[place:]) * (not shared)
            if not self._room(tokens - place * size - there):
                return False
        if shared:
            source, blocks[place] = blocks[place], self._take()
            self._copy(source, blocks[place], inside)
            self._let_go(source)
        for _ in range(missing):
            blocks.append(self._take())
        if self._bounded:
            for number in range(place, -(-tokens // size)):
                self._fill(blocks[number], max(self._filled[blocks[number]], min(size, tokens - number * size)))
        return True

    def fork(self, source: Sequence, target: Sequence, least: int = 1) -> None:
        """Let `target` share what `source` has computed; what it can't, no fewer than `least`, it computes again."""
        shared = source.blocks[: self.blocks_for(source.num_computed)]
        target.num_computed = source.num_computed
        if not self._can_copy and source.num_computed % self.block_size:
            shared = shared[: max(0, source.num_computed - least) // self.block_size]
            target.num_computed = len(shared) * self.block_size
        for block in shared:
            self._holders[block] += 1
        target.blocks, target.chain = shared, list(source.chain)
        target.num_known = min(source.num_known, target.num_computed // self.grain)

    def release(self, sequence: Sequence) -> list[int]:
        """Take all of a sequence's blocks back; return those of which nothing is left to know."""
        blocks, sequence.blocks = sequence.blocks, []
        sequence.num_computed = 0
        # A text's end is forgotten before its start.
        return [block for block in reversed(blocks) if self._let_go(block)]

    def only_free(self, blocks: list[int]) -> list[int]:
        """Return those of `blocks` that nobody holds and of which nothing is known, each once."""
        return sorted({block for block in blocks if not self._holders[block] and block not in self._known})

    # ---- what is known

    def register(self, sequence: Sequence, most: int | None = None) -> None:
        """Remember the chunks that are now computed, of the first `most` tokens or all."""
        if not self._caches:
            return
        end = sequence.num_computed if most is None else min(sequence.num_computed, most)
        while (sequence.num_known + 1) * self.grain <= end:
            place = sequence.num_known
            sequence.num_known += 1
            key = self._hash(sequence, place)
            if key not in self._chunks:
                first, last = place * self.grain // self.block_size, ((place + 1) * self.grain - 1) // self.block_size
                blocks = tuple(sequence.blocks[first : last + 1])
                self._chunks[key] = _Chunk(blocks, self._bytes(sequence, place))
                for block in blocks:
                    self._known.setdefault(block, []).append(key)

    def _find(self, sequence: Sequence, most: int) -> list[_Chunk]:
        """Return the known chunks from the sequence's beginning, up to the first that is missing."""
        found: list[_Chunk] = []
        while self._caches and (len(found) + 1) * self.grain <= most:
            chunk = self._chunks.get(self._hash(sequence, len(found)))
            if chunk is None or chunk.tokens != self._bytes(sequence, len(found)):
                break
            found.append(chunk)
        return found

    def _hash(self, sequence: Sequence, place: int) -> bytes:
        """Return the hash of the sequence's tokens up to the end of a chunk; those before it were asked for before."""
        chain = sequence.chain
        if place == len(chain):
            # The salt is hashed by itself first, and in its own way, so that none can pass for the hash of a text.
            salt = sequence.request.cache_salt.encode()
            before = chain[-1] if chain else hashlib.blake2b(salt, digest_size=16, person=b"salt").digest()
            chain.append(hashlib.blake2b(before + self._bytes(sequence, place), digest_size=16).digest())
        return chain[place]

    def _bytes(self, sequence: Sequence, place: int) -> bytes:
        return array("i", sequence.token_ids[place * self.grain : (place + 1) * self.grain]).tobytes()

    def _block(self, chunks: list[_Chunk], place: int) -> int:
        """Return the block that holds the whole of a sequence's block `place`: that of the chunk which completes it."""
        chunk = ((place + 1) * self.block_size - 1) // self.grain
        return chunks[chunk].blocks[place - chunk * self.grain // self.block_size]

    # ---- single blocks

    @property
    def _bounded(self) -> bool:
        return self.kv_tokens < self.num_blocks * self.block_size

    def _room(self, tokens: int) -> bool:
        """Whether memory holds so many tokens more, once idle blocks have made room; if not, they are kept."""
        if not self._bounded or self._tokens + tokens <= self.kv_tokens:
            return True
        if self._tokens + tokens - sum(self._filled[block] for block in self._idle) > self.kv_tokens:
            return False
        while self._tokens + tokens > self.kv_tokens:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
            self._free.append(block)
        return True

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._idle.popitem(last=False)
            self._forget(block)
        self._holders[block] = 1
        return block

    def _hold(self, block: int) -> None:
        if not self._holders[block]:
            del self._idle[block]
        self._holders[block] += 1

    def _let_go(self, block: int) -> bool:
        """Return whether nobody holds the block any more and nothing in it is known."""
        self._holders[block] -= 1
        assert self._holders[block] >= 0, "a block was let go by somebody who did not hold it"
        if self._holders[block]:
            return False
        if block in self._known:
            self._idle[block] = None
            return False
        self._fill(block, 0)
        self._free.append(block)
        return True

    def _forget(self, block: int) -> None:
        for key in self._known.pop(block):
            chunk = self._chunks.get(key)
            if chunk is not None and block in chunk.blocks:
                del self._chunks[key]
        self._fill(block, 0)

    def _copy(self, source: int, target: int, tokens: int) -> None:
        self.copies.append((source, target, tokens))
        self._fill(target, tokens)

    def _fill(self, block: int, tokens: int) -> None:
        self._tokens += tokens - self._filled[block]
        self._filled[block] = tokens
