"""Whatever the engine asks, in any company and any pieces, the logits are those of the model's plain forward pass."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers")

from xinfer_transformers import TransformersConfig, supports
from xinfer_transformers.runner import TransformersRunner

from xinfer import LLM, BackendContext, Engine, Limits, RequestOutput, SamplingParams
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.composing import default_model
from xinfer.errors import ConfigError, ModelError
from xinfer.models.families import xinfer_model_families
from xinfer.models.lora.adapter import Adapter
from xinfer.models.model import Model
from xinfer.models.sources import resolve
from xinfer.testing.reference import parity, reference_logits, write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.stepper import Stepper, cut
from xinfer.testing.tiny import tiny_config, write_folder, write_gguf
from xinfer.testing.workload import Met, Workload, check, workload

TOLERANCE = 1e-4
LONGEST = 96
# Between them: windows, learned positions, sinks, experts, latent attention, layers of two kinds, capped scores, alibi.
FAMILIES = (
    "llama",
    "mistral",
    "qwen2",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "gpt2",
    "gpt_oss",
    "deepseek_v3",
    "falcon",
)
CASES = [
    pytest.param(family, name, marks=() if family in FAMILIES and name == names[0] else pytest.mark.slow)
    for family, names in SHAPES.items()
    for name in names
    if name not in ("dynamic", "longrope")  # refused where the context is long, see below
]


@pytest.fixture(autouse=True)
def one_thread():
    """Tiny products are slower on several."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("tiny"), tiny_config("llama"), seed=0)


def model_of(path: Path, **held: Any) -> Model:
    return Model(str(path), lambda: path, xinfer_model_families(), **held)


def runner(path: Path, limits: Limits | None = None, attention: str = "auto", **held: Any) -> TransformersRunner:
    limits = limits or Limits(max_model_len=LONGEST, max_num_seqs=8)
    config = TransformersConfig(device="cpu", attention=attention)
    return TransformersRunner(BackendContext(model_of(path, **held), config, limits))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 200, length).tolist()


@pytest.mark.parametrize(("family", "name"), CASES)
def test_logits_in_pieces_and_in_company_are_those_of_one_plain_forward_pass(family: str, name: str, tmp_path: Path):
    config = shape(family, name)
    reference, size = write_reference(tmp_path, config, seed=20), config["vocab_size"]
    stepper = Stepper(runner(tmp_path))
    ids = np.random.default_rng(0).integers(0, size, 48).tolist()
    found = parity(stepper, reference, ids, 24, cut(48, np.random.default_rng(1)))
    assert found.difference <= TOLERANCE
    assert found.spread >= 1
    rng = np.random.default_rng(2)
    sequences = [stepper.start(rng.integers(0, size, length).tolist()) for length in (1, 3, 17, 40, 70)]
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    for _ in range(20):  # they join at different times, are cut at random, and decode between others' chunks
        chosen = [i for i in rng.permutation(len(sequences)) if rng.random() < 0.7]
        missing = [len(sequences[i].token_ids) - sequences[i].num_computed for i in chosen]
        counts = [int(rng.integers(1, most + 1)) for most in missing]
        for i, logits in zip(
            chosen, stepper.step([sequences[i] for i in chosen], counts) if chosen else [], strict=True
        ):
            rows[i].append(logits)
            if sequences[i].num_computed == len(sequences[i].token_ids):
                sequences[i].token_ids.append(int(logits[-1].argmax()))
    for sequence, logits in zip(sequences, rows, strict=True):
        theirs = reference_logits(reference, sequence.token_ids[: sequence.num_computed])
        assert (torch.cat(logits) - theirs).abs().max() <= TOLERANCE


