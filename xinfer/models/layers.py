"""What a decoder's layers are made of, as data."""

__all__ = ["AttentionSpec", "ExpertsSpec", "LatentSpec", "LayerSpec", "MlpSpec", "NormSpec"]

import math
from dataclasses import dataclass

from xinfer.models.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class NormSpec:
    """A normalization over the last dimension.

    Attributes:
        eps: added to the mean square or variance.
        kind: `rms` (by root mean square) or `layer` (mean taken off, by standard deviation).
        weight, bias: whether each dimension has a factor, a summand.
        offset: added to the stored factors. Where it is not 0, they and what they multiply are float32.
    """

    eps: float
    kind: str = "rms"
    weight: bool = True
    bias: bool = False
    offset: float = 0.0


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """Multi-head latent attention (arXiv:2405.04434): keys and values of all heads from one vector, which is cached.

    As grouped-query attention: one key head of rank + rope_dim, whose first `rank` dimensions are the values too.
    Queries are taken to these dimensions, results from them, by a matrix for each head.

    Attributes:
        rank: width of the vector.
        q_rank: width of the one that queries are made from; None where they are made from the hidden state.
        nope_dim, rope_dim: of a query head, dimensions without and with rotary positions.
        value_dim: width of a value head.
        norm: on both vectors.
    """

    rank: int
    q_rank: int | None
    nope_dim: int
    rope_dim: int
    value_dim: int
    norm: NormSpec


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Grouped-query attention.

    Attributes:
        heads, kv_heads, head_dim: query heads, key/value heads, width of a query and of a key.
        rope: its rotary embedding, or None where positions are not turned.
        qkv_bias, output_bias: whether the projections have biases.
        qk_norm: normalization of queries and of keys.
        qk_norm_turned: whether it comes after turning, not before.
        qk_norm_over: what it normalizes: `head` (each head, all with the same factors), `heads` (each, with factors of
            its own), `all` (all heads as one vector).
        window: keys that a query sees, itself included; None for all before it.
        scaling: factor on queries times keys; None for 1 / sqrt(head_dim).
        softcap: c in c * tanh(score / c).
        sinks: whether each head has a score more, of a key without a value.
        clip: largest absolute value of values, and of queries and keys once normalized.
        latent: how keys and values come from one vector; then kv_heads is 1 and head_dim its width with positions.
    """

    heads: int
    kv_heads: int
    head_dim: int
    rope: RopeSpec | None = None
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: NormSpec | None = None
    qk_norm_over: str = "head"
    qk_norm_turned: bool = False
    window: int | None = None
    scaling: float | None = None
    softcap: float | None = None
    sinks: bool = False
    clip: float | None = None
    latent: LatentSpec | None = None

    @property
    def scale(self) -> float:
        """Factor on queries times keys."""
        return self.head_dim**-0.5 if self.scaling is None else self.scaling

    @property
    def value_dim(self) -> int:
        """Width of what a query head finds."""
        return self.head_dim if self.latent is None else self.latent.rank

    @property
    def output_dim(self) -> int:
        """Width of what is projected back: all heads' values."""
        return self.heads * (self.head_dim if self.latent is None else self.latent.value_dim)

    @property
    def key_heads(self) -> int:
        """Heads whose keys are made apart."""
        return self.kv_heads if self.latent is None else self.heads

    @property
    def cache_width(self) -> int:
        """Numbers that a token leaves in the cache: keys, then values where these are not part of them."""
        return self.kv_heads * self.head_dim * (2 if self.latent is None else 1)


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """Which of several feed-forward parts compute a token, and how they are weighed.

    Attributes:
        count, chosen: how many there are, how many compute a token.
        score: of the router's outputs, `softmax` over all experts or `sigmoid` of each.
        normalized: whether the weights of those chosen are made to sum to one.
        scale: factor on the weights.
        router_bias: whether the router has biases.
        correction: whether a learned number for each expert is added to its score, for choosing only.
        groups, chosen_groups: experts are chosen from the best groups; of how many, from how many.
        group_score: of a group, its `best` expert's score or the sum of its best `two`.
        shared: size of a part that computes every token besides.
        shared_gate: whether that one is weighed by a sigmoid of its own.
    """

    count: int
    chosen: int
    score: str = "softmax"
    normalized: bool = True
    scale: float = 1.0
    router_bias: bool = False
    correction: bool = False
    groups: int = 1
    chosen_groups: int = 1
    group_score: str = "two"
    shared: int | None = None
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class MlpSpec:
    """A feed-forward part: down(f(gate(x)) * up(x)) if gated, else down(f(up(x))).

    Attributes:
        size: width between, of each expert if there are several.
        bias: whether the projections have biases.
        activation: f: `silu`, `gelu`, `gelu_tanh`, `relu`, `relu2`; or `swiglu`, with which the gated form is
            down(g * sigmoid(alpha * g) * (u + 1)), g = gate(x) cut at `limit`, u = up(x) at +-`limit`.
        gated: whether there is a gate.
        limit, alpha: see `swiglu`.
        experts: how several such parts share out tokens.
    """

    size: int
    bias: bool = False
    activation: str = "silu"
    gated: bool = True
    limit: float = math.inf
    alpha: float = 1.702
    experts: ExpertsSpec | None = None


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One decoder layer: x + attention(norm(x)), then x + mlp(norm(x)); or both at once.

    Attributes:
        attention, mlp: its parts.
        attn_norm, mlp_norm: before them. Of parallel parts without a norm of the second, it has the first's.
        attn_post_norm, mlp_post_norm: on what they return.
        parallel: x + attention(norm(x)) + mlp(norm(x)).
        residual_scale: factor on what they return.
    """

    attention: AttentionSpec
    mlp: MlpSpec
    attn_norm: NormSpec | None
    mlp_norm: NormSpec | None
    attn_post_norm: NormSpec | None = None
    mlp_post_norm: NormSpec | None = None
    parallel: bool = False
    residual_scale: float = 1.0

    @property
    def norms(self) -> tuple[NormSpec | None, ...]:
        """All normalizations of the layer's own, except within latent attention."""
        return (self.attn_norm, self.attn_post_norm, self.mlp_norm, self.mlp_post_norm, self.attention.qk_norm)
