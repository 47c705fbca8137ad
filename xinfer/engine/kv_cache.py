"""The KV cache's blocks: which are free, which are held. Where a block's memory lies is the runner's affair."""

__all__ = ["BlockPool"]

from xinfer.engine.types import Sequence


class BlockPool:
    """Hands out blocks of `block_size` tokens; the last one given back first, then the lowest that was never used."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks, self.block_size = num_blocks, block_size
        self._free = list(range(num_blocks - 1, -1, -1))
        self._held = [False] * num_blocks

    @property
    def num_free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that some sequence holds."""
        return self.num_blocks - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Return how many blocks `tokens` tokens take."""
        return -(-tokens // self.block_size)

    def grow(self, sequence: Sequence, tokens: int) -> bool:
        """Give the sequence the blocks that `tokens` tokens need, or nothing and False where too few are free."""
        missing = self.blocks_for(tokens) - len(sequence.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            block = self._free.pop()
            self._held[block] = True
            sequence.blocks.append(block)
        return True

    def release(self, sequence: Sequence) -> list[int]:
        """Take all of a sequence's blocks back and return them."""
        blocks, sequence.blocks = sequence.blocks, []
        self._free.extend(reversed(blocks))
        for block in blocks:
            self._held[block] = False
        sequence.num_computed = 0
        return blocks

    def only_free(self, blocks: list[int]) -> list[int]:
        """Return those of `blocks` that nobody holds, each once."""
        return sorted({block for block in blocks if not self._held[block]})
