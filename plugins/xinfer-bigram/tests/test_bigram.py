"""The counts are those of a loop over the text."""

import math
from collections import Counter

from xinfer_bigram import END, learn


def test_probabilities_are_counted_pairs():
    text, smoothing = b"abracadabra", 0.5
    pairs = Counter(zip(text, [*text[1:], END], strict=True))
    logits = learn(text, smoothing)
    for last in b"abr":
        total = sum(n for (first, _), n in pairs.items() if first == last) + smoothing * 257
        for following in (*b"abcdr", END):
            expected = math.log((pairs[last, following] + smoothing) / total)
            assert math.isclose(logits[last, following].item(), expected, rel_tol=1e-5, abs_tol=1e-6)
    assert logits.exp().sum(1).allclose(logits.new_ones(257))


def test_an_empty_text_says_nothing():
    assert learn(b"", 1.0).exp().allclose(learn(b"", 1.0).new_full((257, 257), 1 / 257))
