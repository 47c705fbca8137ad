"""A decoder's description in words: layers that are alike are said once."""

__all__ = ["LayerKind", "layer_kinds", "outline"]

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from xinfer.models.layers import AttentionSpec, ExpertsSpec, LatentSpec, LayerSpec, MlpSpec, NormSpec
from xinfer.models.rope import RopeSpec
from xinfer.models.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class LayerKind:
    """Layers that are alike, in words.

    Attributes:
        count: how many there are.
        layers: which, as in `0-3, 7`.
        attention, mlp, norms: what they are made of.
    """

    count: int
    layers: str
    attention: str
    mlp: str
    norms: str


def layer_kinds(spec: DecoderSpec) -> list[LayerKind]:
    """Return the kinds of layers, in order of their first one."""
    alike: dict[LayerSpec, list[int]] = {}
    for index, layer in enumerate(spec.layers):
        alike.setdefault(layer, []).append(index)
    return [
        LayerKind(len(indexes), _ranges(indexes), _attention(layer.attention), _mlp(layer.mlp), _norms(layer))
        for layer, indexes in alike.items()
    ]


def outline(spec: DecoderSpec) -> str:
    """Return what a decoder is besides its layers."""
    return ", ".join(_outline(spec))


def _outline(spec: DecoderSpec) -> Iterator[str]:
    yield f"{len(spec.layers)} layers of {spec.hidden_size:,}"
    yield f"vocabulary of {spec.vocab_size:,}"
    yield "head tied to the embedding" if spec.tied else "head of its own"
    if spec.head_bias:
        yield "head with biases"
    if spec.learned_positions:
        yield f"learned positions for {spec.learned_positions:,} tokens"
    if spec.embed_scale != 1:
        yield f"embeddings times {spec.embed_scale:g}"
    if spec.logit_scale != 1:
        yield f"logits times {spec.logit_scale:g}"
    if spec.logit_softcap is not None:
        yield f"logits softcapped at {spec.logit_softcap:g}"
    yield f"last norm {_norm(spec.norm)}"


def _ranges(indexes: Sequence[int]) -> str:
    """Return increasing numbers as ranges; a long list of them is cut."""
    found: list[list[int]] = []
    for index in indexes:
        if found and found[-1][-1] == index - 1:
            found[-1][1:] = [index]
        else:
            found.append([index])
    words = ["-".join(map(str, pair)) for pair in found]
    return ", ".join(words if len(words) <= 6 else [*words[:3], "...", words[-1]])


def _attention(a: AttentionSpec) -> str:
    return ", ".join([*(_grouped(a) if a.latent is None else _latent(a, a.latent)), *_scores(a)])


def _grouped(a: AttentionSpec) -> Iterator[str]:
    yield f"{_count(a.heads, 'head')} / {a.kv_heads} kv of {a.head_dim}"
    yield _rope(a.rope, a.head_dim)


def _latent(a: AttentionSpec, latent: LatentSpec) -> Iterator[str]:
    yield f"latent, {_count(a.heads, 'head')} of {latent.nope_dim} + {latent.rope_dim} turned"
    yield f"values of {latent.value_dim}"
    yield f"cached vector of {latent.rank} + {latent.rope_dim}"
    if latent.q_rank is not None:
        yield f"queries through {latent.q_rank}"
    yield _rope(a.rope, latent.rope_dim)


def _scores(a: AttentionSpec) -> Iterator[str]:
    if a.window is not None:
        yield f"window {a.window:,}"
    if a.qk_norm is not None:
        over = {"head": "each head", "heads": "each head, factors of its own", "all": "all heads as one"}
        yield f"query and key norm over {over[a.qk_norm_over]}"
    biased = [name for name, there in (("q, k, v", a.qkv_bias), ("output", a.output_bias)) if there]
    if biased:
        yield f"biases on {' and '.join(biased)}"
    if a.scaling is not None and not math.isclose(a.scaling, a.head_dim**-0.5):
        yield f"scores times {a.scaling:.4g}"
    if a.softcap is not None:
        yield f"scores softcapped at {a.softcap:g}"
    if a.sinks:
        yield "a sink for each head"
    if a.clip is not None:
        yield f"cut at +-{a.clip:g}"


def _rope(rope: RopeSpec | None, width: int) -> str:
    if rope is None:
        return "positions not turned"
    words = [f"rope theta {rope.theta:,.10g}"]
    if rope.dim != width:
        words.append(f"over {rope.dim} dimensions")
    if rope.interleaved:
        words.append("interleaved")
    if rope.kind == "linear":
        words.append(f"scaled linear by {rope.factor:g}")
    elif rope.kind == "factors":
        words.append("scaled by factors of the file")
    elif rope.kind != "default":
        words.append(f"scaled {rope.kind} by {rope.factor:g} from {rope.original_max_len:,} tokens")
    return " ".join(words)


def _mlp(mlp: MlpSpec) -> str:
    experts = mlp.experts
    own = f"{mlp.size:,} {mlp.activation}{' gated' if mlp.gated else ''}{' with biases' if mlp.bias else ''}"
    if mlp.activation == "swiglu":
        own += f" (alpha {mlp.alpha:g}, cut at {mlp.limit:g})"
    return own if experts is None else f"{experts.chosen} of {experts.count} experts of {own}, {_router(experts)}"


def _router(experts: ExpertsSpec) -> str:
    words = [f"chosen by {experts.score}"]
    if experts.groups > 1:
        words.append(f"from {experts.chosen_groups} of {experts.groups} groups")
    if experts.normalized:
        words.append("weights sum to 1")
    if experts.scale != 1:
        words.append(f"times {experts.scale:g}")
    if experts.correction:
        words.append("corrected choice")
    if experts.router_bias:
        words.append("router with biases")
    if experts.shared is not None:
        words.append(f"a shared expert of {experts.shared:,}{' with a gate' if experts.shared_gate else ''}")
    return ", ".join(words)


def _norms(layer: LayerSpec) -> str:
    places = {
        "before attention": layer.attn_norm,
        "after attention": layer.attn_post_norm,
        "before mlp": layer.mlp_norm,
        "after mlp": layer.mlp_post_norm,
    }
    alike: dict[NormSpec, list[str]] = {}
    for place, norm in places.items():
        if norm is not None:
            alike.setdefault(norm, []).append(place)
    words = [f"{_norm(norm)} {' and '.join(where)}" for norm, where in alike.items()] or ["none"]
    if layer.parallel:
        words.append("attention and mlp side by side")
    if layer.residual_scale != 1:
        words.append(f"what they return times {layer.residual_scale:g}")
    return "; ".join(words)


def _norm(norm: NormSpec) -> str:
    words = [norm.kind, f"eps {norm.eps:.2g}"]
    if norm.bias:
        words.append("with biases")
    if not norm.weight:
        words.append("without factors")
    if norm.offset:
        words.append(f"factors + {norm.offset:g}")
    return " ".join(words)


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
