"""The backend under test, configured as on the command line, and the tiny models that it is tried with."""

__all__ = ["LIMITS", "LONGEST", "Models", "Reported", "Subject", "configured", "judge", "small"]

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from xinfer.backends import Backend, BackendContext
from xinfer.composing import compose
from xinfer.config import Config
from xinfer.engine.runner import ModelRunner
from xinfer.engine.types import Batch, Limits
from xinfer.errors import UsageError
from xinfer.models.families import Family
from xinfer.plugins import Plugins, load_plugins
from xinfer.session import Session
from xinfer.testing.checkpoint import write_checkpoint
from xinfer.testing.conformance.checked import Tolerance
from xinfer.testing.fake import FakeRunner, FakeTokenizer
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.tiny import tiny_config, write_folder, write_gguf

LONGEST = 96
LIMITS: dict[str, Any] = {
    "max_model_len": LONGEST,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "max_logits_rows": 512,
    "kv_memory": 64e6,
}
_TIGHT = 128
# Of what is rounded: of tiny random models without experts, rows of eager are off by up to 0.1 in bfloat16.
_ROUNDED = {"float16": Tolerance(0.03, each=False), "bfloat16": Tolerance(0.25, each=False)}
_CACHED = {"int8": Tolerance(0.1, each=False), "fp8": Tolerance(0.5, each=False)}  # keys and values alone
_WRITTEN_WHOLE = ("llama", "mistral", "qwen2", "qwen3")  # with their tokenizer


@dataclass
class _FakeConfig:
    """The fake backend has no keys."""


def _fake(context: BackendContext) -> ModelRunner:
    return FakeRunner(max_model_len=context.limits.max_model_len or 512, num_blocks=64)


_FAKE = Backend("fake", _FakeConfig, _fake, "a runner without a model", tokenizer=lambda context: FakeTokenizer())


@dataclass(frozen=True)
class Subject:
    """A backend with its configuration.

    Attributes:
        tolerance: how far rows may be off, root mean square, as a share of their spread; None goes by the precision.
    """

    plugins: Plugins
    config: Config
    tolerance: float | None = None

    @property
    def backend(self) -> Backend:
        """What the plugin offers."""
        return self.plugins.backend(self.config.backend.name)

    @property
    def computes_checkpoints(self) -> bool:
        """Whether it runs the model that it is given, rather than something of its own."""
        return self.backend.tokenizer is None

    def session(self, model: Path | None, **engine: Any) -> Session:
        """Return a session with a model (None where it has its own), refused already if the backend can't run it."""
        chosen = self.config.model if model is None else replace(self.config.model, reference=str(model))
        limits = replace(self.config.engine, **{**LIMITS, **engine})
        session = Session(replace(self.config, model=chosen, engine=limits), self.plugins)
        session.check()
        return session

    def limits(self, **engine: Any) -> Limits:
        """Return the engine's limits."""
        found = replace(self.config.engine, **{**LIMITS, **engine})
        return Limits(**{field.name: getattr(found, field.name) for field in fields(Limits)})

    def tolerance_of(self, runner: ModelRunner) -> Tolerance:
        """Return how far rows may be off."""
        if self.tolerance is not None:
            return Tolerance(self.tolerance, each=False)
        kept = [_CACHED[kind] for kind in _CACHED if f"the KV cache is {kind}" in runner.info.notes]
        if runner.info.dtype == "float32":
            return kept[0] if kept else Tolerance(1e-4)
        return max([_ROUNDED.get(runner.info.dtype, _ROUNDED["bfloat16"]), *kept], key=lambda each: each.share)


def configured(name: str, keys: Sequence[str] = (), dtype: str = "float32", tolerance: float | None = None) -> Subject:
    """Return a backend by name, with keys such as `device=cpu`; what is wrong with either is a `UsageError`."""
    plugins = load_plugins()
    plugins.backends.setdefault("fake", _FAKE)
    plugins.backend(name)
    overrides = [f"backend={name}", *(f"backend.{key}" for key in keys), f"model.dtype={dtype}"]
    return Subject(plugins, compose(overrides, plugins), tolerance)


