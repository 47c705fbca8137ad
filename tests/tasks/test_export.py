"""`python -m xinfer export`: the folder on ONNX Runtime against transformers, and what is written and refused."""

import json
import os
import shutil
import subprocess
import sys
import weakref
from pathlib import Path

import numpy as np
import onnxruntime as ort
import pytest
import torch
from hydra.core.global_hydra import GlobalHydra
from onnx import TensorProto

from xinfer.backends.onnx import weights
from xinfer.backends.onnx.external import read_model
from xinfer.backends.onnx.weights import make
from xinfer.cli import run
from xinfer.models.model import Model
from xinfer.testing.onnx_graph import check_graph
from xinfer.testing.reference import reference_logits, write_reference
from xinfer.testing.shapes import SHAPES
from xinfer.testing.shapes import shape as shape_of
from xinfer.testing.tiny import tiny_config, write_folder, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

# Plain; turned outside the operator, as queries are normalized; capped, windows, norms by 1 + w; learned positions;
# turned in part; heads of a width that the operator does not take.
FAMILIES = ["llama", "qwen3", "gemma2", "gpt2", "phi", "stablelm"]

# All that onnxruntime-genai 0.18 knows (src/config.cpp) of what such a file says; it refuses every other key.
GENAI = {
    "": {"model", "search"},
    "model": {
        *("bos_token_id", "context_length", "decoder", "eos_token_id", "pad_token_id", "type", "vocab_size"),
    },
    "decoder": {
        *("session_options", "filename", "head_size", "hidden_size", "inputs", "outputs", "num_attention_heads"),
        *("num_hidden_layers", "num_key_value_heads"),
    },
    "session_options": {"log_id", "provider_options", "intra_op_num_threads"},
    "inputs": {"input_ids", "attention_mask", "position_ids", "past_key_names", "past_value_names"},
    "outputs": {"logits", "present_key_names", "present_value_names"},
    "search": {
        *("min_length", "max_length", "batch_size", "num_beams", "num_return_sequences", "top_k", "top_p"),
        *("temperature", "repetition_penalty", "length_penalty", "no_repeat_ngram_size", "diversity_penalty"),
        *("random_seed", "chunk_size", "do_sample", "past_present_share_buffer", "early_stopping", "blank_penalty"),
    },
}