def outputs(made: TransformersRunner | TorchRunner, limits: Limits) -> list[RequestOutput]:
    engine = Engine(made, None, limits, seed=3)
    for i in range(9):
        params = SamplingParams(
            max_tokens=12 + 3 * i, temperature=float(i % 2), n=1 + i % 3, ignore_eos=True, logprobs=2
        )
        engine.add_request(prompt(5 + 4 * i, seed=i % 4), params)
    done = [output for step in engine.run() for output in step.finished]
    return sorted(done, key=lambda output: (output.index, output.sample))


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_tokens_of_many_requests_are_those_of_the_torch_backend(family: str, tmp_path: Path):
    folder = write_folder(tmp_path, tiny_config(family), seed=1)
    limits = Limits(max_model_len=LONGEST, max_num_seqs=6, max_num_batched_tokens=40)
    theirs = TorchRunner(BackendContext(model_of(folder), EagerConfig(device="cpu"), limits))
    said = [[output.token_ids for output in outputs(made, limits)] for made in (runner(folder, limits), theirs)]
    assert said[0] == said[1]
    assert len(said[0]) == 18


def made_for(folder: Path, attention: str, work: Workload, cache: dict[str, Any]) -> TransformersRunner:
    """Return a runner for a workload, with room for hardly more than one sequence; without a `cache` for all."""
    limits = replace(work.limits, max_model_len=LONGEST, max_num_seqs=work.limits.max_num_seqs if cache else 32)
    made = runner(folder, limits, attention)
    if cache:
        made.info = replace(made.info, kv_tokens=LONGEST * (1 + work.seed % 3))
    return made


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_random_workloads_come_to_what_each_request_comes_to_alone(attention: str, tiny: Path):
    met = []
    for number in range(8):
        work = workload(number, 256, LONGEST)
        work = replace(work, limits=replace(work.limits, determinism="fast"))
        met.append(check(work, partial(made_for, tiny, attention, work), TOLERANCE))
    assert all(any(getattr(each, name) for each in met) for name in Met.__dataclass_fields__)


def test_the_same_command_comes_to_the_same_bit_for_bit(tiny: Path):
    limits = Limits(max_model_len=LONGEST, max_num_seqs=4)
    once, again = (outputs(runner(tiny, limits), limits) for _ in range(2))
    assert [(each.token_ids, each.logprobs) for each in once] == [(each.token_ids, each.logprobs) for each in again]


def test_bfloat16_is_what_transformers_computes_in_it(tiny: Path):
    from transformers import AutoModelForCausalLM

    made = runner(tiny, attention="eager", dtype="bfloat16")
    reference = AutoModelForCausalLM.from_pretrained(tiny, dtype=torch.bfloat16, attn_implementation="eager").eval()
    stepper, ids = Stepper(made), prompt(30)
    assert torch.equal(stepper.step([stepper.start(ids)], [30])[0], reference_logits(reference, ids))
    assert made.info.dtype == "bfloat16"
    assert made.info.kv_token_bytes == 3 * 2 * 2 * 16 * 2  # layers, keys and values, heads, width, bytes


def test_a_gguf_file_is_read_by_transformers_itself(tiny: Path, tmp_path: Path):
    pytest.importorskip("accelerate")
    file = write_gguf(tmp_path / "tiny.gguf", tiny_config("llama"), seed=0)
    both = [Stepper(runner(path)) for path in (tiny, file)]
    ids = prompt(30)
    ours, theirs = (stepper.step([stepper.start(ids)], [30])[0] for stepper in both)
    assert (ours - theirs).abs().max() <= TOLERANCE


@pytest.mark.parametrize("scale", [1.0, 0.5])
def test_an_adapter_changes_logits_as_much_as_it_is_to(scale: float, tiny: Path, tmp_path: Path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    wanted = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["q_proj", "down_proj"])
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny), wanted)
    for name, parameter in adapted.named_parameters():
        if "lora_" in name:
            parameter.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(5))
    adapted.save_pretrained(tmp_path)
    made = Stepper(runner(tiny, adapter=lambda: Adapter(tmp_path, scale)))
    limits = Limits(max_model_len=LONGEST)
    own = model_of(tiny, adapter=lambda: Adapter(tmp_path, scale))
    ids, plain = prompt(30), Stepper(runner(tiny))
    eager = Stepper(TorchRunner(BackendContext(own, EagerConfig(device="cpu"), limits)))
    ours, theirs, without = (stepper.step([stepper.start(ids)], [30])[0] for stepper in (made, eager, plain))
    assert (ours - theirs).abs().max() <= TOLERANCE
    assert (ours - without).abs().max() > 0.1


