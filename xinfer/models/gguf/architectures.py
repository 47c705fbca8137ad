"""The architectures of GGUF files that can be translated, a table entry each."""

__all__ = ["ARCHITECTURES"]

from xinfer.models.gguf import experts, words
from xinfer.models.gguf.architecture import Architecture
from xinfer.models.gguf.layouts import LAYER, LESS_ONE, ONE_ROW, PAIRS, PER_HEAD
from xinfer.models.names import Stored

ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", words.llama_type, words.USUAL, more=words.llama, undo=PAIRS),
    Architecture("mistral3", words.mistral3_type, words.USUAL, more=words.llama, turned=words.growing, undo=PAIRS),
    Architecture("qwen2", "qwen2", words.USUAL, more=words.qwen_window),
    Architecture("qwen3", "qwen3", words.USUAL, more=words.qwen_window),
    Architecture("qwen3moe", "qwen3_moe", {**words.USUAL, **experts.EXPERTS}, more=experts.qwen3_moe),
    Architecture(
        "gemma2",
        "gemma2",
        words.USUAL,
        {
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        more=words.gemma2,
        undo=LESS_ONE,
    ),
    Architecture(
        "gemma3",
        "gemma3_text",
        words.USUAL,
        {"final_logit_softcapping": "final_logit_softcapping"},
        more=words.gemma3,
        local_base=lambda base: 10_000.0,
        undo=LESS_ONE,
    ),
    Architecture(
        "phi3",
        "phi3",
        words.USUAL,
        more=words.phi3,
        partial="partial_rotary_factor",
        layer={**LAYER, "ffn_up": Stored(("mlp.gate", "mlp.up"))},
    ),
    Architecture(
        "gpt2",
        "gpt2",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
    ),
    Architecture(
        "gpt-oss",
        "gpt_oss",
        {**words.USUAL, **words.LOCAL_EXPERTS, "expert_feed_forward_length": "intermediate_size"},
        more=experts.gpt_oss,
        turned=lambda keys: {"truncate": False},
        layer={**LAYER, "post_attention_norm": "mlp_norm"},
    ),
    Architecture(
        "deepseek2",
        experts.deepseek_type,
        {**words.USUAL, **experts.ROUTED},
        fixed={"rope_interleave": True},
        more=experts.deepseek,
        heads=experts.latent_heads,
        sharpening=experts.deepseek_sharpening,
        undo=PER_HEAD,
    ),
    Architecture(
        "cohere2",
        "cohere2",
        {**words.LAYER_NORM, "logit_scale": "logit_scale"},
        more=words.sliding(4),
    ),
    Architecture("command-r", "cohere", {**words.LAYER_NORM, "logit_scale": "logit_scale"}, more=words.cohere),
    Architecture(
        "qwen2moe",
        "qwen2_moe",
        {
            **words.USUAL,
            **experts.EXPERTS,
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
        more=experts.qwen2_moe,
        undo=ONE_ROW,
    ),
    Architecture("gemma", "gemma", words.USUAL, undo=LESS_ONE),
    Architecture("phi2", "phi", words.LAYER_NORM, partial="partial_rotary_factor"),
    Architecture(
        "gptneox", "gpt_neox", words.LAYER_NORM, more=words.parallel, partial="rotary_pct", base="rotary_emb_base"
    ),
    Architecture(
        "falcon",
        "falcon",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size"},
        more=words.falcon,
        layer=words.falcon_layer,
    ),
    Architecture("stablelm", "stablelm", words.LAYER_NORM, more=words.stablelm, partial="partial_rotary_factor"),
    Architecture(
        "starcoder2",
        "starcoder2",
        {"attention.layer_norm_epsilon": "norm_epsilon", **words.FEED_FORWARD},
        more=words.starcoder2,
    ),
    Architecture("olmo", "olmo", words.FEED_FORWARD, {"attention.clamp_kqv": "clip_qkv"}, undo=PAIRS),
    Architecture(
        "olmo2",
        lambda keys: "olmo2" if words.window(keys) is None else "olmo3",
        words.USUAL,
        more=words.sliding(4),
        local_base=lambda base: base,
    ),
    Architecture("olmoe", "olmoe", {**words.USUAL, **experts.EXPERTS}, more=experts.experts_normed(False)),
    Architecture("granite", "granite", {**words.USUAL, **words.SCALED}, words.SCALES, more=words.granite, undo=PAIRS),
    Architecture(
        "granitemoe",
        experts.granite_moe_type,
        {**words.USUAL, **words.LOCAL_EXPERTS, **words.SCALED},
        words.SCALES,
        more=experts.granite_moe,
        undo=PAIRS,
    ),
    Architecture("smollm3", "smollm3", words.USUAL, undo=PAIRS),
    Architecture(
        "glm4",
        "glm4",
        words.USUAL,
        partial="partial_rotary_factor",
        layer={**LAYER, "ffn_up": Stored(("mlp.gate", "mlp.up"))},
    ),
    Architecture(
        "glm4moe",
        "glm4_moe",
        {**words.USUAL, **experts.ROUTED},
        more=experts.sigmoid_experts,
        partial="partial_rotary_factor",
        layer={**LAYER, "post_attention_norm": "mlp_norm"},
    ),
    Architecture("dots1", "dots1", {**words.USUAL, **experts.ROUTED}, more=experts.sigmoid_experts),
    Architecture("arcee", "arcee", words.USUAL, undo=PAIRS),
    Architecture(
        "seed_oss", "seed_oss", words.USUAL, more=words.seed_oss, layer={**LAYER, "post_attention_norm": "mlp_norm"}
    ),
    Architecture(
        "nemotron",
        "nemotron",
        {"attention.layer_norm_epsilon": "norm_eps", **words.FEED_FORWARD},
        partial="partial_rotary_factor",
        undo=LESS_ONE,
    ),
    Architecture("exaone4", "exaone4", words.USUAL, more=words.sliding(4)),
    Architecture(
        "ernie4_5", "ernie4_5", words.USUAL, more=lambda keys: {"use_bias": "blk.0.attn_q.bias" in keys.tensors}
    ),
    Architecture(
        "starcoder",
        "gpt_bigcode",
        {"attention.layer_norm_epsilon": "layer_norm_epsilon", "feed_forward_length": "n_inner"},
        more=lambda keys: {"multi_query": keys.get("attention.head_count_kv", 1) == 1},
    ),
    Architecture("hunyuan-dense", "hunyuan_v1_dense", words.USUAL),
    Architecture(
        "hunyuan-moe",
        "hunyuan_v1_moe",
        {**words.USUAL, "expert_count": "num_experts", "expert_used_count": "moe_topk"},
        more=experts.hunyuan_moe,
    ),
)
