"""Texts of several requests come out one after the other, whatever the order in which they were made."""

import io

from hypothesis import given
from hypothesis import strategies as st

from xinfer.tasks.console import TextWriter, show_summary


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


FIGURES = {
    "requests": 2,
    "prompt_tokens": 60,
    "cached_tokens": 0,
    "generated_tokens": 32,
    "sampling": {"summary": "greedy"},
    "seed": 7,
    **dict.fromkeys(("prefill_ms", "prefill_tok_s", "decode_ms", "decode_tok_s", "ttft_ms", "tpot_ms", "output_tok_s")),
    "resident_weight_bytes": 1 << 30,
    "kv_cache_bytes": 1 << 30,
    "peak_memory_bytes": 1 << 30,
    "dtype": "float32",
    "device": "cpu",
}


def test_the_summary_tells_of_cache_and_guesses_only_where_there_were_any(capsys):
    show_summary(FIGURES, None, None)
    said = capsys.readouterr().err
    assert "prefix cache" not in said
    assert "guessed" not in said
    guesses = {"proposed_tokens": 40, "acceptance_rate": 0.25, "steps_switched_off": 3, "decode_steps": 20}
    show_summary(FIGURES | {"cached_tokens": 48, "speculation": guesses}, None, None)
    said = capsys.readouterr().err
    assert "tokens, 48 of them in the prefix cache" in said
    assert "tokens, 25% of them right, switched off in 3 of 20 steps" in said
