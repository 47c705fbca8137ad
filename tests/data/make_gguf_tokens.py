"""Makes gguf_tokens.json: the ids that llama.cpp gives generated texts, by pre-tokenizer and by kind of vocabulary.

    python make_gguf_tokens.py

needs `llama-cpp-python` and `gguf`. Texts and vocabularies come from tests/models/generated.py, the byte-level one from
tiny_tokens.json. Many pre-tokenizers cut a text alike: so for each text all different answers are written once, and for
each pre-tokenizer which of them is its.
"""

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import gguf
import llama_cpp

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "models" / "text"))

from generated import MARKED, VARIANTS, VOCABULARIES, texts  # noqa: E402

COUNT = 120
NAMES = sorted(runpy.run_path(str(HERE.parents[1] / "xinfer" / "models" / "text" / "patterns.py"))["PRE"])


def llama_cpp_ids(metadata: dict[str, Any], asked: list[str]) -> list[list[int]]:
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
        model = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
        return [model.tokenize(text.encode(), add_bos=True, special=True) for text in asked]


def main() -> None:
    """Write the file beside this one."""
    asked = texts(COUNT)
    byte_level = json.loads((HERE / "tiny_tokens.json").read_text())["byte_level"]["metadata"]
    by_name = {name: llama_cpp_ids(byte_level | {"tokenizer.ggml.pre": name}, asked) for name in NAMES}
    answers: list[list[list[int]]] = [[] for _ in asked]
    for ids in by_name.values():
        for found, answer in zip(answers, ids, strict=True):
            if answer not in found:
                found.append(answer)
    which = {n: [found.index(a) for found, a in zip(answers, ids, strict=True)] for n, ids in by_name.items()}
    kinds = {
        name: [
            llama_cpp_ids(make() | {f"tokenizer.ggml.{key}": value for key, value in variant.items()}, asked + MARKED)
            for variant in VARIANTS[name]
        ]
        for name, make in VOCABULARIES.items()
    }
    content = {
        "source": f"llama-cpp-python {llama_cpp.__version__}, Llama(vocab_only=True).tokenize(special=True)",
        "pre": {"answers": answers, "which": which},
        "kinds": kinds,
    }
    (HERE / "gguf_tokens.json").write_text(json.dumps(content, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