@cache
def judge() -> Subject:
    """Return what checkpoints are compared with: eager, on the CPU, in float32."""
    return configured("eager", ["device=cpu"])


class Models:
    """Tiny models of all families, each written when first asked for, as a folder and as a GGUF file.

    Attributes:
        form: that of the main model: what the backend takes.
    """

    def __init__(self, root: Path, families: dict[str, Family]) -> None:
        self.root, self._families, self.form = root, families, "folder"
        self.written = cache(self._write)

    def main(self, subject: Subject, wanted: Sequence[str]) -> Path | None:
        """Return the first model that a backend can run, a llama if it can; None for one that brings its own.

        It is a folder if the backend takes those, else a GGUF file.
        """
        if not subject.computes_checkpoints:
            return None
        reasons = []
        for family in sorted(wanted or SHAPES, key=lambda name: name != "llama"):
            for self.form in ("folder", "gguf"):
                try:
                    session = subject.session(self.written(family, self.form))
                    _ = session.runner
                except (LookupError, UsageError) as error:
                    reasons.append(str(error))
                else:
                    session.close()
                    return self.written(family, self.form)
        raise UsageError(f"backend {subject.backend.name} can run no tiny model: {reasons[0]}")

    def large(self) -> Path:
        """Return a llama whose weights take some 40 MB, so that one sees where they stay."""
        sizes = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8}
        config = tiny_config("llama", max_position_embeddings=512, **sizes)
        path = self.root / "large"
        return (
            write_folder(path, config, 0) if self.form == "folder" else write_gguf(path.with_suffix(".gguf"), config, 0)
        )

    def _write(self, family: str, form: str) -> Path:
        """Write a family's usual model; `LookupError` where nothing here writes it in this form."""
        path = self.root / f"{family}-{form}"
        if family in _WRITTEN_WHOLE:
            config = tiny_config(family)
            return (
                write_folder(path, config, 0) if form == "folder" else write_gguf(path.with_suffix(".gguf"), config, 0)
            )
        if form == "folder":
            return write_checkpoint(path, shape(family, SHAPES[family][0]), self._families[family])
        return self._convert(family, path.with_suffix(".gguf"))

    def _convert(self, family: str, path: Path) -> Path:
        from xinfer.testing.gguf import GGUF_SHAPES, convert, gguf_shape

        if family not in GGUF_SHAPES:
            raise LookupError(f"GGUF has no architecture for {family} here")
        try:
            import transformers  # noqa: F401
        except ImportError:
            raise LookupError(f"a GGUF file of {family} is converted by the package transformers") from None
        config = gguf_shape(family, next(iter(GGUF_SHAPES[family])))
        return convert(write_checkpoint(self.root / f"{family}-for-gguf", config, self._families[family]), path)


class Reported(ModelRunner):
    """A runner that reports other things of itself than it would: fewer blocks, say."""

    def __init__(self, runner: ModelRunner, **info: Any) -> None:
        self._runner, self.info = runner, replace(runner.info, **info)

    def forward(self, batch: Batch) -> Tensor:
        """See `ModelRunner.forward`."""
        return self._runner.forward(batch)

    def copy(self, source: int, target: int, tokens: int) -> None:
        """See `ModelRunner.copy`."""
        self._runner.copy(source, target, tokens)

    def free(self, blocks: Sequence[int]) -> None:
        """See `ModelRunner.free`."""
        self._runner.free(blocks)


def small(runner: ModelRunner) -> ModelRunner:
    """Return a runner with a cache of 128 tokens, so that sequences have to be put aside."""
    info = runner.info
    blocks = min(info.num_blocks, max(8, _TIGHT // info.block_size))
    return Reported(runner, num_blocks=blocks, kv_tokens=min(_TIGHT, blocks * info.block_size))
