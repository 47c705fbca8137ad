"""The weights of a layer: their canonical names within it, and their shapes."""

__all__ = ["expert_shapes", "layer_shapes", "norm_shapes"]

from collections.abc import Iterator

from xinfer.models.layers import AttentionSpec, LatentSpec, LayerSpec, MlpSpec, NormSpec

Shape = tuple[int, ...]


def layer_shapes(layer: LayerSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    """Yield a layer's tensors in the order in which they are needed; a projection is [out, in]."""
    for name in ("attn_norm", "attn_post_norm", "mlp_norm", "mlp_post_norm"):
        yield from norm_shapes(name, getattr(layer, name), (hidden,)).items()
    attention = layer.attention
    own = _grouped(attention, hidden) if attention.latent is None else _latent(attention, attention.latent, hidden)
    for name, shape in own:
        yield f"attn.{name}", shape
    for name, shape in _mlp(layer.mlp, hidden):
        yield f"mlp.{name}", shape


def norm_shapes(name: str, norm: NormSpec | None, shape: Shape) -> dict[str, Shape]:
    """Return what a normalization learned."""
    has = {"weight": norm is not None and norm.weight, "bias": norm is not None and norm.bias}
    return {f"{name}.{kind}": shape for kind, there in has.items() if there}


def _linear(name: str, rows: int, columns: int, bias: bool) -> Iterator[tuple[str, Shape]]:
    yield f"{name}.weight", (rows, columns)
    if bias:
        yield f"{name}.bias", (rows,)


def _grouped(a: AttentionSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    for name, heads in (("q", a.heads), ("k", a.kv_heads), ("v", a.kv_heads)):
        yield from _linear(name, heads * a.head_dim, hidden, a.qkv_bias)
    yield from _linear("o", hidden, a.output_dim, a.output_bias)
    for name, heads in (("q_norm", a.heads), ("k_norm", a.kv_heads)):
        shape = {"head": (a.head_dim,), "heads": (heads, a.head_dim), "all": (heads * a.head_dim,)}[a.qk_norm_over]
        yield from norm_shapes(name, a.qk_norm, shape).items()
    if a.sinks:
        yield "sinks", (a.heads,)


def _latent(a: AttentionSpec, latent: LatentSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    width = a.heads * (latent.nope_dim + latent.rope_dim)
    if latent.q_rank is None:
        yield from _linear("q", width, hidden, False)
    else:
        yield from _linear("q_a", latent.q_rank, hidden, a.qkv_bias)
        yield from norm_shapes("q_a_norm", latent.norm, (latent.q_rank,)).items()
        yield from _linear("q_b", width, latent.q_rank, False)
    yield from _linear("kv_a", latent.rank + latent.rope_dim, hidden, a.qkv_bias)
    yield from norm_shapes("kv_a_norm", latent.norm, (latent.rank,)).items()
    yield from _linear("k_b", a.heads * latent.nope_dim, latent.rank, False)
    yield from _linear("v_b", a.heads * latent.value_dim, latent.rank, False)
    yield from _linear("o", hidden, a.output_dim, a.output_bias)


def expert_shapes(mlp: MlpSpec, hidden: int, size: int | None = None) -> Iterator[tuple[str, Shape]]:
    """Yield the projections of one feed-forward part, of another size if it is given."""
    size = mlp.size if size is None else size
    for name in ("gate", "up") if mlp.gated else ("up",):
        yield from _linear(name, size, hidden, mlp.bias)
    yield from _linear("down", hidden, size, mlp.bias)


def _mlp(mlp: MlpSpec, hidden: int) -> Iterator[tuple[str, Shape]]:
    experts = mlp.experts
    if experts is None:
        yield from expert_shapes(mlp, hidden)
        return
    yield from _linear("router", experts.count, hidden, experts.router_bias)
    if experts.correction:
        yield "router.correction", (experts.count,)
    for name, shape in expert_shapes(mlp, hidden):
        yield f"experts.{name}", (experts.count, *shape)
    if experts.shared is not None:
        for name, shape in expert_shapes(mlp, hidden, experts.shared):
            yield f"shared.{name}", shape
        if experts.shared_gate:
            yield "shared_gate.weight", (1, hidden)
