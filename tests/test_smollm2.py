"""The real model says what transformers says, which reads the same file by itself."""

import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from xinfer import LLM
from xinfer.backends import BackendContext
from xinfer.backends.torch import EagerConfig
from xinfer.backends.torch.runner import TorchRunner
from xinfer.config import Config, ModelConfig
from xinfer.engine.engine import Engine
from xinfer.engine.types import Limits, SamplingParams
from xinfer.inputs import Prompt
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.plugins import load_plugins
from xinfer.session import Session

CHATS = [
    "Explain gravity in one sentence.",
    "What is the capital of France?",
    "Write a Python function that adds two numbers.",
    "Wer hat die Relativitätstheorie aufgestellt?",
    "你好,请用中文介绍一下你自己。",
    "List three fruits 🍎🍌🍒 and their colours.",
    "What is 12345 + 67890?",
    "Translate 'good morning' to French, Spanish and Russian.",
    "Résume l'histoire de la tour Eiffel.",
    "Why is the sky blue?",
]
TEXTS = [
    "Once upon a time, in a land far away,",
    "def fibonacci(n):\n    ",
    "The quick brown fox",
    "Der Zauberberg ist ein Roman von",
    "日本の首都は",
    "1, 1, 2, 3, 5, 8, 13,",
    "Ingredients:\n- 200 g flour\n- 2 eggs\n-",
    "Привет! Меня зовут",
    "In 1969, Neil Armstrong",
    "SELECT name, COUNT(*) FROM",
]


@pytest.fixture(scope="module")
def reference(smollm2_path: Path):
    """The same weights in transformers, dequantized and put in order by its own code."""
    from transformers import AutoModelForCausalLM

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_pretrained(
            smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32, attn_implementation="eager"
        )
    return model.eval()


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> Model:
    return Model("smollm2", lambda: smollm2_path, xinfer_model_families())


@pytest.fixture(scope="module")
def runner(model: Model) -> TorchRunner:
    return TorchRunner(BackendContext(model, EagerConfig(), Limits()))


def prompts(model: Model) -> list[list[int]]:
    chats = []
    for i, text in enumerate(CHATS):
        system = [{"role": "system", "content": "You are terse. Antworte kurz."}] if i % 2 else []
        chats.append(model.tokenizer.encode_chat([*system, {"role": "user", "content": text}]))
    return chats + [model.tokenizer.encode(text) for text in TEXTS]


def generate(runner: TorchRunner, model: Model, prompts: list[list[int]], **params) -> list[tuple[int, ...]]:
    engine = Engine(runner, model.tokenizer, Limits(), seed=7, eos_token_ids=model.eos_token_ids)
    for prompt in prompts:
        engine.add_request(prompt, SamplingParams(**params))
    outputs = {output.index: output.token_ids for step in engine.run() for output in step.finished}
    return [outputs[i] for i in range(len(prompts))]


@pytest.fixture(scope="module")
def greedy(model: Model, runner: TorchRunner) -> list[tuple[int, ...]]:
    """What comes of each of the prompts."""
    return generate(runner, model, prompts(model), temperature=0, max_tokens=64)


def test_greedy_tokens_are_those_of_transformers(reference, model: Model, greedy: list[tuple[int, ...]]):
    """Each token is the reference's likeliest after the same tokens, so both texts are the same from first to last.

    One difference is excused over all prompts, where the reference's two likeliest are nearer than 1e-3.
    """
    excused = []
    for prompt, tokens in zip(prompts(model), greedy, strict=True):
        with torch.inference_mode():
            logits = reference(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1]
        assert len(tokens) == 64 or tokens[-1] in model.eos_token_ids
        for place, token in enumerate(tokens):
            if token != int(logits[place].argmax()):
                best, second = logits[place].topk(2).values
                excused.append((prompt, place, float(best - second)))
                break
    assert len(excused) <= 1 and all(margin < 1e-3 for _, _, margin in excused), excused


