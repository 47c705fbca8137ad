"""Tiny models with random weights, written to disk as Hugging Face folders and as GGUF files.

Both kinds of file hold the same numbers, and nothing here looks at how xinfer reads them: names, shapes and orders are
those of the checkpoints out there. A backend's author tests against `transformers` or llama.cpp with them.
"""

__all__ = [
    "CHAT_TEMPLATE",
    "SPECIAL_TOKENS",
    "gguf_name",
    "gguf_writer",
    "tensor_shapes",
    "tiny_config",
    "tiny_weights",
    "write_folder",
    "write_gguf",
]

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import tokenizers
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers

Config = dict[str, Any]
Weights = dict[str, NDArray[np.float32]]

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")  # with the ids 256, 257, 258: after the single bytes
CHAT_TEMPLATE = """{% for message in messages %}<|im_start|>{{ message['role'] }}
{{ message['content'] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

_MERGES = [("Ġ", "t"), ("h", "e"), ("Ġt", "he")]  # llama.cpp loads no vocabulary without any
_TOKENS = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS, *map("".join, _MERGES)]
_OTHERWISE_NAMED = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "o_proj": "attn_output",
    "embed_tokens": "token_embd",
    "lm_head": "output",
    "norm": "output_norm",
}
_OWN: dict[str, Config] = {
    "llama": {"attention_bias": False, "mlp_bias": False},
    "mistral": {"sliding_window": 16},
    "qwen2": {"use_sliding_window": False, "sliding_window": None},
    "qwen3": {"use_sliding_window": False, "sliding_window": None, "attention_bias": False, "head_dim": 32},
}


def tiny_config(family: str, **changes: Any) -> Config:
    """Return the content of a config.json, of `llama`, `mistral`, `qwen2` or `qwen3`, with these changes."""
    config: Config = {
        "architectures": [f"{family.capitalize()}ForCausalLM"],
        "model_type": family,
        "vocab_size": 272,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_act": "silu",
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 256,
        "eos_token_id": 258,
        "dtype": "float32",
    }
    return config | _OWN[family] | changes


def tiny_weights(config: Config, seed: int) -> Weights:
    """Return random weights under the checkpoint's names; a tensor depends on the seed and its place alone.

    They are large enough that errors show: logits have a standard deviation of at least 1, norms are not ones.
    """
    return {
        name: _random(name, shape, np.random.default_rng([seed, place]))
        for place, (name, shape) in enumerate(tensor_shapes(config))
    }


def _random(name: str, shape: tuple[int, ...], rng: np.random.Generator) -> NDArray[np.float32]:
    mean, scale = (1.0, 0.2) if name.endswith("norm.weight") else (0.0, 0.5)
    if len(shape) == 2:
        wide = any(part in name for part in ("q_proj", "k_proj", "embed_tokens", "lm_head"))
        scale = (1.5 if wide else 1.0) / math.sqrt(shape[1])
    return rng.normal(mean, scale, shape).astype(np.float32)


def tensor_shapes(config: Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of each of a checkpoint's tensors."""
    hidden, size, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    heads, kv_heads, dim = _heads(config)
    qwen2, bias, mlp_bias = config["model_type"] == "qwen2", config.get("attention_bias"), config.get("mlp_bias")
    projections = {
        "self_attn.q_proj": (heads * dim, hidden, bias or qwen2),
        "self_attn.k_proj": (kv_heads * dim, hidden, bias or qwen2),
        "self_attn.v_proj": (kv_heads * dim, hidden, bias or qwen2),
        "self_attn.o_proj": (hidden, heads * dim, bias),
        "mlp.gate_proj": (size, hidden, mlp_bias),
        "mlp.up_proj": (size, hidden, mlp_bias),
        "mlp.down_proj": (hidden, size, mlp_bias),
    }
    norms = {"input_layernorm": hidden, "post_attention_layernorm": hidden}
    if config["model_type"] == "qwen3":
        norms |= {"self_attn.q_norm": dim, "self_attn.k_norm": dim}
    yield "model.embed_tokens.weight", (vocabulary, hidden)
    for layer in range(config["num_hidden_layers"]):
        for part, (rows, columns, biased) in projections.items():
            yield f"model.layers.{layer}.{part}.weight", (rows, columns)
            if biased:
                yield f"model.layers.{layer}.{part}.bias", (rows,)
        for part, width in norms.items():
            yield f"model.layers.{layer}.{part}.weight", (width,)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (vocabulary, hidden)


def _heads(config: Config) -> tuple[int, int, int]:
    """Return query heads, key/value heads and the width of a head."""
    heads = config["num_attention_heads"]
    return heads, config["num_key_value_heads"], config.get("head_dim") or config["hidden_size"] // heads


