"""Feed-forward parts: one for all tokens, or experts that share them out."""

__all__ = ["Experts", "Mlp", "make_mlp"]

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor, nn

from xinfer.backends.torch.invariant import Padding, Part
from xinfer.backends.torch.linear import activation, make_experts, make_linear
from xinfer.backends.torch.load import Load
from xinfer.models.spec import ExpertsSpec, MlpSpec

Elementwise = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


class Mlp(nn.Module):
    """down(f(gate(x)) * up(x)), gate and up in one matrix; or down(f(up(x))).

    `elementwise(f, x)` computes f(x).
    """

    def __init__(self, spec: MlpSpec, elementwise: Elementwise, up: nn.Module, down: nn.Module) -> None:
        super().__init__()
        self.spec, self.elementwise, self.up, self.down = spec, elementwise, up, down

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        out: Tensor = self.down(self.between(self.up(x)))
        return out

    def between(self, x: Tensor) -> Tensor:
        """What `up` makes of tokens to what `down` gets."""
        spec = self.spec
        if not spec.gated:
            return self.elementwise(activation(spec.activation), x)
        gate, up = x.chunk(2, -1)
        if spec.activation == "swiglu":
            gate, up = gate.clamp(max=spec.limit), up.clamp(-spec.limit, spec.limit)
            return gate * self.elementwise(torch.sigmoid, gate * spec.alpha) * (up + 1)
        return self.elementwise(activation(spec.activation), gate) * up

    def parts(self, hidden: int) -> Iterator[Part]:
        """Yield what computes rows by themselves."""
        yield Part("mlp", hidden, self)


def make_mlp(spec: MlpSpec, elementwise: Elementwise, load: Load) -> Mlp:
    """Return a feed-forward part of the weights `gate`, `up` and `down`."""
    up = make_linear(load, *(("gate", "up") if spec.gated else ("up",)), bias=spec.bias)
    return Mlp(spec, elementwise, up, make_linear(load, "down", bias=spec.bias))


class Router(nn.Module):
    """Chooses experts for each token, in float32."""

    def __init__(self, spec: ExpertsSpec, elementwise: Elementwise, load: Load) -> None:
        super().__init__()
        self.spec, self.elementwise = spec, elementwise
        self.linear = make_linear(load, "router", bias=spec.router_bias)
        self.correction = nn.Parameter(load("router.correction"), requires_grad=False) if spec.correction else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[T, H] to the experts' weights and numbers, both [T, chosen]."""
        spec = self.spec
        logits = self.linear(x.float())
        scores = logits.softmax(-1) if spec.score == "softmax" else self.elementwise(torch.sigmoid, logits)
        chosen = self._preference(scores).topk(spec.chosen).indices
        weights = scores.gather(1, chosen)
        if spec.normalized:
            weights = weights / weights.sum(-1, keepdim=True)
        return weights * spec.scale, chosen

    def _preference(self, scores: Tensor) -> Tensor:
        """Return what experts are chosen by, [T, experts]: minus infinity in groups that are out."""
        spec = self.spec
        preferred = scores if self.correction is None else scores + self.correction
        if spec.groups == 1:
            return preferred
        grouped = preferred.view(scores.shape[0], spec.groups, -1)
        best = grouped.topk(1 if spec.group_score == "best" else 2).values.sum(-1)
        out = torch.ones_like(best, dtype=torch.bool).scatter_(1, best.topk(spec.chosen_groups).indices, value=False)
        return grouped.masked_fill(out[..., None], -torch.inf).flatten(1)


class Experts(nn.Module):
    """Several feed-forward parts, of which each token gets some, weighed.

    Attributes:
        padding: with how many rows an expert computes, where that must not show.
    """

    padding = Padding()

    def __init__(self, spec: MlpSpec, experts: ExpertsSpec, elementwise: Elementwise, load: Load) -> None:
        super().__init__()
        self.elementwise = elementwise
        self.router = Router(experts, elementwise, load)
        one = replace(spec, experts=None)
        self.up = make_experts(load, *(("gate", "up") if spec.gated else ("up",)), bias=spec.bias)
        self.down = make_experts(load, "down", bias=spec.bias)
        self.experts = nn.ModuleList(
            Mlp(one, elementwise, up, down) for up, down in zip(self.up.each(), self.down.each(), strict=True)
        )
        self.shared = self.gate = None
        if experts.shared is not None:
            shared = replace(one, size=experts.shared)
            self.shared = make_mlp(shared, elementwise, load.within("shared."))
            self.gate = make_linear(load, "shared_gate") if experts.shared_gate else None

    def forward(self, x: Tensor) -> Tensor:
        """[T, H] to [T, H]."""
        weights, chosen = self.router(x)
        out = self._computing(x)(x, weights, chosen)
        if self.shared is None:
            return out
        shared: Tensor = self.shared(x)
        return out + (shared if self.gate is None else self.elementwise(torch.sigmoid, self.gate(x)) * shared)

    def _computing(self, x: Tensor) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        if self.up.at_once:
            return self._at_once
        if x.device.type == "cpu" or x.dtype != torch.bfloat16:  # which is all that devices have a kernel for
            return self._one_by_one
        return self._of_one_token if x.shape[0] == 1 else self._grouped

    def _at_once(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        one = self.experts[0]
        assert isinstance(one, Mlp)
        each: Tensor = self.down(one.between(self.up(x, chosen)), chosen)
        return (each * weights[..., None].to(x.dtype)).sum(1)

    def _of_one_token(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Compute with nothing but the chosen experts' matrices, read where they lie."""
        one = self.experts[0]
        assert isinstance(one, Mlp)
        each = self.down.times(one.between(self.up.times(x.expand(chosen.shape[1], -1), chosen[0])), chosen[0])
        return (each * weights[0, :, None].to(x.dtype)).sum(0, keepdim=True)

    def _grouped(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Compute tokens in the order of their experts, without the host knowing which these are."""
        one, flat = self.experts[0], chosen.flatten()
        assert isinstance(one, Mlp)
        order = flat.argsort(stable=True)
        numbers = torch.arange(len(self.experts), device=x.device)
        ends = torch.searchsorted(flat[order], numbers, right=True).to(torch.int32)
        rows, own = x[order // chosen.shape[1]], flat[order]
        each = self.down.grouped(one.between(self.up.grouped(rows, ends, own)), ends, own)
        each = each[order.argsort()].view(*chosen.shape, -1)
        return (each * weights[..., None].to(x.dtype)).sum(1)

    def _one_by_one(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """A token's experts add to it in the order of their numbers."""
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():  # type: ignore[no-untyped-call]
            rows, ranks = (chosen == expert).nonzero(as_tuple=True)
            computed = self._compute(expert, x, rows) * weights[rows, ranks, None].to(x.dtype)
            out.index_add_(0, rows, computed)
        return out

    def _compute(self, expert: int, x: Tensor, rows: Tensor) -> Tensor:
        missing = self.padding.rows(len(rows)) - len(rows)
        padded = torch.cat([rows, rows[-1:].expand(missing)]) if missing else rows
        computed: Tensor = self.experts[expert](x.index_select(0, padded))
        return computed[: len(rows)]

    def parts(self, hidden: int) -> Iterator[Part]:
        """Yield what computes rows by themselves: experts are alike, so that one stands for all."""
        yield Part("router", hidden, lambda x: self.router.linear(x.float()))
        yield Part("expert", hidden, self.experts[0])
        if self.shared is not None:
            yield Part("shared expert", hidden, self.shared)
        if self.gate is not None:
            yield Part("shared gate", hidden, self.gate)