@pytest.fixture
def export(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the task in this process, in an empty folder; returns (exit code, standard output, standard error)."""
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("XINFER_LOG", "error")
    monkeypatch.setattr(sys, "argv", ["xinfer"])

    def call(*words: str | Path) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        capfd.readouterr()
        return run(["export", *map(str, words)]), *capfd.readouterr()

    return call


@pytest.fixture(scope="module")
def written() -> dict[tuple[str, ...], tuple[Path, object]]:
    """What `exported` has made so far."""
    return {}


@pytest.fixture
def exported(export, written, tmp_path_factory: pytest.TempPathFactory):
    """Return the folder that a model is exported to, and the reference's model of it."""

    def call(family: str, *words: str):
        if (family, *words) not in written:
            place = tmp_path_factory.mktemp(family)
            model = write_reference(place / "model", shape(family), seed=0)
            tiny = write_folder(place / "tiny", tiny_config("llama"), seed=0)
            shutil.copy(tiny / "tokenizer.json", place / "model")
            code, _, err = export(place / "model", place / "out", *words)
            assert (code, err) == (0, ""), err
            written[family, *words] = place / "out", model
        return written[family, *words]

    return call


def shape(family: str) -> dict[str, object]:
    return shape_of(family, SHAPES[family][0])


class Folder:
    """A folder's graph, fed as onnxruntime-genai feeds it."""

    def __init__(self, folder: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = options.inter_op_num_threads = 1
        read_model(folder / "model.onnx")
        self.session = ort.InferenceSession(str(folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
        self.inputs = {each.name: each for each in self.session.get_inputs()}

    def run(self, ids: np.ndarray, mask: np.ndarray, past: dict[str, np.ndarray] | None = None):
        """Return logits, and the cache to go on with."""
        at = mask.cumsum(1)[:, -ids.shape[1] :] - 1
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(at, 0) * mask[:, -ids.shape[1] :]}
        for name, each in self.inputs.items():
            if name.startswith("past"):
                _, heads, _, width = each.shape
                kind = np.float16 if "float16" in each.type else np.float32
                feeds[name] = np.zeros((len(ids), heads, 0, width), kind) if past is None else past[name]
        logits, *present = self.session.run(None, {name: feeds[name] for name in self.inputs})
        names = (name for name in self.inputs if name.startswith("past"))
        return logits, dict(zip(names, present, strict=True))

    def run_shared(self, ids: np.ndarray, mask: np.ndarray, cache: dict[str, np.ndarray]) -> np.ndarray:
        """Return logits; keys and values are appended to the cache where it lies."""
        binding = self.session.io_binding()
        at = mask.cumsum(1)[:, -ids.shape[1] :] - 1
        feeds = {"input_ids": ids, "attention_mask": mask, "position_ids": np.maximum(at, 0)}
        for name in self.inputs.keys() & feeds.keys():
            binding.bind_cpu_input(name, feeds[name])
        binding.bind_output("logits", "cpu")
        for name, array in cache.items():
            place = ("cpu", 0, np.float32, array.shape, array.ctypes.data)
            binding.bind_input(name, *place)
            binding.bind_output(name.replace("past_key_values", "present"), *place)
        self.session.run_with_iobinding(binding)
        return binding.copy_outputs_to_cpu()[0]


def drawn(rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 90, (rows, length))


def close(ours: np.ndarray, theirs: torch.Tensor) -> None:
    assert np.abs(ours - theirs.numpy()).max() < 1e-3


# --- the graph ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("rows", "new", "past"), [(1, 5, 0), (3, 1, 7), (4, 9, 0), (1, 17, 3), (1, 1, 40)])
def test_no_size_is_baked_in(exported, family: str, rows: int, new: int, past: int):
    out, model = exported(family, "export.all_logits=true")
    folder, ids = Folder(out), drawn(rows, past + new)
    wanted = torch.stack([reference_logits(model, row.tolist()) for row in ids])
    cache = None
    if past:
        logits, cache = folder.run(ids[:, :past], np.ones((rows, past), np.int64))
        close(logits, wanted[:, :past])
    logits, _ = folder.run(ids[:, past:], np.ones((rows, past + new), np.int64), cache)
    close(logits, wanted[:, past:])


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_of_unequal_prompts_is_each_of_them_alone(exported, family: str, shared: bool):
    out, model = exported(family)
    folder, lengths, steps = Folder(out), [3, 8, 5], 4
    ids = drawn(3, 8 + steps)
    mask = (np.arange(8) < np.array(lengths)[:, None]).astype(np.int64)
    wanted = [reference_logits(model, row[: n + steps].tolist()) for row, n in zip(ids, lengths, strict=True)]
    cache = {
        name: np.full((3, each.shape[1], 64, each.shape[3]), np.nan if shared else 0, np.float32)
        for name, each in folder.inputs.items()
        if name.startswith("past")
    }
    for step in range(steps):
        if step:
            mask = np.concatenate([mask, np.ones((3, 1), np.int64)], axis=1)
            new = np.array([[row[n + step - 1]] for row, n in zip(ids, lengths, strict=True)])
        else:
            new = np.where(mask > 0, ids[:, :8], 2)
        if shared:
            logits = folder.run_shared(new, mask, cache)
        else:
            logits, cache = folder.run(new, mask, cache if step else None)
        assert logits.shape[:2] == (3, 1)
        close(logits[:, 0], torch.stack([rows[n + step - 1] for rows, n in zip(wanted, lengths, strict=True)]))


def test_several_new_tokens_of_several_sequences_with_a_past_are_what_the_operator_refuses(exported):
    out, _ = exported("llama")
    folder = Folder(out)
    _, cache = folder.run(drawn(2, 3), np.ones((2, 3), np.int64))
    with pytest.raises(Exception, match="batch_size must be 1"):
        folder.run(drawn(2, 17), np.ones((2, 20), np.int64), cache)


@pytest.mark.parametrize("all_logits", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_graph_passes_the_checker(exported, family: str, all_logits: bool):
    out, _ = exported(family, f"export.all_logits={all_logits}")
    model = check_graph(out / "model.onnx")
    logits = model.graph.output[0]
    (_, places, vocabulary) = logits.type.tensor_type.shape.dim
    assert logits.name == "logits" and vocabulary.dim_value == shape(family)["vocab_size"]
    assert places.dim_param == "sequence" if all_logits else places.dim_value == 1
    (location,) = {e.value for t in model.graph.initializer for e in t.external_data if e.key == "location"}
    assert location == "model.onnx.data"


def test_half_precision_has_logits_in_float32(exported):
    out, model = exported("llama", "model.dtype=float16")
    check_graph(out / "model.onnx")
    folder = Folder(out)
    assert {each.type for name, each in folder.inputs.items() if name.startswith("past")} == {"tensor(float16)"}
    assert folder.session.get_outputs()[0].type == "tensor(float)"
    ids = drawn(2, 9)
    logits, cache = folder.run(ids, np.ones((2, 9), np.int64))
    more, _ = folder.run(ids[:, :1], np.ones((2, 10), np.int64), cache)
    wanted = torch.stack([reference_logits(model, [*row, row[0]])[-2:] for row in ids.tolist()])
    assert np.abs(np.concatenate([logits, more], axis=1) - wanted.numpy()).max() < 0.05 * wanted.std()
    assert (out / "model.onnx.data").stat().st_size < 2.3 * sum(p.numel() for p in model.parameters())


# --- files ----------------------------------------------------------------------------------------------------------


def known(said: dict[str, object], name: str = "") -> None:
    """Hold an object of genai_config.json against the keys that are known."""
    assert set(said) <= GENAI[name], (name, set(said) - GENAI[name])
    for key, value in said.items():
        if isinstance(value, dict):
            known(value, key)


@pytest.mark.parametrize("family", FAMILIES)
def test_onnxruntime_genai_is_told_what_the_graph_has(exported, family: str):
    out, _ = exported(family)
    said, folder = json.loads((out / "genai_config.json").read_text()), Folder(out)
    known(said)
    model, decoder = said["model"], said["model"]["decoder"]
    # The prompt counts: with less than the context, a longer prompt would be refused.
    context = shape(family).get("max_position_embeddings", shape(family).get("n_positions"))
    assert said["search"]["max_length"] == model["context_length"] == context
    assert 0 <= model["pad_token_id"] < model["vocab_size"]
    keys = [name for name in folder.inputs if name.startswith("past")]
    assert keys == [
        decoder["inputs"][f"past_{part}_names"].replace("%d", str(layer))
        for layer in range(decoder["num_hidden_layers"])
        for part in ("key", "value")
    ]
    assert {(folder.inputs[name].shape[1], folder.inputs[name].shape[3]) for name in keys} == {
        (decoder["num_key_value_heads"], decoder["head_size"])
    }
    assert {folder.inputs[name].type for name in ("input_ids", "attention_mask")} == {"tensor(int64)"}
    assert folder.inputs.keys() - set(keys) <= set(decoder["inputs"].values())
    outputs = [each.name for each in folder.session.get_outputs()]
    assert outputs == ["logits", *(name.replace("past_key_values", "present") for name in keys)]


def test_files_of_a_folder_are_copied(export, tmp_path: Path):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    more = {"temperature": 0.7, "top_k": 5, "min_p": 0.1, "do_sample": True, "pad_token_id": 257}
    generation = json.loads((source / "generation_config.json").read_text()) | more
    (source / "generation_config.json").write_text(json.dumps(generation))
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "secret.txt").write_text("not a model's")
    code, out, _ = export(source, "out")
    written = {path.name for path in Path("out").iterdir()}
    copied = {"tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"}
    assert code == 0 and all(name in out for name in written)
    assert written == copied | {"config.json", "model.onnx", "model.onnx.data", "genai_config.json"}
    assert all((source / name).read_bytes() == Path("out", name).read_bytes() for name in copied)
    assert json.loads(Path("out/config.json").read_text()) == json.loads((source / "config.json").read_text())
    said = json.loads(Path("out/genai_config.json").read_text())
    known(said)
    assert said["search"] | {"do_sample": True, "temperature": 0.7, "top_k": 5} == said["search"]
    assert (said["model"]["pad_token_id"], said["model"]["eos_token_id"]) == (257, [258])


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_a_gguf_files_tokenizer_and_template_are_written(export, tmp_path: Path, kind: str):
    from transformers import AutoTokenizer

    from xinfer.models.families import xinfer_model_families

    config = tiny_config("llama")
    file = write_gguf(tmp_path / "model.gguf", config, seed=0, kind=kind)
    assert export(file, "out")[0] == 0
    ours = Model(str(file), lambda: file, xinfer_model_families())
    again = Model("out", lambda: Path("out"), xinfer_model_families())
    theirs = AutoTokenizer.from_pretrained("out")
    messages = [{"role": "user", "content": "the cat<|im_end|> é"}]
    for text in ("the thé  x\n", "<|im_start|>user", "日本 \t"):
        assert ours.tokenizer.encode(text) == again.tokenizer.encode(text) == theirs(text).input_ids
    assert ours.tokenizer.encode_chat(messages) == again.tokenizer.encode_chat(messages)
    assert theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert again.eos_token_ids == ours.eos_token_ids == (258,)
    assert again.spec == ours.spec
    said = json.loads(Path("out/genai_config.json").read_text())["model"]
    assert (said["bos_token_id"], said["eos_token_id"]) == (256, [258])


def test_the_context_is_what_was_asked_for(export, tmp_path: Path):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    assert export(source, "out", "engine.max_model_len=40", "backend.threads=3")[0] == 0
    said = json.loads(Path("out/genai_config.json").read_text())
    assert said["search"]["max_length"] == said["model"]["context_length"] == 40
    assert said["model"]["decoder"]["session_options"]["intra_op_num_threads"] == 3


def test_for_cuda_it_is_float16_and_says_so(export, tmp_path: Path):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    assert export(source, "out", "backend.device=cuda")[0] == 0
    options = json.loads(Path("out/genai_config.json").read_text())["model"]["decoder"]["session_options"]
    assert options["provider_options"] == [{"cuda": {}}]
    check_graph(Path("out/model.onnx"))


@pytest.mark.parametrize("method", ["rtn", "gptq"])
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_rounded_weights_have_scales_of_the_precision_of_the_device(export, tmp_path: Path, kind: str, method: str):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    for device, wanted in (("cpu", TensorProto.FLOAT), ("cuda", TensorProto.FLOAT16)):
        words = f"backend.device={device}", f"model.quantization={kind}", f"model.quantization_method={method}"
        code, _, said = export(source, device, *words)
        assert code == 0, said
        model = check_graph(Path(device, "model.onnx"))
        assert {each.data_type for each in model.graph.initializer if each.name.endswith(".scales")} == {wanted}


def test_one_weight_at_a_time_is_in_memory(export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    alive: list[weakref.ref[torch.Tensor]] = []

    def remember(*arguments: object) -> torch.Tensor:
        assert not any(each() is not None for each in alive)
        made = make(*arguments)
        alive.append(weakref.ref(made))
        return made

    monkeypatch.setattr(weights, "make", remember)
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    assert export(source, "out")[0] == 0
    assert len(alive) == len(read_model(Path("out/model.onnx")).graph.initializer) - len(in_the_graph("out"))


def in_the_graph(folder: str) -> list[str]:
    return [t.name for t in read_model(Path(folder, "model.onnx")).graph.initializer if not t.external_data]


def test_weights_begin_where_they_can_be_mapped(exported):
    out, _ = exported("llama")
    for tensor in read_model(out / "model.onnx").graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        assert int(place.get("offset", 0)) % 64 == 0


# --- what is refused, and what is left ------------------------------------------------------------------------------


def test_what_is_there_is_never_overwritten(export, tmp_path: Path):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    before = sorted(source.iterdir())
    Path("file").write_text("x")
    Path("link").symlink_to("nowhere")
    Path("empty").mkdir()
    for out, why in ((source, "not empty: empty it, or name"), ("file", "no folder"), ("link", "no folder")):
        code, said, err = export(source, out)
        assert (code, said) == (2, "") and why in err and err.count("\n") == 1
    assert sorted(source.iterdir()) == before
    assert export(source, "empty")[0] == 0
    assert export(source, "new/folders/out")[0] == 0
    assert sorted(path.name for path in Path().iterdir()) == ["empty", "file", "link", "new"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["MODEL"], "python -m xinfer export MODEL OUT"),
        (["MODEL", "out", "more"], "unexpected word 'more'"),
        (["MODEL", "out", "backend=eager"], "backend=eager exports no models (these do: onnx"),
        (["MODEL", "out", "backend.device=npu"], "for cpu or cuda"),
        (["MODEL", "out", "model.dtype=float8"], "model.dtype='float8' is unknown"),
        (["MODEL", "out", "model.dtype=bfloat16"], "model.dtype=bfloat16"),
        (["MODEL", "out", "model.dtype=float32", "backend.device=cuda"], "model.dtype=float32"),
        (["nowhere", "out"], "no such file or folder"),
    ],
    ids=lambda each: " ".join(each) if isinstance(each, list) else "",
)
def test_what_cannot_be_is_one_line_and_leaves_nothing(export, tmp_path: Path, words: list[str], message: str):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    code, out, err = export(*(str(source) if word == "MODEL" else word for word in words))
    assert (code, out) == (2, "")
    assert message in err and err.count("\n") == 1
    assert not list(Path().iterdir())


def test_whatever_fails_leaves_nothing(export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    for error, wanted in ((OSError(28, "No space left on device"), 3), (KeyboardInterrupt(), 130)):

        def fail(fd: int, error: BaseException = error) -> None:
            (folder,) = Path().iterdir()
            assert folder.name.startswith(".out.partial-") and list(folder.rglob("model.onnx.data"))
            raise error

        with monkeypatch.context() as patched:
            patched.setattr(os, "fsync", fail)
            code, out, err = export(source, "out")
        assert (code, out) == (wanted, "") and err.count("\n") == 1
        assert not list(Path().iterdir())


def test_too_small_a_disk_is_said_before_any_weight_is_read(export, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 1000))
    code, _, err = export(source, "out")
    assert code == 3 and "make room" in err and not list(Path().iterdir())


# --- onnxruntime-genai itself ---------------------------------------------------------------------------------------

GENAI_PYTHON = os.environ.get("XINFER_GENAI_PYTHON", "")
GENERATE = """
import json, sys
import numpy as np
import onnxruntime_genai as og

asked = json.load(sys.stdin)
model = og.Model(asked["folder"])


def greedy(prompts):
    longest = max(map(len, prompts))
    params = og.GeneratorParams(model)
    params.set_search_options(batch_size=len(prompts), max_length=longest + asked["steps"], do_sample=False)
    generator = og.Generator(model, params)
    ids = np.array([prompt + [asked["pad"]] * (longest - len(prompt)) for prompt in prompts], np.int32)
    generator.append_tokens(ids if len(prompts) > 1 else ids[0])
    texts = [[] for _ in prompts]
    for _ in range(asked["steps"]):
        if generator.is_done():
            break
        generator.generate_next_token()
        for text, token in zip(texts, generator.get_next_tokens()):
            text.append(int(token))
    return texts


tokenizer = og.Tokenizer(model)
tokenizer.update_options(add_special_tokens="true")
print(json.dumps({
    "alone": [greedy([prompt])[0] for prompt in asked["prompts"]],
    "together": greedy(asked["prompts"]),
    "encoded": [[int(i) for i in tokenizer.encode(text)] for text in asked["texts"]],
}))
"""


def by_genai(folder: Path, prompts: list[list[int]], steps: int, texts: list[str]):
    """Return what onnxruntime-genai makes of a folder, greedily: each prompt alone and all together, and texts' ids."""
    pad = json.loads((folder / "genai_config.json").read_text())["model"]["pad_token_id"]
    asked = {"folder": str(folder), "prompts": prompts, "steps": steps, "pad": pad, "texts": texts}
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [GENAI_PYTHON, "-c", GENERATE]
    done = subprocess.run(
        command, input=json.dumps(asked), capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def until(tokens: list[int], end: int) -> list[int]:
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


@pytest.mark.skipif(not GENAI_PYTHON, reason="XINFER_GENAI_PYTHON names no Python that has onnxruntime-genai")
@pytest.mark.parametrize("all_logits", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_onnxruntime_genai_says_what_the_reference_says(exported, family: str, all_logits: bool):
    out, model = exported(family, f"export.all_logits={all_logits}")
    said = json.loads((out / "genai_config.json").read_text())["model"]
    end = said.get("eos_token_id", [said["pad_token_id"]])[0]
    prompts = [(3 + row[:length]).tolist() for row, length in zip(drawn(3, 12), (4, 12, 7), strict=True)]
    found = by_genai(out, prompts, 16, [])
    for prompt, alone, together in zip(prompts, found["alone"], found["together"], strict=True):
        tokens = list(prompt)
        for _ in range(16):
            tokens.append(int(reference_logits(model, tokens)[-1].argmax()))
        wanted = until(tokens[len(prompt) :], end)
        assert until(alone, end) == until(together, end) == wanted


@pytest.mark.skipif(not GENAI_PYTHON, reason="XINFER_GENAI_PYTHON names no Python that has onnxruntime-genai")
@pytest.mark.slow
def test_onnxruntime_genai_runs_the_default_model(export, smollm2_path: Path):
    from xinfer import LLM, SamplingParams

    texts = ["Once upon a time", "The capital of France is", "def fibonacci(n):\n    ", "don't  I'll 1234 é 日本 🙂"]
    assert export(smollm2_path, "out")[0] == 0
    with LLM(str(smollm2_path)) as llm:
        prompts = [llm.tokenizer.encode(text) for text in texts]
        ours = [
            list(o.outputs[0].token_ids) for o in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64))
        ]
    found = by_genai(Path("out").absolute(), prompts, 64, texts)
    assert found["encoded"] == prompts
    assert [until(each, 2) for each in found["alone"]] == ours
    assert [until(each, 2) for each in found["together"]] == ours