def write_folder(path: Path, config: Config, seed: int, shards: int = 1) -> Path:
    """Write a model folder in Hugging Face layout, its weights in so many files, and return its path."""
    path.mkdir(parents=True, exist_ok=True)
    weights = tiny_weights(config, seed)
    parts = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    files = parts if shards > 1 else ["model.safetensors"]
    weight_map = {name: files[i * shards // len(weights)] for i, name in enumerate(weights)}
    for file in files:
        save_file({n: t for n, t in weights.items() if weight_map[n] == file}, path / file, {"format": "pt"})
    special = {"bos_token": SPECIAL_TOKENS[0], "eos_token": SPECIAL_TOKENS[2], "chat_template": CHAT_TEMPLATE}
    contents = {
        "config.json": config,
        "generation_config.json": {name: config[name] for name in ("bos_token_id", "eos_token_id")},
        "tokenizer_config.json": {"tokenizer_class": "PreTrainedTokenizerFast"} | special,
    }
    if shards > 1:
        contents["model.safetensors.index.json"] = {"metadata": {}, "weight_map": weight_map}
    for name, content in contents.items():
        (path / name).write_text(json.dumps(content, indent=2) + "\n", "utf-8")
    _tokenizer().save(str(path / "tokenizer.json"))
    return path


def _tokenizer() -> tokenizers.Tokenizer:
    """Return a byte-level BPE: a token for each byte, the special ones, and a word."""
    backend = tokenizers.Tokenizer(models.BPE({token: i for i, token in enumerate(_TOKENS)}, _MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIAL_TOKENS])
    return backend


def write_gguf(path: Path, config: Config, seed: int, kind: str = "F32", split_max_tensors: int = 0) -> Path:
    """Write the same model as a GGUF file and return its path; split, parts get names of their own beside it.

    `kind` (F32, F16, BF16, Q8_0, Q4_1, ...) is the type of the matrices; norms and biases stay F32. A window that only
    some layers have can't be said in this format: `ValueError`.
    """
    writer = gguf_writer(path, config, split_max_tensors)
    quantization = gguf.GGMLQuantizationType[kind]
    for name, tensor in tiny_weights(config, seed).items():
        values = _interleaved(tensor, name, config)
        used = quantization if values.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(gguf_name(name), gguf.quants.quantize(values, used), raw_dtype=used)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_writer(path: Path, config: Config, split_max_tensors: int = 0) -> gguf.GGUFWriter:
    """Return the writer of a GGUF file that has been told everything but the weights."""
    family = config["model_type"]
    if config.get("use_sliding_window"):
        raise ValueError("GGUF can't say that only some layers have a window")
    writer = gguf.GGUFWriter(path, "llama" if family == "mistral" else family, split_max_tensors=split_max_tensors)
    writer.add_name(f"tiny {family}")
    _add_hyperparameters(writer, config)
    _add_tokenizer(writer, config)
    return writer


def _add_hyperparameters(writer: gguf.GGUFWriter, config: Config) -> None:
    heads, kv_heads, dim = _heads(config)
    writer.add_vocab_size(config["vocab_size"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(dim)
    writer.add_value_length(dim)
    writer.add_rope_dimension_count(dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    rope = config | (config.get("rope_scaling") or config.get("rope_parameters") or {})
    writer.add_rope_freq_base(rope["rope_theta"])
    scaling = rope.get("rope_type", rope.get("type", "default"))
    if scaling == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    elif scaling == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, dim))
    elif scaling != "default":
        raise ValueError(f"rope scaling {scaling!r} can't be written")


def _llama3_factors(rope: Config, dim: int) -> NDArray[np.float32]:
    """Return what each frequency is divided by; llama.cpp's convert_hf_to_gguf.py, `generate_extra_tensors`."""
    low, high, original = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wavelengths = [2 * math.pi * rope["rope_theta"] ** (i / dim) for i in range(0, dim, 2)]
    smooth = [min(max((original / w - low) / (high - low), 0), 1) for w in wavelengths]
    return np.array([1 / ((1 - s) / rope["factor"] + s) for s in smooth], np.float32)


def _add_tokenizer(writer: gguf.GGUFWriter, config: Config) -> None:
    unused = [f"[UNUSED{i}]" for i in range(config["vocab_size"] - len(_TOKENS))]
    special = dict.fromkeys(SPECIAL_TOKENS, gguf.TokenType.CONTROL) | dict.fromkeys(unused, gguf.TokenType.UNUSED)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre({"llama": "smollm", "mistral": "llama-bpe"}.get(config["model_type"], "qwen2"))
    writer.add_token_list([*_TOKENS, *unused])
    writer.add_token_types([special.get(token, gguf.TokenType.NORMAL) for token in [*_TOKENS, *unused]])
    writer.add_token_merges([" ".join(merge) for merge in _MERGES])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _interleaved(tensor: NDArray[np.float32], name: str, config: Config) -> NDArray[np.float32]:
    """Order the rows of a llama's queries and keys as llama.cpp's converter does: pairs that turn together adjacent."""
    if config["model_type"] not in ("llama", "mistral") or not ("q_proj" in name or "k_proj" in name):
        return tensor
    heads, kv_heads, dim = _heads(config)
    count = heads if "q_proj" in name else kv_heads
    return tensor.reshape(count, 2, dim // 2, -1).swapaxes(1, 2).reshape(tensor.shape)


def gguf_name(name: str) -> str:
    """Translate a checkpoint's name: model.layers.7.mlp.up_proj.weight is blk.7.ffn_up.weight."""
    *where, part, kind = name.removeprefix("model.layers.").removeprefix("model.").split(".")
    prefix = "ffn_" if "mlp" in where else "attn_"
    renamed = _OTHERWISE_NAMED.get(part, prefix + part.removesuffix("_proj"))
    return f"blk.{where[0]}.{renamed}.{kind}" if where else f"{renamed}.{kind}"
