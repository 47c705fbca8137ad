"""Streamed text is whole characters, at once and unchanged, up to where a stop string begins."""

import pytest
import tokenizers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers

from xinfer.engine.detokenizer import IncrementalDecoder, StopMatcher, TextStream
from xinfer.testing.fake import FakeTokenizer

thorough = settings(max_examples=250)

BAD = "\N{REPLACEMENT CHARACTER}"
CORPUS = [
    "the cat sat on the mat, café naïve ďáblík",
    "汉字汉语漢字 日本語の文字",
    "😀😃😄 один два три",
    "John Smith world",
] * 4


def byte_characters():
    """GPT-2's table from the characters of its vocabulary to bytes."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(others)}


class Bytes:
    """A token is a byte."""

    def __init__(self):
        self.decode = FakeTokenizer().decode

    def encode(self, text):
        return FakeTokenizer().encode(text)

    def bytes_of(self, ids):
        return bytes(ids)


class ByteLevel:
    """GPT-2's kind, with merges that cut characters anywhere."""

    def __init__(self):
        backend = tokenizers.Tokenizer(models.BPE())
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator(CORPUS, trainer)
        backend.add_special_tokens(["<|end|>"])
        backend.add_tokens([AddedToken(text, special=False, normalized=False) for text in ("<think>", "</think>")])
        self.backend = backend
        self._table = byte_characters()

    def encode(self, text):
        return self.backend.encode(text).ids

    def decode(self, ids):
        return self.backend.decode(ids)

    def bytes_of(self, ids):
        return bytes(self._table[character] for i in ids for character in self.backend.id_to_token(i))


