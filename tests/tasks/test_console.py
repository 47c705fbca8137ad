"""Texts of several requests come out one after the other, whatever the order in which they were made."""

import io

from hypothesis import given
from hypothesis import strategies as st

from xinfer.tasks.console import TextWriter


@given(st.lists(st.lists(st.text("ab\n", max_size=3), max_size=4), max_size=5), st.randoms(use_true_random=False))
def test_texts_come_in_the_order_of_their_requests(texts: list[list[str]], rng):
    stream = io.StringIO()
    writer = TextWriter(stream)
    left = {index: list(pieces) for index, pieces in enumerate(texts)}
    while left:
        index = rng.choice(list(left))
        if left[index]:
            writer.write(index, left[index].pop(0))
        else:
            writer.finish(index, f"<{index}>")
            del left[index]
    assert stream.getvalue() == "".join("".join(pieces) + f"<{i}>\n" for i, pieces in enumerate(texts))


def test_the_first_unfinished_text_is_shown_as_it_comes():
    stream = io.StringIO()
    writer = TextWriter(stream)
    writer.write(1, "later")
    writer.write(0, "now")
    assert stream.getvalue() == "now"
    writer.finish(0, "")
    assert stream.getvalue() == "now\nlater"


def test_a_silent_writer_writes_nothing():
    stream = io.StringIO()
    writer = TextWriter(stream, silent=True)
    writer.write(0, "a")
    writer.finish(0, "b")
    assert stream.getvalue() == ""
