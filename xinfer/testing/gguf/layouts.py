"""How llama.cpp's converter lays tensors out."""

__all__ = ["Array", "laid_out"]

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from xinfer.testing.gguf.common import Config, head_dim, turning
from xinfer.testing.gguf.keys import falcon

Array = NDArray[Any]
Named = Iterator[tuple[str, Array]]


_PAIRED = ("llama", "mistral", "mixtral", "granite", "olmo", "smollm3", "arcee", "ministral3")


def laid_out(tensors: dict[str, Array], config: Config) -> Named:
    """Yield tensors as the converter lays them out, under checkpoints' names, or those that it makes up."""
    yield from _rope_factors(config)
    changes: dict[str, Callable[[str, Array, Config], Named]] = {
        **dict.fromkeys(_PAIRED, _interleaved),
        **dict.fromkeys(("granitemoe", "granitemoeshared"), _granite_moe),
        **dict.fromkeys(("gemma", "gemma2", "gemma3_text", "nemotron"), _one_more),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "glm4_moe", "dots1"), _split_latent),
        "gpt2": _transposed,
        "gpt_oss": _split_experts,
        "gpt_neox": _fused,
        "falcon": _fused,
    }
    change = changes.get(config["model_type"])
    for name, tensor in _stacked(tensors):
        if change is None:
            yield name, tensor
        else:
            yield from change(name, tensor, config)


def _stacked(tensors: dict[str, Array]) -> Named:
    """Put experts' matrices, and norms of single heads, into one tensor each."""
    groups: dict[str, dict[int, Array]] = {}
    for name, tensor in tensors.items():
        before, inner, after = name.partition(".experts." if ".experts." in name else ".norms.")
        number, _, rest = after.partition(".")
        if not number.isdecimal():
            yield name, tensor
            continue
        joined = f"{before}{inner}{rest}" if inner == ".experts." else f"{before}.{rest}"
        groups.setdefault(joined.replace("block_sparse_moe", "mlp"), {})[int(number)] = tensor
    for name, members in groups.items():
        renamed = name.replace("experts.w1.", "experts.gate_proj.").replace("experts.w2.", "experts.down_proj.")
        yield renamed.replace("experts.w3.", "experts.up_proj."), np.stack([members[i] for i in range(len(members))])


def _rope_factors(config: Config) -> Named:
    given, dim = turning(config), head_dim(config) if "hidden_size" in config else 0
    if given.get("rope_type") == "llama3":
        low, high = given["low_freq_factor"], given["high_freq_factor"]
        original = given["original_max_position_embeddings"]
        lengths = [2 * math.pi * given["rope_theta"] ** (i / dim) for i in range(0, dim, 2)]
        keep = [min(max((original / length - low) / (high - low), 0), 1) for length in lengths]
        yield "rope_freqs.weight", np.array([1 / ((1 - k) / given["factor"] + k) for k in keep], np.float32)
    if given.get("rope_type") == "longrope":
        yield "rope_factors_long.weight", np.array(given["long_factor"], np.float32)
        yield "rope_factors_short.weight", np.array(given["short_factor"], np.float32)


def _interleaved(name: str, tensor: Array, config: Config) -> Named:
    """Order rows so that pairs that turn together are adjacent."""
    heads = {"q_proj": "num_attention_heads", "k_proj": "num_key_value_heads"}.get(name.split(".")[-2])
    if heads is not None:
        count = config[heads]
        tensor = tensor.reshape(count, 2, tensor.shape[0] // count // 2, -1).swapaxes(1, 2).reshape(tensor.shape)
    yield name, tensor


def _granite_moe(name: str, tensor: Array, config: Config) -> Named:
    """Part gate and up."""
    if name.endswith("input_linear.weight"):
        half = tensor.shape[-2] // 2
        before = name.removesuffix("input_linear.weight")
        before = before.replace("block_sparse_moe", "mlp.experts").replace("shared_mlp", "mlp.shared_expert")
        yield f"{before}gate_proj.weight", tensor[..., :half, :]
        yield f"{before}up_proj.weight", tensor[..., half:, :]
    else:
        yield from _interleaved(name, tensor, config)


def _one_more(name: str, tensor: Array, config: Config) -> Named:
    if name != "lm_head.weight" or config["model_type"] in ("gemma3_text", "nemotron"):
        yield name, tensor + np.float32(1) if name.endswith("norm.weight") else tensor


def _transposed(name: str, tensor: Array, config: Config) -> Named:
    if not name.endswith((".attn.bias", ".attn.masked_bias")):
        yield name, tensor.T if name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")) else tensor


def _split_experts(name: str, tensor: Array, config: Config) -> Named:
    """Part gate and up, whose rows take turns, and turn matrices round."""
    if "experts" not in name:
        yield name.replace("sinks", "sinks.weight"), tensor
        return
    kind = "bias" if name.endswith("_bias") else "weight"
    place = name.removesuffix("_bias")
    if kind == "weight":
        tensor = tensor.swapaxes(-1, -2)
    if place.endswith("gate_up_proj"):
        rows = -1 if kind == "bias" else -2
        for i, part in enumerate(("gate_proj", "up_proj")):
            taken = np.take(tensor, range(i, tensor.shape[rows], 2), rows)
            yield f"{place.replace('gate_up_proj', part)}.{kind}", taken
    else:
        yield f"{place}.{kind}", tensor


def _split_latent(name: str, tensor: Array, config: Config) -> Named:
    if name.endswith("kv_b_proj.weight"):
        nope = config["qk_nope_head_dim"]
        both = tensor.reshape(config["num_attention_heads"], nope + config["v_head_dim"], -1)
        yield name.replace("kv_b", "k_b"), both[:, :nope].swapaxes(1, 2)
        yield name.replace("kv_b", "v_b"), both[:, nope:]
    else:
        yield name.replace("e_score_correction_bias", "e_score_correction.bias"), tensor


def _fused(name: str, tensor: Array, config: Config) -> Named:
    """Gather queries, keys and values, which take turns by key heads."""
    if "query_key_value" in name:
        heads, dim = config["num_attention_heads"], head_dim(config)
        kv_heads = heads if config["model_type"] == "gpt_neox" else falcon(config)["attention.head_count_kv"]
        groups = tensor.reshape(kv_heads, heads // kv_heads + 2, dim, -1)
        parts = (groups[:, :-2], groups[:, -2:-1], groups[:, -1:])
        tensor = np.concatenate([part.reshape(-1, groups.shape[-1]) for part in parts]).reshape(tensor.shape)
    yield name, tensor
