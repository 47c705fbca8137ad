"""Blocks have one owner or agreed sharers, and what the cache gives a sequence is what computing it would give."""

from contextlib import suppress
from itertools import count

import pytest
from engines import check_pool, pool_of, sequence

from xinfer.engine.kv_cache import BlockPool

SIZES = [1, 2, 3, 8, 16, 24, 64, 512]  # the last is a row of its own for each sequence


def compute(pool, tokens, salt=""):
    """Admit a sequence, compute the rest of it, and tell the cache."""
    s = sequence(tokens, salt)
    assert pool.admit(s, len(tokens) - 1)
    assert pool.grow(s, len(tokens))
    s.num_computed = len(tokens)
    pool.register(s)
    return s


def grown(pool, tokens):
    """A sequence with blocks for all of its tokens, of which none is known."""
    s = sequence(tokens)
    assert pool.admit(s, 0)
    assert pool.grow(s, len(s.token_ids))
    return s


def hit(pool, tokens, salt=""):
    """How many tokens of such a prompt the cache has, looked up and given back."""
    s = sequence(tokens, salt)
    assert pool.admit(s, len(tokens) - 1)
    found = s.num_computed
    pool.release(s)
    return found


def grain_of(size, hash_size):
    """The smallest length of at least `hash_size` that ends where blocks end, or divides them."""
    whole = [n for n in range(hash_size, hash_size + size + 1) if n % size == 0]
    return hash_size if size % hash_size == 0 else whole[0]


# What is found