class ByteFallback:
    """SentencePiece's kind: words begin with a low line, and what is not in the vocabulary is bytes."""

    def __init__(self):
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcdeJohnwrldté"]
        words = ["▁J", "▁Jo", "▁Joh", "▁John", "▁w", "▁wo", "▁wor", "▁worl", "▁world", "▁▁"]
        merges = [(word[:-1], word[-1]) for word in words]
        vocabulary = {token: i for i, token in enumerate(dict.fromkeys([*tokens, *words]))}
        backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, byte_fallback=True, unk_token="<unk>"))
        backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        backend.decoder = decoders.Sequence(
            [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
        backend.add_special_tokens(["<s>", "</s>"])
        self.backend = backend

    def encode(self, text):
        return self.backend.encode(text).ids

    def decode(self, ids):
        return self.backend.decode(ids)

    def id(self, token):
        return self.backend.token_to_id(token)

    def bytes_of(self, ids):
        tokens = [self.backend.id_to_token(i) for i in ids]
        pieces = [bytes([i - 3]) if 3 <= i < 259 else t.encode() for i, t in zip(ids, tokens, strict=True)]
        return b"".join(pieces).replace("▁".encode(), b" ").removeprefix(b" ")


TOKENIZERS = [Bytes(), ByteLevel(), ByteFallback()]
each_tokenizer = pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=lambda t: type(t).__name__)

characters = st.sampled_from("ab cdeJohn wrld té ď汉字日😀😃👍🏽\n") | st.characters(exclude_categories=["Cs"])
texts = st.text(characters.filter(lambda c: c not in f"{BAD}▁"), min_size=1, max_size=60)


def whole(data):
    """The text of the whole characters at the beginning of these bytes."""
    return data.decode(errors="ignore")


def stream(tokenizer, ids, prompt=()):
    """The delta of each token, and the tail."""
    decoder = IncrementalDecoder(tokenizer.decode, prompt)
    return [decoder.push(i) for i in ids], decoder.flush()


def test_the_tokenizers_of_these_tests_cut_characters():
    for tokenizer in TOKENIZERS:
        assert sum(BAD in tokenizer.decode([i]) for i in tokenizer.encode("汉字 日本語 😀")) >= 5
    mixed = [TOKENIZERS[1].decode([i]) for i in range(256, 400)]
    assert any(BAD in text and text.strip(BAD) for text in mixed)


@each_tokenizer
@thorough
@given(text=texts)
@example(text="😀😃😄👍🏽" * 8)
@example(text="汉" * 60)
@example(text="John é汉 world ď John")
@example(text="   a  b ")
def test_every_token_brings_all_characters_that_it_completes_and_no_other(tokenizer, text):
    ids = tokenizer.encode(text)
    deltas, tail = stream(tokenizer, ids)
    for count in range(1, len(ids) + 1):
        assert "".join(deltas[:count]) == whole(tokenizer.bytes_of(ids[:count]))
    assert "".join(deltas) == text
    assert tail == ""


@each_tokenizer
@thorough
@given(text=texts, data=st.data())
def test_after_a_prompt_comes_only_what_the_prompt_did_not_have(tokenizer, text, data):
    ids = tokenizer.encode(text)
    cut = data.draw(st.integers(0, len(ids)))
    deltas, tail = stream(tokenizer, ids[cut:], ids[:cut])
    assert whole(tokenizer.bytes_of(ids[:cut])) + "".join(deltas) == text
    assert tail == ""


@pytest.mark.parametrize("tokenizer", TOKENIZERS[:2], ids=lambda t: type(t).__name__)
@thorough
@given(data=st.data())
def test_any_tokens_make_the_text_of_their_bytes_up_to_a_broken_end(tokenizer, data):
    ids = data.draw(st.lists(st.integers(0, 255), max_size=150))
    ids = [i for i in ids if tokenizer is not TOKENIZERS[1] or tokenizer.backend.id_to_token(i) in byte_characters()]
    text = tokenizer.bytes_of(ids).decode(errors="replace")
    deltas, tail = stream(tokenizer, ids)
    assert "".join(deltas).rstrip(BAD) == text.rstrip(BAD)
    assert (tail == BAD) == text.endswith(BAD)


# T05, T07, T08: characters in pieces, unfinished, and never finished


@pytest.mark.parametrize("text", ["ď", "😀", "😃", "ď😀😃 x"])
@each_tokenizer
def test_a_character_comes_whole_with_its_last_byte(tokenizer, text):
    ids = tokenizer.encode("a" + text)
    deltas, tail = stream(tokenizer, ids)
    assert [delta for delta in deltas if delta and delta not in "a x"] == [c for c in text if c not in " x"]
    assert not tail


@pytest.mark.parametrize("bytes_left", [1, 2, 3])
@pytest.mark.parametrize("before", ["", "a", "a😀"])
@pytest.mark.parametrize("tokenizer", [TOKENIZERS[0], TOKENIZERS[2]], ids=lambda t: type(t).__name__)
def test_an_end_inside_a_character_is_one_replacement_character(tokenizer, before, bytes_left):
    ids = tokenizer.encode(f"{before}👍")[:-bytes_left]
    deltas, tail = stream(tokenizer, ids)
    assert "".join(deltas) == before
    assert tail == BAD


class Counting:
    """A tokenizer that remembers how many tokens it decoded each time."""

    def __init__(self, tokenizer):
        self.tokenizer, self.lengths = tokenizer, []

    def decode(self, ids):
        self.lengths.append(len(ids))
        return self.tokenizer.decode(ids)


@pytest.mark.parametrize("before", ["", "a", "😀"])
@pytest.mark.parametrize("tokenizer", [TOKENIZERS[0], TOKENIZERS[2]], ids=lambda t: type(t).__name__)
def test_broken_bytes_neither_block_nor_slow_the_stream(tokenizer, before):
    broken = {0xFF: 0xFF} if isinstance(tokenizer, Bytes) else {0xFF: tokenizer.id("<0xFF>")}
    prefix = tokenizer.encode(before) if before else []
    end = tokenizer.encode("a world")[-6 if isinstance(tokenizer, Bytes) else -1 :]
    counting = Counting(tokenizer)
    deltas, tail = stream(counting, [*prefix, *[broken[0xFF]] * 2000, *end])
    assert "".join(deltas) == before + BAD * 2000 + " world"
    assert tail == ""
    assert all("".join(deltas[n : n + 10]) for n in range(10, 2000, 10))
    assert max(counting.lengths) < 100
    assert len(counting.lengths) < 3 * 2010


@each_tokenizer
def test_the_thousandth_token_costs_what_the_tenth_did(tokenizer):
    counting = Counting(tokenizer)
    stream(counting, tokenizer.encode("汉字John world é😀 " * 100))
    assert max(counting.lengths) < 20


def test_a_real_replacement_character_stays_in_the_text():
    ids = list(f"a{BAD}b{BAD}{BAD}c".encode())
    deltas, tail = stream(Bytes(), ids)
    assert "".join(deltas) == f"a{BAD}b{BAD}{BAD}c"
    assert tail == ""


@pytest.mark.parametrize("end", [BAD, BAD * 5, "\N{REPLACEMENT CHARACTER}x" + BAD])
@each_tokenizer
def test_replacement_characters_of_the_prompt_are_not_shown_again(tokenizer, end):
    prompt = tokenizer.encode(f"John {end}")
    following = tokenizer.encode(f"John {end}a é汉")[len(prompt) :]
    deltas, tail = stream(tokenizer, following, prompt)
    assert "".join(deltas) + tail == "a é汉"


def test_what_a_prompt_left_unfinished_is_not_blamed_on_the_output():
    prompt = [*b"Hi ", 0xF0, 0x9F]
    assert stream(Bytes(), [*b"you"], prompt) == (["y", "o", "u"], "")
    assert stream(Bytes(), [0x98, 0x80], prompt) == (["", "😀"], "")
    assert stream(Bytes(), [256], prompt) == ([""], "")


# Words of SentencePiece, special tokens, added tokens (T11)


def test_a_word_after_a_prompt_keeps_its_space():
    t = TOKENIZERS[2]
    john = t.id("▁John")
    assert stream(t, [john], t.encode("a")) == ([" John"], "")
    assert stream(t, [john, john], []) == (["John", " John"], "")
    assert stream(t, [john, john], [t.id("<s>")]) == (["John", " John"], "")
    assert stream(t, [john], [*t.encode("a"), *[t.id("</s>")] * 20]) == ([" John"], "")


def test_a_word_after_hidden_tokens_keeps_its_space():
    t = TOKENIZERS[2]
    ids = [t.id("▁John"), *[t.id("</s>")] * 200, t.id("▁world"), t.id("▁"), t.id("▁John")]
    deltas, _ = stream(t, ids)
    assert "".join(deltas) == "John world  John"
    assert "".join(deltas) == t.decode(ids)


def test_spaces_alone_are_text():
    t = TOKENIZERS[2]
    for ids in ([t.id("▁"), t.id("▁John")], [t.id("▁")] * 3, [t.id("▁▁"), t.id("▁"), t.id("▁John")]):
        assert "".join(stream(t, ids)[0]) == t.decode(ids)


def test_added_tokens_bring_no_spaces_and_only_special_ones_are_hidden():
    t = TOKENIZERS[1]
    ids = t.encode("<think>ok</think>1<|end|>")
    deltas, tail = stream(t, ids)
    assert "".join(deltas) + tail == "<think>ok</think>1"


# Stop strings


def first_match(text, stops):
    """Where the stop string that is complete first begins and ends; of several the one that begins first."""
    for end in range(1, len(text) + 1):
        if starts := [end - len(stop) for stop in stops if text[:end].endswith(stop)]:
            return min(starts), end
    return None


def longest_beginning(text, stops):
    """The longest end of the text that is a proper beginning of a stop string."""
    ends = [text[len(text) - n :] for n in range(len(text) + 1)]
    return max((end for end in ends for stop in stops if stop.startswith(end) and stop != end), key=len)


stop_lists = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3)


