"""Whatever sequences do with the cache, each reads its own tokens: against a model that keeps every place's context."""

from collections import Counter

from engines import check_pool, pool_of, sequence
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from xinfer.engine.types import Sequence


class Cache(RuleBasedStateMachine):
    """Memory holds for each token its whole context, so what is read in a wrong place or at a wrong time shows."""

    @initialize(
        size=st.sampled_from([1, 2, 3, 4, 8, 32]),
        grain=st.sampled_from([2, 4]),
        blocks=st.integers(3, 12),
        copy=st.booleans(),
        bounded=st.booleans(),
    )
    def begin(self, size, grain, blocks, copy, bounded):
        self.bounded = bounded and size > 2
        kv_tokens = blocks * size * 2 // 3 if self.bounded else 0
        self.pool = pool_of(size, blocks, grain, copy, kv_tokens)
        self.memory, self.running, self.freed = {}, [], []
        self.known, self.told = {}, Counter()

    def move(self):
        """Carry out the copies."""
        for source, target, tokens in self.pool.copies:
            for place in range(tokens):
                self.memory[target, place] = self.memory[source, place]
        self.pool.copies.clear()

    def context(self, s, place):
        return s.request.cache_salt, tuple(s.token_ids[: place + 1])

    def taken(self, blocks):
        """These blocks are somebody's own now: nothing that was in them is known."""
        self.known = {prefix: there for prefix, there in self.known.items() if not set(there) & set(blocks)}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=14), salt=st.sampled_from(["", "", "a"]))
    def admit(self, tokens, salt):
        s, pool = sequence(tokens, salt), self.pool
        most = len(tokens) - 1
        wanted = 0
        while wanted + pool.grain <= most and (salt, tuple(tokens[: wanted + pool.grain])) in self.known:
            wanted += pool.grain
        if not pool.admit(s, most):
            assert self.bounded or pool.blocks_for(len(tokens)) > pool.num_free
            return
        whole = wanted // pool.block_size * pool.block_size
        if self.bounded:
            assert s.num_computed <= wanted
        else:
            assert s.num_computed in (wanted, whole)
            copies = wanted > whole and pool._can_copy
            assert s.num_computed == (wanted if copies else whole) or pool.num_free < 1 + pool.blocks_for(len(tokens))
        self.taken(s.blocks[s.num_computed // pool.block_size :])
        self.told[s] = s.num_computed // pool.grain
        self.running.append(s)
        self.move()

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), max_size=5), count=st.integers(1, 9))
    def compute(self, data, tokens, count):
        s = data.draw(st.sampled_from(self.running))
        s.token_ids += tokens
        end = min(s.num_computed + count, len(s.token_ids))
        before, free = list(s.blocks), self.pool.num_free
        if not self.pool.grow(s, end):
            assert s.blocks == before
            assert self.bounded or free < self.pool.blocks_for(end) - len(before) + 1
            return
        self.taken(set(s.blocks) - set(before))
        self.move()
        for place in range(s.num_computed, end):
            self.memory[s.blocks[place // self.pool.block_size], place % self.pool.block_size] = self.context(s, place)
        s.num_computed = end
        self.pool.register(s)
        grain, size = self.pool.grain, self.pool.block_size
        while (self.told[s] + 1) * grain <= end:
            first, last = self.told[s] * grain, (self.told[s] + 1) * grain
            self.told[s] += 1
            blocks = tuple(s.blocks[first // size : -(-last // size)])
            self.known.setdefault((s.request.cache_salt, tuple(s.token_ids[:last])), blocks)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def fork(self, data):
        s = data.draw(st.sampled_from(self.running))
        other = Sequence(s.request, list(s.token_ids), s.limit)
        self.pool.fork(s, other)
        self.told[other] = min(self.told[s], other.num_computed // self.pool.grain)
        self.running.append(other)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def release(self, data):
        s = data.draw(st.sampled_from(self.running))
        self.running.remove(s)
        self.freed += self.pool.release(s)
        assert (s.blocks, s.num_computed) == ([], 0)

    @rule()
    def free(self):
        told = self.pool.only_free(self.freed)
        self.memory = {place: kept for place, kept in self.memory.items() if place[0] not in told}
        self.freed.clear()

    def reads(self, blocks, salt, tokens, first):
        """Assert that these blocks hold the tokens from `first` on, each after those before it."""
        size = self.pool.block_size
        for place in range(first, len(tokens)):
            block = blocks[place // size - first // size]
            assert self.memory.get((block, place % size)) == (salt, tuple(tokens[: place + 1]))

    @invariant()
    def books_agree(self):
        if hasattr(self, "pool"):
            check_pool(self.pool, self.running)

    @invariant()
    def everyone_reads_what_is_theirs(self):
        for s in getattr(self, "running", ()):
            self.reads(s.blocks, s.request.cache_salt, s.token_ids[: s.num_computed], 0)

    @invariant()
    def what_is_known_is_there(self):
        if hasattr(self, "pool"):
            there = Counter(chunk.blocks for chunk in self.pool._chunks.values())
            if self.bounded:
                assert not there - Counter(self.known.values())
            else:
                assert there == Counter(self.known.values())
                for (salt, tokens), blocks in self.known.items():
                    self.reads(blocks, salt, tokens, len(tokens) - self.pool.grain)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=120, stateful_step_count=30)