@pytest.mark.parametrize("hash_size", [4, 16])
@pytest.mark.parametrize("size", SIZES)
def test_a_hit_is_the_longest_multiple_of_the_grain_that_leaves_a_token_to_compute(size, hash_size):
    grain = grain_of(size, hash_size)
    pool = pool_of(size, 4096 // size, hash_size)
    prompt = list(range(120))
    pool.release(compute(pool, prompt))
    for length in range(1, 121):
        assert hit(pool, prompt[:length]) == (length - 1) // grain * grain
    assert hit(pool, [*prompt, 1, 2, 3]) == 120 // grain * grain


@pytest.mark.parametrize("size", SIZES)
def test_a_hit_ends_before_the_first_token_that_differs(size):
    pool = pool_of(size, 4096 // size)
    grain = grain_of(size, 4)
    prompt = list(range(100))
    pool.release(compute(pool, prompt))
    for place in range(0, 100, 7):
        other = [*prompt[:place], 200, *prompt[place + 1 :]]
        assert hit(pool, other) == place // grain * grain


@pytest.mark.parametrize("size", [s for s in SIZES if s > 4])
def test_without_copies_only_whole_blocks_are_shared(size):
    pool = pool_of(size, 4096 // size, copy=False)
    prompt = list(range(100))
    pool.release(compute(pool, prompt))
    whole = max(grain_of(size, 4), size)
    for length in range(1, 101):
        assert hit(pool, prompt[:length]) == (length - 1) // whole * whole
    assert not pool.copies


def test_a_cache_that_is_off_finds_nothing():
    pool = pool_of(prefix_cache=False)
    s = compute(pool, range(12))
    assert sorted(pool.release(s)) == [0, 1, 2]
    assert hit(pool, range(12)) == 0


def test_the_middle_of_another_text_is_no_hit():
    pool = pool_of()
    pool.release(compute(pool, range(12)))
    assert hit(pool, range(4, 12)) == 0


def test_no_salt_passes_for_the_hash_of_a_text():
    pool = pool_of(4, 16, 4)
    for first in count():  # until a hash can be written as a salt
        begun = compute(pool, [first % 7, first // 7, 1, 1, 5, 5, 5, 5, 0])
        pool.release(begun)
        with suppress(UnicodeDecodeError):
            salt = begun.chain[0].decode()
            break
    assert hit(pool, [5, 5, 5, 5, 0], salt) == 0


def test_each_salt_has_a_cache_of_its_own():
    pool = pool_of()
    for salt in ("", "a", "b"):
        assert hit(pool, range(9), salt) == 0
        pool.release(compute(pool, range(9), salt))
    assert [hit(pool, range(9), salt) for salt in ("", "a", "b", "ab")] == [8, 8, 8, 0]


def test_of_two_texts_with_one_hash_neither_gets_the_others_tokens(monkeypatch):
    monkeypatch.setattr(BlockPool, "_hash", lambda self, s, place: bytes([place]))
    pool = pool_of()
    pool.release(compute(pool, range(12)))
    assert hit(pool, range(100, 112)) == 0
    assert hit(pool, [0, 1, 2, 3, *range(100, 109)]) == 4
    assert hit(pool, range(12)) == 8


# What is forgotten (V10)


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("size", [1, 4, 8])
def test_a_hit_stops_at_the_first_block_that_is_gone(size, missing):
    pool = pool_of(size, 64 // size, grain=8)
    blocks = compute(pool, range(25))
    gone = blocks.blocks[missing * 8 // size]
    pool.release(blocks)
    pool._idle.move_to_end(gone, last=False)
    taken = grown(pool, range(100, 100 + size * (len(pool._free) + 1)))
    assert gone in taken.blocks
    pool.release(taken)
    assert hit(pool, range(25)) == missing * 8


@pytest.mark.parametrize(("taken", "first", "second"), [(0, 12, 12), (1, 12, 8), (3, 12, 0), (4, 8, 0), (6, 0, 0)])
def test_the_longest_idle_is_forgotten_first_and_a_texts_end_before_its_start(taken, first, second):
    for tokens, left in ((range(13), first), (range(50, 63), second)):
        pool = pool_of(4, 6)
        pool.release(compute(pool, range(12)))
        pool.release(compute(pool, range(50, 62)))
        assert hit(pool, range(13)) == 12  # used again, so the other one is older now
        pool.release(grown(pool, [200] * 4 * taken))
        assert hit(pool, tokens) == left


def test_blocks_never_used_go_before_those_that_are_known():
    pool = pool_of(4, 8)
    pool.release(compute(pool, range(12)))
    pool.release(grown(pool, [200] * 20))
    assert hit(pool, range(13)) == 12


def test_a_known_block_that_is_free_is_not_told_to_be_free():
    pool = pool_of()
    freed = pool.release(grown(pool, range(3)))
    assert len(freed) == 1
    pool.release(compute(pool, range(4)))  # in the block that was just freed
    assert pool.only_free(freed) == []
    assert hit(pool, range(5)) == 4


# Sharing and copies


def shared(pool, tokens, count=2):
    """A sequence that has computed these tokens, and those that were forked from it."""
    first = compute(pool, tokens)
    others = [sequence(tokens) for _ in range(count - 1)]
    for other in others:
        pool.fork(first, other)
    return [first, *others]


@pytest.mark.parametrize("length", [1, 3, 5, 6, 7])
def test_who_writes_into_a_shared_block_gets_a_copy_and_the_last_one_writes_in_place(length):
    pool = pool_of()
    samples = shared(pool, range(length), 3)
    last = samples[0].blocks[-1]
    assert pool.num_used == -(-length // 4)
    for s in samples:
        assert pool.grow(s, length + 1)
        check_pool(pool, samples)
    assert [s.blocks[-1] == last for s in samples] == [False, False, True]
    assert pool.copies == [(last, s.blocks[-1], length % 4) for s in samples[:2]]
    assert len({s.blocks[-1] for s in samples}) == 3
    assert len({tuple(s.blocks[:-1]) for s in samples}) == 1


def test_who_begins_a_block_of_its_own_copies_nothing():
    pool = pool_of()
    samples = shared(pool, range(8), 3)
    for s in samples:
        assert pool.grow(s, 9)
    assert not pool.copies
    assert len({s.blocks[-1] for s in samples}) == 3
    assert pool.num_used == 5


def test_without_copies_a_fork_computes_the_last_block_again():
    pool = pool_of(copy=False)
    first, other = shared(pool, range(7))
    assert (other.blocks, other.num_computed, other.num_known) == (first.blocks[:1], 4, 1)
    assert pool.grow(other, 8)
    assert pool.grow(first, 8)
    assert not pool.copies
    check_pool(pool, [first, other])


def test_a_fork_without_a_free_block_waits_for_one():
    pool = pool_of(4, 2)
    first, other = shared(pool, range(7))
    assert not pool.grow(first, 8)
    assert first.blocks == other.blocks
    pool.release(other)
    assert pool.grow(first, 8)
    assert not pool.copies


@pytest.mark.parametrize("size", [8, 16, 512])
def test_the_beginning_of_a_block_is_copied_where_the_rest_differs(size):
    pool = pool_of(size, 8, grain=4)
    first = compute(pool, range(7))
    other = compute(pool, [0, 1, 2, 3, 9, 9, 9])
    assert pool.copies == [(first.blocks[0], other.blocks[0], 4)]
    pool.release(first)
    assert hit(pool, [0, 1, 2, 3, 9, 9, 9, 9, 1]) == 4  # 9 9 9 was no whole chunk
    check_pool(pool, [other])


def test_where_there_is_no_room_for_a_copy_nothing_is_copied():
    pool = pool_of(8, 1, grain=4)
    pool.release(compute(pool, range(7)))
    s = sequence(range(8))
    assert pool.admit(s, 7)
    assert (s.num_computed, s.blocks, pool.copies) == (0, [], [])
    check_pool(pool, [s])


# Room


@pytest.mark.parametrize(("blocks", "kv_tokens"), [(8, 0), (16, 30)])
def test_what_does_not_fit_changes_nothing(blocks, kv_tokens):
    pool = pool_of(4, blocks, kv_tokens=kv_tokens)
    pool.release(compute(pool, range(12)))
    holder = compute(pool, range(50, 66))
    before = hit(pool, range(13))
    assert before == 12
    big = sequence(range(100, 117))
    for _ in range(3):
        assert not pool.admit(big, 16)
        assert (big.blocks, big.num_computed) == ([], 0)
    assert not pool.grow(holder, 33)
    assert len(holder.blocks) == 4
    check_pool(pool, [holder])
    assert hit(pool, range(13)) == before, "what was known is forgotten, though nobody gained by it"


def test_tokens_are_counted_where_memory_holds_fewer_than_the_blocks():
    pool = pool_of(64, 8, kv_tokens=100, prefix_cache=False)
    first = grown(pool, range(60))
    assert not pool.admit(sequence(range(60)), 0)
    short = grown(pool, range(40))
    assert not pool.grow(first, 61)
    pool.release(short)
    first.num_computed = 60
    assert pool.grow(first, 100)
    assert not pool.grow(first, 101)
    pool.release(first)
    assert pool._tokens == 0


def test_known_blocks_make_room_for_tokens():
    pool = pool_of(64, 8, grain=16, kv_tokens=125)
    pool.release(compute(pool, range(60)))
    assert hit(pool, range(60)) == 48
    s = compute(pool, range(100, 166))
    assert hit(pool, range(40)) == 0
    check_pool(pool, [s])
