"""Makes smollm2_tokens.json and tiny_tokens.json: texts with the ids that llama.cpp gives them.

    python make_tokens.py SmolLM2-135M-Instruct.Q4_1.gguf

needs `llama-cpp-python`, `gguf` and `tokenizers`, of which the tests need only the last. The vocabularies of
tiny_tokens.json are trained on the texts themselves, uncut: so they have tokens that reach over every border at which
some pre-tokenizer cuts, and a border that is missed shows. The files' other keys are what a GGUF file would say.
"""

import argparse
import json
import tempfile
import unicodedata
from pathlib import Path
from typing import Any

import gguf
import llama_cpp
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

SOURCE = f"llama-cpp-python {llama_cpp.__version__}, Llama(vocab_only=True).tokenize(add_bos=False, special=True)"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

TEXTS = [
    "",
    " ",
    "  ",
    "   leading and trailing   ",
    "Hello, world!",
    "hello  two   three    four",
    "a\tb\t\tc\t",
    "line\nline\n\nline\r\n\r\nend\n",
    " \n \n  x\n\t\n",
    "1 12 123 1234 12345 1234567890",
    "3.14159 -2e10 0x1F 1,000,000 50% $9.99",
    "v1.2.3-rc4+build5",
    "٣٤٥ ⅷ ² ½ 一二三 １２３",
    "I'm you're he's we'll they've I'd can't DON'T It'S o'clock 'tis ''",
    "caf\u00e9 cafe\u0301 na\u00efve na\u0131\u0308ve \u0e19\u0e49\u0e33",
    "Zażółć gęślą jaźń ÄÖÜß ĳ ﬁ",
    "中文字符，没有空格。你好世界",
    "日本語のテキスト、カタカナ ひらがな",
    "한국어 텍스트입니다",
    "Привет, мир! Здравствуйте",
    "שלום עולם مرحبا بالعالم",
    "नमस्ते दुनिया",
    "\U0001f600\U0001f680 \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1e9\U0001f1ea \u270c\U0001f3fd",
    "zero\u200bwidth\u00a0nbsp\u3000ideographic\u2028separator\ufeffbom",
    "\u0000\u0001\u001f\u007f\u0085 control",
    "def f(x):\n    return x**2 + 1  # comment\n\n\nclass A:\n\tpass\n",
    "for (int i = 0; i < 10; ++i) { a[i] += b[i] >> 2; }",
    "https://example.com/a/b?q=1&r=%20#frag user@host.org",
    '{"key": [1, 2.5, null, true], "s": "a\\nb"}',
    '<div class="x">&nbsp;</div> <!-- c -->',
    "!!!???...---===+++~~~^^^|||\\\\///",
    "a!b?c.d,e;f:g 'h' \"i\" (j) [k] {l}",
    "CamelCaseString snake_case_string kebab-case-string SCREAMING",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "\n\n\n\n\n\n\n\n",
    "                                        x",
    "<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "text<|endoftext|>more <|im_start|> <|im_end",
    "<|im_start|><|im_start|>  <|im_end|>x<|unknown|>",
    "<s>text</s> <unk> <0x41> <think> </think>x",
    "mixed 中123文 abc１２def \u0301combining\u0301 a\u0300\u0301\u0302",
    "x²+y²=z² ∑∫√∞ ≤≥≠ αβγ",
    "\ud7ff\ue000\uffff\U0010ffff \U00020000",
]


def byte_level() -> dict[str, Any]:
    """Return the metadata of a byte-level BPE, all but `pre`.

    It has a word that no merges make, which only a tokenizer that ignores them for whole words finds.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=256 + 500, min_frequency=1, initial_alphabet=alphabet, max_token_length=6, show_progress=False
    )
    bpe.train_from_iterator(TEXTS, trainer)
    model = json.loads(bpe.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].__getitem__), "Ġcontrol", *SPECIAL]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [NORMAL] * (len(tokens) - len(SPECIAL)) + [CONTROL] * len(SPECIAL),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
    }


def sentencepiece() -> dict[str, Any]:
    """Return the metadata of a SentencePiece BPE laid out as Llama 2's: special, bytes, pieces by rank, characters.

    Some characters are left out, so that bytes stand for them.
    """
    bpe = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=500, min_frequency=1, max_token_length=6, show_progress=False)
    latin = [text for text in TEXTS if min(text, default="") > "\0" and max(text) < "\u0400"]
    bpe.train_from_iterator([("▁" + text).replace(" ", "▁") for text in latin], trainer)
    model = json.loads(bpe.to_str())["model"]
    pieces = dict.fromkeys("".join(merge) for merge in model["merges"])
    characters = dict.fromkeys(token for token in model["vocab"] if len(token) == 1)
    head = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), *((f"<0x{i:02X}>", BYTE) for i in range(256))]
    body = [(piece, NORMAL) for piece in [*pieces, *characters] if piece not in dict(head)]
    body += [("<think>", USER_DEFINED), ("</think>", USER_DEFINED)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [token for token, _ in head + body],
        "tokenizer.ggml.token_type": [kind for _, kind in head + body],
        "tokenizer.ggml.scores": [0.0] * len(head) + [-float(i) for i in range(len(body))],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


def llama_cpp_ids(path: Path, texts: list[str]) -> list[list[int]]:
    """Ask llama.cpp."""
    model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    return [model.tokenize(text.encode(), add_bos=False, special=True) for text in texts]


def with_metadata(metadata: dict[str, Any], texts: list[str]) -> list[list[int]]:
    """Ask llama.cpp with a vocabulary of ours."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vocabulary.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        for name, value in metadata.items():
            add = {str: writer.add_string, int: writer.add_uint32, bool: writer.add_bool, list: writer.add_array}
            add[type(value)](name, value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return llama_cpp_ids(path, texts)


def main() -> None:
    """Write both files beside this one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("smollm2", type=Path)
    here = Path(__file__).parent
    real = {"source": SOURCE, "texts": TEXTS, "ids": llama_cpp_ids(parser.parse_args().smollm2, TEXTS)}
    (here / "smollm2_tokens.json").write_text(json.dumps(real, separators=(",", ":")) + "\n")
    composed = [unicodedata.normalize("NFC", text) for text in TEXTS]  # qwen2's own normalizer; llama.cpp has none
    bpe, spm = byte_level(), sentencepiece()
    ids = {
        pre: with_metadata(bpe | {"tokenizer.ggml.pre": pre}, composed if pre == "qwen2" else TEXTS)
        for pre in ("default", "gpt-2", "smollm", "llama-bpe", "qwen2")
    }
    unprefixed = with_metadata(spm | {"tokenizer.ggml.add_space_prefix": False}, TEXTS)
    spm_ids = {"prefixed": with_metadata(spm, TEXTS), "unprefixed": unprefixed}
    tiny = {
        "source": SOURCE,
        "texts": TEXTS,
        "byte_level": {"metadata": bpe, "ids": ids},
        "sentencepiece": {"metadata": spm, "ids": spm_ids},
    }
    (here / "tiny_tokens.json").write_text(json.dumps(tiny, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
