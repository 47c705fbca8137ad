"""Every key of the configuration: its type, its default, its meaning. conf/ holds only values.

Text (prompts, system messages, stop strings) is input, not configuration: see `flags.py`.
"""

__all__ = [
    "Config",
    "EngineConfig",
    "LogConfig",
    "ModelConfig",
    "ParallelConfig",
    "RecordConfig",
    "SamplingConfig",
    "keys",
]

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from omegaconf import MISSING

from xinfer.task_configs import (
    AuditConfig,
    BenchConfig,
    DiffConfig,
    ExportConfig,
    PluginsConfig,
    ReplayConfig,
    RunsConfig,
    SweepConfig,
    WhyConfig,
)


@dataclass
class ModelConfig:
    """Which model, and in what form.

    Attributes:
        reference: a folder in Hugging Face layout, a .gguf file, `hf:org/name[@revision]`, or
            `pypi:dist==version/path/in/wheel#sha256=...`.
        dtype: precision to compute in: auto (float32 on a CPU, bfloat16 on a GPU), float32, bfloat16, float16.
        load_format: auto, or dummy for random weights of the right shapes, for benchmarks: only config.json is needed.
        dummy_seed: what dummy weights are random by.
        lora: an adapter that is merged into the weights as they are read, `folder[:scale]`: a PEFT folder (or
            `hf:org/name[@revision]`), and how far to go from the model to the adapted one (1).
        quantization: weights as the backend holds them: null (as they are), int8, int4 (embedding, head and value
            projections in eight bits); see `Scheme` for what this and the next three mean.
        quantization_block: inputs that share a scale: 32, 64, 128; null for the kind's default.
        quantization_method: rtn (to nearest), hqq (by the least squared error), gptq (by what becomes of a text; the
            default).
        quantization_symmetric: no zero points; null for the kind's default.
        stream_layers: of the layers, so many are in memory at once; others are brought in as each step needs them, with
            the same tokens. Null has all of them there.
    """

    reference: str = MISSING
    dtype: str = "auto"
    load_format: str = "auto"
    dummy_seed: int = 0
    lora: str | None = None
    quantization: str | None = None
    quantization_block: int | None = None
    quantization_method: str | None = None
    quantization_symmetric: bool | None = None
    stream_layers: int | None = None


@dataclass
class SamplingConfig:
    """How tokens are chosen; see `SamplingParams` for what each key means.

    A key that is null has the value of the model's generation_config.json, or else the one that `SamplingParams` has.
    """

    n: int = 1
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logit_bias: dict[int, float] = field(default_factory=dict)
    allowed_token_ids: list[int] | None = None
    max_tokens: int | None = 256
    min_tokens: int = 0
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    extra: dict[str, Any] = field(default_factory=dict)


@dataclass
class EngineConfig:
    """What one step may hold and how it is shared out; see `Limits` for what the first nine keys mean.

    Attributes:
        logprobs_mode: what logprobs are: raw_logprobs (the model's own), processed_logprobs (of what tokens are drawn
            from), raw_logits, processed_logits.
        timeout_s: seconds after which a request ends, done or not.
        speculation: off, ngram (guesses from the text itself), draft (guesses by a smaller model).
        draft_tokens: tokens guessed at once.
        draft_model: reference of the smaller model; it must have the same vocabulary.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    max_logits_rows: int | None = None
    max_queue: int = 100_000
    kv_memory: float | None = None
    prefix_cache: bool = True
    policy: str = "fcfs"
    determinism: str = "fast"
    logprobs_mode: str = "raw_logprobs"
    timeout_s: float | None = None
    speculation: str = "off"
    draft_tokens: int = 4
    draft_model: str | None = None


@dataclass
class ParallelConfig:
    """How a model is shared out.

    Attributes:
        tensor: among so many processes, which `torchrun --nproc-per-node N -m xinfer` starts: each has some heads and
            some columns of every layer.
    """

    tensor: int = 1


@dataclass
class RecordConfig:
    """What is kept of a run.

    Attributes:
        enabled: whether there is a run folder at all.
        text: full, hash (prompts and texts only as SHA-256), or off.
        steps: all, sample (the first hundred, then every tenth), or off.
    """

    enabled: bool = True
    text: str = "full"
    steps: str = "all"


@dataclass
class LogConfig:
    """What is said on standard error.

    Attributes:
        level: debug, info, warning or error; auto is warning on a terminal and info elsewhere. XINFER_LOG goes first.
        json: one JSON object a line.
    """

    level: str = "auto"
    json: bool = False


@dataclass
class Config:
    """The whole configuration.

    Attributes:
        task: what to do.
        chat: whether prompts are messages to an assistant, by the model's chat template where it has one; else they
            are texts to continue.
        json_stats: where the figures go as one line of JSON: `-` is standard error, anything else a file.
        bench_only: print the figures, not the text.
        json: of the tasks `inspect`, `runs` and `why`: print JSON instead of the page.
        run: of the tasks `explain`, `replay` and `why`: a run's folder, or `latest`.
        request, sample: of `replay` and `why`: one of the run's requests, and of its samples.
        plugin: configs of plugins that are no backends, by their group: `+plugin/GROUP=NAME`, then `plugin.GROUP.KEY`.
    """

    task: str = MISSING
    model: ModelConfig = field(default_factory=ModelConfig)
    backend: Any = MISSING
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    engine: EngineConfig = field(default_factory=EngineConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    record: RecordConfig = field(default_factory=RecordConfig)
    log: LogConfig = field(default_factory=LogConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    why: WhyConfig = field(default_factory=WhyConfig)
    diff: DiffConfig = field(default_factory=DiffConfig)
    audit: AuditConfig = field(default_factory=AuditConfig)
    runs: RunsConfig = field(default_factory=RunsConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    plugins: PluginsConfig = field(default_factory=PluginsConfig)
    chat: bool = True
    json_stats: str | None = None
    bench_only: bool = False
    json: bool = False
    run: str = "latest"
    request: int | None = None
    sample: int = 0
    plugin: dict[str, Any] = field(default_factory=dict)


def keys(node: Any = Config, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of a config class, for suggesting the one that was meant."""
    for part in fields(node):
        nested = part.default_factory if isinstance(part.default_factory, type) else None
        yield f"{prefix}{part.name}"
        if nested is not None and is_dataclass(nested):
            yield from keys(nested, f"{prefix}{part.name}.")
