"""From a configuration to an engine that is ready: model, tokenizer, backend and limits put together."""

__all__ = ["Session", "quantization"]

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, fields, replace
from functools import cached_property
from time import perf_counter
from typing import Any

from xinfer.backends import Backend, BackendContext
from xinfer.checks import check_engine, check_model
from xinfer.config import Config, ModelConfig
from xinfer.engine.engine import Engine, Observers
from xinfer.engine.runner import ModelRunner
from xinfer.engine.sampler import effective
from xinfer.engine.speculative import DraftModelProposer, NgramProposer, Speculator
from xinfer.engine.types import Limits, SamplingParams
from xinfer.errors import ConfigError, RequestError
from xinfer.inputs import Prompt
from xinfer.models.cache import file_sha256
from xinfer.models.lora.adapter import find_adapter
from xinfer.models.model import Model
from xinfer.models.quantize.scheme import Scheme
from xinfer.models.sources import resolve
from xinfer.models.text.tokenizer import Message, Tokenizer
from xinfer.plugins import Plugins
from xinfer.records.provenance import combined

log = logging.getLogger(__name__)


class Session:
    """A model on a backend. Each part is made when first asked for, so that bad input is refused before any work."""

    def __init__(self, config: Config, plugins: Plugins) -> None:
        self.config = config
        self.plugins = plugins
        self.limits = Limits(**{f.name: getattr(config.engine, f.name) for f in fields(Limits)})
        _params(config, {})  # so that what is out of range is refused before anything is fetched
        self.backend: Backend = plugins.backend(config.backend.name)
        if config.model.load_format not in ("auto", "dummy"):
            raise ConfigError(f"model.load_format={config.model.load_format!r} is unknown (there are: auto, dummy)")
        check_engine(config)
        self.quantization = quantization(config.model)
        self.model = self._model(config.model.reference, config.model.lora, config.model.stream_layers)
        self.context = BackendContext(self.model, config.backend, self.limits, config.parallel.tensor)

    def _model(
        self, reference: str, lora: str | None = None, stream_layers: int | None = None, to_describe: bool = False
    ) -> Model:
        if lora is not None and not self.computes_checkpoint:
            raise ConfigError(f"model.lora={lora!r}: backend {self.backend.name} has no weights to merge it with")
        return Model(
            reference,
            lambda: resolve(reference, to_describe=to_describe),
            self.plugins.families.values(),
            dtype=self.config.model.dtype,
            load_format=self.config.model.load_format,
            dummy_seed=self.config.model.dummy_seed,
            adapter=None if lora is None else find_adapter(lora),
            quantization=self.quantization,
            stream_layers=stream_layers,
        )

    @cached_property
    def described(self) -> Model:
        """The model, of which only what describes it is fetched from the hub."""
        return self._model(self.config.model.reference, to_describe=True)

    @property
    def computes_checkpoint(self) -> bool:
        """Whether the backend runs the configured model, rather than something of its own."""
        return self.backend.tokenizer is None

    def check(self) -> None:
        """Refuse a model that can't be described, or not be run, before anything else of it is read."""
        if self.computes_checkpoint:
            check_model(self.config, self.model, self.backend)

    @cached_property
    def params(self) -> SamplingParams:
        """How tokens are chosen where a request does not say: as configured, else as the model's maker says."""
        defaults = self.model.sampling_defaults if self.computes_checkpoint else {}
        try:
            SamplingParams(**defaults)
        except RequestError as error:
            raise ConfigError(f"{self.model.path}: generation_config.json: {error}; give the key a value") from None
        return _params(self.config, defaults)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The backend's, or a plugin's for this model, or the checkpoint's."""
        if self.backend.tokenizer is not None:
            return self.backend.tokenizer(self.context)  # type: ignore[no-any-return]
        found = self.plugins.manager.hook.xinfer_tokenizer(model=self.model)
        return found if found is not None else self.model.tokenizer

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a text."""
        if self.computes_checkpoint:
            return self.model.eos_token_ids
        return tuple(getattr(self.tokenizer, "eos_token_ids", ()))

    @cached_property
    def runner(self) -> ModelRunner:
        """The backend's runner; making it reads the weights."""
        started = perf_counter()
        runner = self.backend.create(self.context)
        log.info(
            "model loaded",
            extra={
                "seconds": perf_counter() - started,
                "backend": self.backend.name,
                "family": self.model.spec.family if self.computes_checkpoint else None,
                "device": runner.info.device,
                "dtype": runner.info.dtype,
                "streaming": runner.info.stream_slots > 0,
            },
        )
        for note in self.model.notes if self.computes_checkpoint else ():
            log.warning(note)
        info = runner.info
        log.info("kv cache", extra={"bytes": info.kv_cache_bytes, "tokens": info.kv_tokens, "blocks": info.num_blocks})
        return runner

    def engine(self, seed: int, observers: Observers) -> Engine:
        """Return an engine on the runner."""
        defaults = self.model.sampling_defaults if self.computes_checkpoint else {}
        taken = [name for name in defaults if getattr(self.config.sampling, name) is None]
        log.info("sampling", extra={"effective": effective(self.params), "from_generation_config": taken})
        return Engine(
            self.runner,
            self.tokenizer,
            self.limits,
            seed=seed,
            eos_token_ids=self.eos_token_ids,
            observers=observers,
            processors=self.plugins.logits_processors(self.runner.info),
            speculator=self.speculator(),
            logprobs_mode=self.config.engine.logprobs_mode,
        )

    def speculator(self) -> Speculator | None:
        """Return what guesses tokens, as configured."""
        wanted = self.config.engine
        if wanted.speculation == "off":
            return None
        if wanted.speculation == "ngram":
            return Speculator(NgramProposer(), wanted.draft_tokens)
        drafter = self._draft_runner(wanted.draft_model or "")
        vocab_size = self.runner.info.vocab_size
        return Speculator(DraftModelProposer(drafter, self.limits, vocab_size), wanted.draft_tokens)

    def _draft_runner(self, reference: str) -> ModelRunner:
        """Return the smaller model on the same backend; another vocabulary is a `ConfigError`."""
        model = self._model(reference)
        if model.tokenizer.content_hash != getattr(self.tokenizer, "content_hash", None):
            raise ConfigError(
                f"engine.draft_model={reference!r} has another tokenizer than the model: take one of the same family"
            )
        return self.backend.create(BackendContext(model, self.config.backend, self.limits))

    def params_of(self, prompt: Prompt) -> SamplingParams:
        """Return one request's parameters: the configured ones, with its own texts and seed."""
        params = replace(self.params, stop=prompt.stop, bad_words=prompt.bad_words, seed=prompt.seed)
        return self.with_stop_tokens(params)

    def with_stop_tokens(self, params: SamplingParams) -> SamplingParams:
        """Let a stop string that is a special token, which the text leaves out, end it as a token."""
        special = getattr(self.tokenizer, "special_ids", {})
        ids = tuple(special[stop] for stop in params.stop if stop in special)
        return replace(params, stop_token_ids=(*params.stop_token_ids, *ids)) if ids else params

    def encode(self, prompt: Prompt) -> tuple[list[int], bool]:
        """Return a prompt's ids, and whether it was taken as a message to an assistant.

        A model without a chat template continues text. A prompt that its context can't hold is refused here, before
        any weights are read; the engine checks again against what memory leaves.
        """
        if prompt.token_ids is not None:
            ids, chat = list(prompt.token_ids), False
        else:
            text = prompt.text or ""
            wanted = self.config.chat if prompt.chat is None else prompt.chat
            chat = wanted and getattr(self.tokenizer, "chat_template", None) is not None
            if chat:
                system = [{"role": "system", "content": prompt.system}] if prompt.system is not None else []
                return self.encode_chat([*system, {"role": "user", "content": text}]), True
            if prompt.system is not None:
                raise RequestError(
                    "a system message needs a chat template: leave out --system, or put it in the prompt"
                )
            ids = self.tokenizer.encode(text)
        self._check_length(ids)
        return ids, chat

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Return the ids of a conversation, up to where the assistant speaks."""
        if getattr(self.tokenizer, "chat_template", None) is None:
            raise RequestError("the model has no chat template: give it a text to continue instead of messages")
        ids = self.tokenizer.encode_chat(messages)
        self._check_length(ids)
        return ids

    def token_text(self, token_id: int) -> str:
        """Return one token for people to see, in quotes."""
        return repr(self.tokenizer.decode([token_id], False))

    def _check_length(self, ids: Sequence[int]) -> None:
        if not self.computes_checkpoint:
            return
        longest = self.model.spec.context_len(self.limits.max_model_len)
        if len(ids) >= longest:
            raise RequestError(
                f"the prompt has {len(ids)} tokens, but the context holds {longest} with at least one generated: "
                f"shorten it, or {self._longer(longest)}"
            )

    def _longer(self, longest: int) -> str:
        most = self.model.spec.max_model_len
        return f"raise engine.max_model_len (up to {most})" if most > longest else "take a model with a longer context"

    def close(self) -> None:
        """Give the runner back, if there is one; asking for it again makes another."""
        runner: ModelRunner | None = vars(self).pop("runner", None)
        if runner is not None:
            runner.close()

    def describe(self) -> dict[str, Any]:
        """Return what run.json says of the model and the runner."""
        chosen = self.config.model
        model: dict[str, Any] = {"reference": chosen.reference, "load_format": chosen.load_format}
        if chosen.load_format == "dummy":
            model["dummy_seed"] = chosen.dummy_seed
        if self.computes_checkpoint:
            spec = self.model.spec
            model |= {
                "path": str(self.model.path),
                "family": spec.family,
                "parameters": spec.parameters,
                "layers": len(spec.layers),
                "notes": self.model.notes,
            }
            if self.quantization is not None:
                model["quantization"] = asdict(self.quantization)
            if self.model.adapter is not None:
                model["adapter"] = {"path": str(self.model.adapter.folder), "scale": self.model.adapter.scale}
        info = asdict(self.runner.info)
        info |= {name: sorted(info[name]) for name in ("levels", "capabilities")}
        return {"model": model if self.computes_checkpoint else None, "runner": info}

    def hashes(self) -> dict[str, Any]:
        """Return by name what computes the hashes of all that decides the tokens, besides the code."""
        if not self.computes_checkpoint:
            return {"tokenizer": lambda: getattr(self.tokenizer, "content_hash", None)}
        hashes = {
            "weights": lambda: combined([file_sha256(path) for path in self.model.files]),
            "spec": self.model.config_hash,
            "tokenizer": lambda: getattr(self.tokenizer, "content_hash", None),
            "template": lambda: getattr(self.tokenizer, "template_hash", None),
        }
        if (scheme := self.quantization) is not None:
            hashes["quantization"] = lambda: repr(scheme)
        if (adapter := self.model.adapter) is not None:
            hashes["adapter"] = lambda: combined([*map(file_sha256, adapter.files), repr(adapter.scale)])
        return hashes


def quantization(model: ModelConfig) -> Scheme | None:
    """Return how weights are to be rounded, as configured."""
    return Scheme.configured(
        model.quantization,
        block=model.quantization_block,
        method=model.quantization_method,
        symmetric=model.quantization_symmetric,
    )


def _params(config: Config, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the configured parameters, those that are null from `defaults`, or as they are built in."""
    given = {name: value for name, value in vars(config.sampling).items() if value is not None}
    keep = {"max_tokens": config.sampling.max_tokens}  # null is a value of its own here: fill the context
    try:
        return SamplingParams(**{**defaults, **given, **keep})
    except RequestError as error:
        raise ConfigError(f"sampling.{error}") from None
