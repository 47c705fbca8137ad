"""The text part of a model that reads images too, as its config.json says it: a decoder as any other."""

__all__ = ["text_part"]

from collections.abc import Mapping
from typing import Any

from xinfer.errors import ModelError

# Models that compute a text as their text part alone would; and what that is where it does not say.
_PARTS = {
    "gemma3": "gemma3_text",
    "idefics3": "llama",
    "internvl": "qwen2",
    "llava": "llama",
    "llava_next": "llama",
    "llava_next_video": "llama",
    "llava_onevision": "qwen2",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen2_vl": "qwen2_vl_text",
    "qwen3_vl": "qwen3_vl_text",
    "smolvlm": "llama",
    "vipllava": "llama",
}
_SHARED = ("bos_token_id", "dtype", "eos_token_id", "pad_token_id", "quantization_config", "torch_dtype")

# Sizes that are left out where they are the reference's defaults, as in the first LLaVA.
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
_LEFT_OUT = {
    "gemma3_text": (262_208, 2304, 9216, 26, 8),
    "llama": (32_000, 4096, 11_008, 32, 32),
    "mistral": (32_000, 4096, 14_336, 32, 32),
    "qwen2": (151_936, 4096, 22_016, 32, 32),
}


def text_part(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config of the text part, or all of it where that is all that there is.

    What holds for the whole is taken from beside it; whether the head is the embedding, where either says so.
    """
    text, whole = config.get("text_config"), config.get("model_type")
    if not isinstance(text, dict):
        return dict(config)
    if not isinstance(whole, str) or whole not in _PARTS:
        raise ModelError(
            f"config.json: model_type={whole!r} is not supported: its text part ({text.get('model_type')!r}) is not "
            f"known to be computed as one alone is (supported with a text_config: {', '.join(_PARTS)})"
        )
    shared = {name: config[name] for name in _SHARED if config.get(name) is not None}
    part = {**shared, "model_type": _PARTS[whole], **text}
    sizes = _LEFT_OUT.get(str(part["model_type"]), ())
    part = {**dict(zip(_SIZES, sizes, strict=False)), **part}
    tied = [said["tie_word_embeddings"] for said in (config, text) if said.get("tie_word_embeddings") is not None]
    if tied:
        part["tie_word_embeddings"] = True if True in tied else tied[0]
    return part
