"""What a backend offers to xinfer. Each one lies in a folder of its own and imports what is heavy inside `create`."""

__all__ = ["API_VERSION", "Backend", "BackendContext"]

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Limits
from xinfer.models.layers import AttentionSpec
from xinfer.models.model import Model
from xinfer.models.spec import DecoderSpec

# Of the contract between xinfer and its backends: `Backend`, `BackendContext`, `ModelRunner`, `RunnerInfo`, `Batch`. It
# rises when a backend that was right would no longer be; what is only added leaves it as it is.
API_VERSION = 1


@dataclass(frozen=True, slots=True)
class BackendContext:
    """What a runner is made from.

    Attributes:
        model: the model, of which nothing has been read yet; a backend that brings its own need not touch it.
        config: an instance of the backend's own config class.
        limits: what the engine will ask of the runner at most.
        processes: how many compute the model together, this one among them; see `Backend.splits`.
    """

    model: Model
    config: Any
    limits: Limits
    processes: int = 1


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend as a plugin offers it.

    Attributes:
        name: as in `backend=NAME`.
        config: a dataclass whose fields are the keys `backend.…`; every field has a default.
        create: makes the runner.
        summary: one line for `xinfer plugins` and `--help`.
        tokenizer: from the context to the tokenizer, for a backend that computes no checkpoint; None takes the model's.
        supports: from a model's spec and an instance of `config` to why the backend can't run it, by the name of the
            spec's field or of the key (`layers[3].mlp.experts is set`, `backend.device=npu`), or None where it can. It
            must not load anything. A backend without it can run every model.
        export: writes the model for other programs (`python -m xinfer export`), from the context, into a folder in
            which config.json and the tokenizer lie already; the last argument tells whether logits of all tokens are
            wanted, not only of the last. None for a backend that has no such format.
        cache_bytes: from the attention of a layer, an instance of `config` and the bytes of a number in the precision
            to compute in, to the bytes that a token leaves in that layer's cache. None for a backend that keeps such
            numbers.
        notes: from the context to lines on how it would compute the model, of which only the spec may be read. None for
            a backend that has nothing to say.
        quantizes: whether it rounds weights as `Model.quantization` says.
        splits: whether several processes can compute a model together. `torchrun` starts them all alike; in all but the
            first `create` does not return: it does what the first one's runner does, and leaves the program with that.
        streams: whether it can have fewer layers in memory than there are, as `Model.stream_layers` says.
        api_version: the `API_VERSION` that it was written for; one of another version is refused by name. None does not
            say, and is taken for the present one.
    """

    name: str
    config: type
    create: Callable[[BackendContext], ModelRunner]
    summary: str = ""
    tokenizer: Callable[[BackendContext], Any] | None = None
    supports: Callable[[DecoderSpec, Any], str | None] | None = None
    export: Callable[[BackendContext, Path, bool], None] | None = None
    cache_bytes: Callable[[AttentionSpec, Any, int], int] | None = None
    notes: Callable[[BackendContext], tuple[str, ...]] | None = None
    quantizes: bool = False
    streams: bool = False
    splits: bool = False
    api_version: int | None = None

    def entry_bytes(self, spec: AttentionSpec, config: Any, element: int) -> int:
        """Return the bytes that a token leaves in a layer's cache; see `cache_bytes`."""
        return spec.cache_width * element if self.cache_bytes is None else self.cache_bytes(spec, config, element)

    def refusal(self, spec: DecoderSpec, config: Any) -> str | None:
        """Return in one line why this backend can't run a model, or None where it can; see `supports`."""
        if self.supports is None:
            return None if self.tokenizer is None else "it computes something of its own, no checkpoint"
        return self.supports(spec, config)