def test_onnx_generates_the_same_greedy_tokens(
    smollm2_path: Path, model: Model, runner: TorchRunner, greedy: list[tuple[int, ...]]
):
    """Two texts at most may part from eager's, where its two likeliest tokens are nearer than 1e-3."""
    asked = prompts(model)
    with LLM(smollm2_path, "onnx", ["backend.device=cpu"]) as llm:
        results = llm.generate(asked, SamplingParams(temperature=0, max_tokens=64))
    excused = []
    for prompt, expected, result in zip(asked, greedy, results, strict=True):
        tokens = result.outputs[0].token_ids
        if tokens != expected:
            place = next(i for i, (a, b) in enumerate(zip(tokens, expected, strict=False)) if a != b)
            engine = Engine(runner, model.tokenizer, Limits())
            engine.add_request([*prompt, *expected[:place]], SamplingParams(temperature=0, max_tokens=1, logprobs=2))
            (output,) = [output for step in engine.run() for output in step.finished]
            (_, best), (_, second) = output.logprobs[0].top
            excused.append((prompt, place, best - second))
    assert len(excused) <= 2 and all(margin < 1e-3 for _, _, margin in excused), excused


@pytest.mark.slow
def test_greedy_tokens_are_those_that_transformers_generates(reference, model: Model, runner: TorchRunner):
    asked = prompts(model)
    differing = 0
    for prompt, tokens in zip(asked, generate(runner, model, asked, temperature=0, max_tokens=64), strict=True):
        with torch.inference_mode():
            ids = torch.tensor([prompt])
            options = {"do_sample": False, "max_new_tokens": 64, "eos_token_id": list(model.eos_token_ids)}
            whole = reference.generate(ids, attention_mask=torch.ones_like(ids), pad_token_id=0, **options)
        differing += tuple(whole[0, len(prompt) :].tolist()) != tokens
    assert differing <= 1


def test_a_text_can_be_resumed_at_any_token(model: Model, runner: TorchRunner):
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": "Write a short poem about the sea."}])
    params = {"temperature": 0.8, "top_k": 40, "top_p": 0.95}
    (whole,) = generate(runner, model, [prompt], max_tokens=40, **params)
    for place in (1, 10, 25):
        (rest,) = generate(runner, model, [[*prompt, *whole[:place]]], max_tokens=40 - place, **params)
        assert whole[:place] + rest == whole


def test_bfloat16_stays_near_float32(smollm2_path: Path, model: Model, runner: TorchRunner):
    half = Model("smollm2", lambda: smollm2_path, xinfer_model_families(), dtype="bfloat16")
    other = TorchRunner(BackendContext(half, EagerConfig(), Limits()))
    prompt = model.tokenizer.encode_chat([{"role": "user", "content": CHATS[0]}])
    exact, rounded = (generate(r, model, [prompt], temperature=0, max_tokens=8)[0] for r in (runner, other))
    assert exact == rounded
    assert other.info.resident_weight_bytes * 2 == runner.info.resident_weight_bytes


def test_a_stop_string_that_is_a_special_token_ends_the_text(smollm2_path: Path):  # T04
    plugins = load_plugins(allowed="")
    config = Config(task="generate", model=ModelConfig(reference=str(smollm2_path)))
    config.sampling.temperature = 0.0
    config.backend = SimpleNamespace(name="eager", device="cpu", threads=None, kv_dtype=None)
    session = Session(config, plugins)
    # The model's own end of a turn, which its end-of-sequence ids must not be needed for.
    params = session.params_of(Prompt("x", stop=("<|im_end|>", "@@never@@")))
    assert params.stop == ("<|im_end|>", "@@never@@")
    engine = Engine(session.runner, session.tokenizer, session.limits)
    engine.add_request(session.encode(Prompt("What is the capital of France?"))[0], params)
    (output,) = [output for step in engine.run() for output in step.finished]
    assert output.text == "The capital of France is Paris."
    assert output.finish_reason == "stop"
    assert session.tokenizer.decode(output.token_ids[-1:], skip_special_tokens=False) == "<|im_end|>"