def test_dummy_weights_depend_on_their_seed_alone(tiny: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((tiny / "config.json").read_text())
    made = [Stepper(runner(tmp_path, load_format="dummy", dummy_seed=seed)) for seed in (1, 1, 2)]
    one, same, other = (stepper.step([stepper.start(prompt(9))], [9])[0] for stepper in made)
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_weights_that_are_missing_are_no_random_numbers(tmp_path: Path):
    config = tiny_config("llama")
    folder = write_folder(tmp_path, config, seed=0)
    (folder / "config.json").write_text((folder / "config.json").read_text().replace('layers": 3', 'layers": 4'))
    with pytest.raises(ModelError, match=r"missing_keys \(model.layers.3"):
        runner(folder)


def test_a_damaged_file_is_named_with_the_reason(tmp_path: Path):
    folder = write_folder(tmp_path, tiny_config("llama"), seed=0)
    (folder / "model.safetensors").write_bytes(b"nothing of the kind")
    with pytest.raises(ModelError, match=f"{folder}: transformers can't load it .*take backend=eager"):
        runner(folder)


def test_no_code_of_a_checkpoint_runs(tmp_path: Path):
    own = {"auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    folder = write_folder(tmp_path / "model", tiny_config("llama", **own), seed=0)
    (folder / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert runner(folder).info.vocab_size == 272
    assert not (tmp_path / "ran").exists()


def test_pickles_are_not_read(tmp_path: Path):
    folder = write_folder(tmp_path, tiny_config("llama"), seed=0)
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="transformers can't load it"):
        runner(folder)


def test_a_context_in_which_keys_would_not_stay_valid_is_refused(tmp_path: Path):
    write_reference(tmp_path, shape("llama", "dynamic"), seed=1)
    with pytest.raises(ConfigError, match=r"engine\.max_model_len=96: beyond 32 tokens"):
        runner(tmp_path)
    assert runner(tmp_path, Limits(max_num_seqs=2)).info.max_model_len == 32


def test_an_unknown_kind_of_attention_is_refused():
    assert "did you mean 'eager'" in str(supports(None, TransformersConfig(attention="eagre")))
    assert supports(None, TransformersConfig(attention="sdpa")) is None


def test_the_command_says_what_the_torch_backend_says(xinfer, tiny: Path, tmp_path: Path):
    prompts = ["Hello", "What is this?", "Once upon a time"]
    (tmp_path / "prompts.txt").write_text("\n".join(prompts))
    words = ["--model", str(tiny), "--prompts-file", "prompts.txt", "--max-tokens", "12", "--temperature", "0"]
    done = xinfer("backend=transformers", *words, "chat=false")
    assert done.returncode == 0, done.stderr
    with LLM(tiny) as llm:
        params = SamplingParams(max_tokens=12, temperature=0)
        expected = [output.outputs[0].text for output in llm.generate(prompts, params)]
    assert done.stdout.splitlines() == "\n".join(expected).splitlines()
    assert "Loading" not in done.stderr


@pytest.mark.slow
def test_smollm2_says_what_the_torch_backend_says():
    path, limits = resolve(default_model()), Limits(max_model_len=256)
    texts = ["Once upon a time,", "def fibonacci(n):", "日本の首都は", "SELECT name, COUNT(*) FROM"]
    said = []
    for made in (runner(path, limits), TorchRunner(BackendContext(model_of(path), EagerConfig(device="cpu"), limits))):
        tokenizer = model_of(path).tokenizer
        engine = Engine(made, tokenizer, limits, seed=1)
        for i, text in enumerate(texts * 2):
            params = SamplingParams(max_tokens=32, temperature=0.8 * (i % 2), ignore_eos=True)
            engine.add_request(tokenizer.encode(text), params)
        said.append({output.index: output.token_ids for step in engine.run() for output in step.finished})
    assert said[0] == said[1]