@thorough
@given(st.lists(st.text("abc", max_size=4), max_size=12), stop_lists, st.booleans())
@example(["ab", "c"], ["abcd", "c"], False)
@example(["abcd"], ["abcd", "c"], False)
@example(["xa", "aab"], ["aab"], False)
def test_the_text_ends_at_the_first_match_wherever_deltas_end(deltas, stops, include):
    matcher = StopMatcher(stops, include)
    text = shown = ""
    for delta in deltas:
        text += delta
        shown += matcher.push(delta)
        if match := first_match(text, stops):
            assert shown == text[: match[1] if include else match[0]]
            assert matcher.matched in stops
            assert text[: match[1]].endswith(matcher.matched)
            assert matcher.flush() == ""
            return
        assert text == shown + longest_beginning(text, stops)
    assert matcher.matched is None
    assert shown + matcher.flush() == text


@pytest.mark.parametrize(("start", "end"), [(start, end) for start in range(10) for end in range(start + 1, 11)])
def test_a_stop_string_is_found_at_every_position(start, end):
    text = "ABCDEFGHIJ"
    for size in (1, 2, 3, 10):
        matcher = StopMatcher([text[start:end]])
        shown = ""
        for at in range(0, 10, size):
            shown += matcher.push(text[at : at + size])
            if matcher.matched:
                break
        assert shown == text[:start]


def text_stream(prompt, stops, include=False):
    return TextStream(Bytes().decode, list(prompt.encode()), stops, include)


def push_all(stream_, pieces):
    """Push each piece's bytes until the stream stops; return what was shown."""
    shown = ""
    for byte in "".join(pieces).encode():
        shown += stream_.push(byte)
        if stream_.stopped:
            break
    return shown


def test_nothing_of_a_stop_string_is_shown():
    stopping = text_stream("Here is the English alphabet: ABC", ["DEFGHIJ"])
    assert push_all(stopping, ["DEF", "G", "HI", "J"]) == ""
    assert stopping.stopped
    assert (stopping.finish(), stopping.text) == ("", "")


@pytest.mark.parametrize(
    ("prompt", "output", "stop", "shown"),
    [
        ("The capital is", " Paris.", "Pari", " "),
        ("A B C D E F G H I J K", " L M N O P Q R", "O P Q", " L M N "),
        ("one", " two", "e t", " two"),
        ("x", "ein Übel", "Ü", "ein "),
    ],
)
def test_text_is_cut_before_the_stop_string_and_the_prompt_does_not_count(prompt, output, stop, shown):
    stopping = text_stream(prompt, [stop])
    assert push_all(stopping, [output]) == shown
    assert stopping.finish() == ""
    assert stopping.text == shown


def test_what_was_held_back_comes_at_the_end():
    waiting = text_stream("", ["END"])
    assert push_all(waiting, ["the EN"]) == "the "
    assert waiting.finish() == "EN"
    assert waiting.text == "the EN"


def test_an_unfinished_character_follows_what_was_held_back():
    waiting = text_stream("", ["EN😀"])
    for byte in b"the EN\xf0\x9f":
        waiting.push(byte)
    assert waiting.finish() == f"EN{BAD}"


def test_a_stop_string_can_be_kept_in_the_text():
    keeping = text_stream("", ["END"], include=True)
    assert push_all(keeping, ["the END of it"]) == "the END"
    assert keeping.finish() == ""
