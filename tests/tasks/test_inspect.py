"""`python -m xinfer inspect`: figures against other ways to get them, and what is said where little is known."""

import io
import json
import struct
import sys
import types
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from pathlib import Path

import gguf
import pytest
import rich.console
import torch
from hydra.core.global_hydra import GlobalHydra

from xinfer import hardware, plugins
from xinfer.backends import Backend, BackendContext
from xinfer.backends.torch import EagerConfig, supports, xinfer_backends
from xinfer.backends.torch.runner import TorchRunner
from xinfer.cli import run
from xinfer.engine.types import Limits
from xinfer.hardware import Speed
from xinfer.hookspecs import hookimpl
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.spec import DecoderSpec
from xinfer.models.weights import Weights
from xinfer.tasks import inspect_page
from xinfer.tasks.estimate import memory
from xinfer.testing.fake import FakeRunner
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape
from xinfer.testing.tiny import tiny_config, write_folder, write_gguf

SPEED = Speed(1e9, 2e9, 4e9, 1e8, "2026-01-01")
AT_LEAST = ("family", "parameters", "weight_bytes", "kv_bytes_per_token", "max_model_len", "backends")


@pytest.fixture
def inspect(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]):
    """Run the task in this process, in an empty folder; returns (exit code, standard output, standard error).

    Reading any weight fails the test, and the device's speed is made up.
    """
    place = tmp_path / "here"
    place.mkdir()
    monkeypatch.chdir(place)
    monkeypatch.setenv("XINFER_LOG", "error")
    monkeypatch.setattr(sys, "argv", ["xinfer"])
    monkeypatch.setattr(hardware, "speed", lambda device, cache: SPEED)

    def call(*words: str) -> tuple[int, str, str]:
        GlobalHydra.instance().clear()
        capfd.readouterr()
        with monkeypatch.context() as patched:
            patched.setattr(Weights, "load", lambda weights, name: pytest.fail(f"{name} was read"))
            code = run(["inspect", *words])
        assert not list(place.iterdir()), "it left files"
        return code, *capfd.readouterr()

    return call


@pytest.fixture
def told(inspect):
    """Return what `--json` prints of a model."""

    def call(model: Path, *words: str):
        code, out, err = inspect(str(model), "--json", "backend.device=cpu", *words)
        assert (code, err) == (0, "")
        assert out.count("\n") == 1
        found = json.loads(out)
        assert set(AT_LEAST) <= set(found)
        return found

    return call


def header_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of every tensor in a folder's files."""
    sizes = {}
    for file in folder.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + struct.unpack("<Q", data[:8])[0]])
        header.pop("__metadata__", None)
        sizes |= {name: entry["data_offsets"][1] - entry["data_offsets"][0] for name, entry in header.items()}
    return sizes


def written(folder: Path, config: dict[str, object]) -> Path:
    """Write a config.json alone."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def spec_of(config: dict[str, object]) -> DecoderSpec:
    families = {family.name: family for family in xinfer_model_families()}
    return families[str(config["model_type"])].spec(config)


def part(found, name: str):
    (one,) = [part for part in found["parts"] if part["name"] == name]
    return one


# --- figures --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mixtral", "gemma2", "phi3", "gpt2", "gpt_oss", "deepseek_v3"])
def test_parameters_are_the_references_and_bytes_those_of_the_files(told, family: str, tmp_path: Path):
    folder = tmp_path / "model"
    reference = write_reference(folder, shape(family, SHAPES[family][0]), seed=0)
    found = told(folder)
    corrections = sum(b.numel() for name, b in reference.named_buffers() if "correction" in name)
    assert found["parameters"] == sum(p.numel() for p in reference.parameters()) + corrections
    assert found["parameters"] == sum(part["parameters"] for part in found["parts"])
    assert found["stored_weight_bytes"] + found["unused_bytes"] == sum(header_sizes(folder).values())
    assert found["stored_weight_bytes"] == found["weight_bytes"] == 4 * found["parameters"]
    assert all(set(part["stored_bytes"]) == {"F32"} for part in found["parts"])


def test_parts_are_what_they_are_called(told, tmp_path: Path):
    folder = write_folder(tmp_path / "model", tiny_config("qwen3"), seed=0, shards=3)
    found, sizes = told(folder), header_sizes(folder)
    for name, words in {
        "embedding": ["embed_tokens"],
        "attention": ["q_proj", "k_proj", "v_proj", "o_proj"],
        "feed-forward": ["gate_proj", "up_proj", "down_proj"],
        "norms": ["norm"],
        "head": ["lm_head"],
    }.items():
        wanted = sum(size for tensor, size in sizes.items() if any(word in tensor for word in words))
        assert part(found, name)["stored_bytes"] == {"F32": wanted}
        assert part(found, name)["parameters"] == wanted // 4


def test_of_experts_those_chosen_are_active(told, tmp_path: Path):
    config = shape("mixtral", "usual")
    found = told(written(tmp_path / "a", config))
    each = 3 * config["hidden_size"] * config["intermediate_size"]
    layers, count, chosen = 3, config["num_local_experts"], config["num_experts_per_tok"]
    assert part(found, "experts")["parameters"] == layers * count * each
    assert part(found, "experts")["active_parameters"] == layers * chosen * each
    assert found["active_parameters"] == found["parameters"] - layers * (count - chosen) * each
    # A router is float32 in any precision.
    half = told(tmp_path / "a", "model.dtype=bfloat16")
    router = layers * count * config["hidden_size"]
    assert half["weight_bytes"] == 2 * (found["parameters"] - router) + 4 * router


@pytest.mark.parametrize(
    ("family", "kind", "numbers"),
    [
        ("llama", "plain", 3 * 2 * 1 * 12),  # layers x (keys, values) x heads x width
        ("qwen3", "usual", 3 * 2 * 2 * 16),
        ("deepseek_v3", "usual", 3 * (24 + 8)),  # the vector, and what of a key is turned
        ("gpt_oss", "usual", 3 * 2 * 2 * 16),  # a window reads less, but holds as much
    ],
)
def test_a_token_takes_keys_and_values_of_every_layer(told, family: str, kind: str, numbers: int, tmp_path: Path):
    folder = written(tmp_path / "a", shape(family, kind))
    assert told(folder)["kv_bytes_per_token"] == 4 * numbers
    assert told(folder, "model.dtype=bfloat16")["kv_bytes_per_token"] == 2 * numbers


def test_floors_are_bytes_over_bandwidth_and_operations_over_products(told, tmp_path: Path):
    config = shape("gpt_oss", "usual")  # windows of 9 in two of three layers
    found = told(written(tmp_path / "a", config), "engine.max_num_seqs=5", "engine.max_model_len=100")
    idle = found["parameters"] - found["active_parameters"]
    table = config["vocab_size"] * config["hidden_size"]
    weights = 4 * (found["parameters"] - idle - table)
    cached = 4 * 2 * 2 * 16 * (9 + 100 + 9)
    cases = [(case["num_seqs"], case["tokens"], case["read_bytes"]) for case in found["floors"]["decode"]]
    assert cases == [(1, 0, weights), (1, 100, weights + cached), (5, 100, weights + 5 * cached)]
    last = found["floors"]["decode"][-1]
    assert last["floor_ms"] == pytest.approx(last["read_bytes"] / 1e9 * 1e3)
    assert last["tok_s"] == pytest.approx(5 / (last["floor_ms"] / 1e3))
    prefill = found["floors"]["prefill"]
    assert prefill["flop_per_token"] == 2 * (found["active_parameters"] - 2 * table)  # neither embedding nor head
    assert prefill["tok_s"] == pytest.approx(2e9 / prefill["flop_per_token"])
    half = told(tmp_path / "a", "model.dtype=float16")["floors"]
    assert half["flop_s"] == 1e8


@pytest.mark.parametrize("family", SHAPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_take_what_the_runner_says_they_do(family: str, dtype: str, tmp_path: Path):
    folder = written(tmp_path / "a", shape(family, SHAPES[family][0]))
    model = Model(str(folder), lambda: folder, xinfer_model_families(), dtype=dtype, load_format="dummy")
    limits = Limits(max_num_seqs=2, max_model_len=16)
    runner = TorchRunner(BackendContext(model, EagerConfig(device="cpu"), limits))
    of = getattr(torch, dtype)
    needs = memory(model.spec, limits, of, lambda spec: spec.cache_width * of.itemsize, free=1 << 30)
    assert needs.weight_bytes == runner.info.resident_weight_bytes
    assert needs.kv_cache_bytes == runner.info.kv_cache_bytes
    runner.close()


@pytest.mark.parametrize("free", [0, 1 << 20, 3 << 20, 40 << 20])
def test_what_would_fit_fits_and_no_more_does(free: int):
    spec = spec_of(shape("llama", "linear"))
    limits = Limits(max_num_seqs=4, max_model_len=64, max_logits_rows=2000)
    needs = memory(spec, limits, torch.float32, lambda spec: 4 * spec.cache_width, free)
    fixed, token = needs.weight_bytes + needs.activation_bytes, 4 * 3 * 2 * 2 * 20
    assert needs.total_bytes == fixed + 4 * 64 * token
    many, longest = needs.largest_max_num_seqs, needs.largest_max_model_len
    assert many == 0 or fixed + many * 64 * token <= free
    assert fixed + (many + 1) * 64 * token > free
    assert longest == 0 or fixed + 4 * longest * token <= free
    assert longest == spec.max_model_len or fixed + 4 * (longest + 1) * token > free


# --- where it comes from --------------------------------------------------------------------------------------------


def test_the_default_model_in_a_process_of_its_own(xinfer, smollm2_path: Path, tmp_path: Path):
    done = xinfer("inspect", "--json", "backend.device=cpu")
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["path"] == str(smollm2_path)
    assert (found["family"], found["parameters"], found["max_model_len"]) == ("llama", 134_515_008, 8192)
    assert found["weight_bytes"] == 4 * 134_515_008
    assert found["kv_bytes_per_token"] == 4 * 30 * 2 * 3 * 64
    assert 0.97 * smollm2_path.stat().st_size < found["stored_weight_bytes"] < smollm2_path.stat().st_size
    assert (found["license"], found["license_source"]) == ("apache-2.0", "general.license")
    assert found["backends"]["eager"]["runs"] is True
    assert found["floors"]["decode"][0]["tok_s"] > 0 and found["floors"]["prefill"]["tok_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["Q8_0", "F16"])
def test_a_gguf_file_tells_how_it_is_stored(told, kind: str, tmp_path: Path):
    path = write_gguf(tmp_path / "m.gguf", tiny_config("llama"), seed=0, kind=kind)
    found = told(path)
    sizes = [(tensor.name, int(tensor.n_bytes)) for tensor in gguf.GGUFReader(path).tensors]
    assert found["stored_weight_bytes"] == sum(size for _, size in sizes)
    attention = sum(size for name, size in sizes if "attn_" in name and "norm" not in name)
    assert part(found, "attention")["stored_bytes"] == {kind: attention}
    assert set(part(found, "norms")["stored_bytes"]) == {"F32"}
    assert found["license"] is None


@pytest.mark.parametrize("named", ["folder", "file"])
def test_a_config_is_enough(told, named: str, tmp_path: Path):
    folder = written(tmp_path / "a", shape("mixtral", "usual"))
    (folder / "config.json").rename(folder / ("config.json" if named == "folder" else "other.json"))
    found = told(folder if named == "folder" else folder / "other.json")
    assert found["parameters"] > 0
    assert found["stored_weight_bytes"] is found["unused_bytes"] is None
    assert any("config.json alone" in note for note in found["notes"])


def test_a_spare_head_is_told_of_without_reading_it(told, tmp_path: Path):
    folder = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    found = told(folder)
    assert any("lm_head.weight is not used" in note for note in found["notes"])
    assert found["unused_bytes"] == 4 * config["vocab_size"] * config["hidden_size"]


def test_what_the_index_does_not_name_is_told(told, tmp_path: Path):
    folder = write_folder(tmp_path / "model", tiny_config("llama"), seed=0, shards=2)
    (folder / "stray.safetensors").write_bytes(b"")
    assert told(folder)["notes"] == ["not read, since the index does not name them: stray.safetensors"]


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"README.md": "---\nlicense: apache-2.0  # really\ntags: [a]\n---\n# Model\n"}, ("apache-2.0", "README.md")),
        ({"README.md": '---\r\ntags:\r\n- license\r\nlicense: "mit"\r\n---\r\n'}, ("mit", "README.md")),
        ({"README.md": "---\nlicense:\n- mit\n- cc-by-4.0\n---\n"}, ("mit, cc-by-4.0", "README.md")),
        ({"README.md": "---\nlicense: other\nlicense_name: gemma\n---\n"}, ("gemma", "README.md")),
        ({"README.md": "---\nlicense: other\n---\n"}, ("other", "README.md")),
        (
            {"README.md": "# Model\nlicense: mit\n", "LICENSE.txt": "\n  Some License\n1. ..."},
            ("Some License", "LICENSE.txt"),
        ),
        ({"COPYING": "\x1b[31mred\n"}, ("[31mred", "COPYING")),
        ({"README.md": "---\nlicense: [\n---\n"}, (None, None)),
        ({"README.md": "---\nlicense: mit\n"}, (None, None)),
        ({}, (None, None)),
    ],
)
def test_the_licence_is_what_the_files_say(told, files: dict[str, str], said: tuple[str | None, str | None], tmp_path):
    folder = written(tmp_path / "a", shape("llama", "plain"))
    for name, text in files.items():
        (folder / name).write_text(text, newline="")
    found = told(folder)
    assert (found["license"], found["license_source"]) == said


# --- backends -------------------------------------------------------------------------------------------------------


@dataclass
class Keys:
    """Keys of a made-up backend."""

    mode: str = "whole"


@pytest.fixture
def others(monkeypatch: pytest.MonkeyPatch):
    """Install a plugin with backends that say different things of a model."""

    def picky(spec: DecoderSpec, config: Keys) -> str | None:
        return f"layers[0].attention.heads={spec.layers[0].attention.heads} in backend.mode={config.mode}"

    def broken(spec: DecoderSpec, config: Keys) -> str | None:
        raise RuntimeError("no idea")

    def make(context: BackendContext):
        return FakeRunner()

    module = types.ModuleType("others")
    module.xinfer_backends = hookimpl(
        lambda: [
            Backend("any", Keys, make, "takes all"),
            Backend("own", Keys, make, tokenizer=lambda context: None),
            Backend("picky", Keys, make, supports=picky),
            Backend("broken", Keys, make, supports=broken),
        ]
    )
    module.xinfer_backends.__name__ = "xinfer_backends"
    monkeypatch.setattr(EntryPoint, "load", lambda entry: module)
    monkeypatch.setattr(plugins, "entry_points", lambda group: [EntryPoint("others", "others", "xinfer")])
    monkeypatch.delenv("XINFER_PLUGINS", raising=False)


def test_every_backend_says_whether_it_can_run_the_model(others, inspect, tmp_path: Path):
    folder = written(tmp_path / "a", shape("llama", "plain"))
    code, out, _ = inspect(str(folder), "--json", "backend=picky", "backend.mode=half")
    assert code == 0
    found = json.loads(out)["backends"]
    assert found["eager"] == {"runs": True, "reason": None, "summary": "plain PyTorch, on the CPU or CUDA"}
    assert found["any"]["runs"] is True
    assert found["own"]["reason"] == "it computes something of its own, no checkpoint"
    assert found["picky"]["reason"] == "layers[0].attention.heads=4 in backend.mode=half"
    assert found["broken"]["reason"] == "it could not tell (RuntimeError: no idea)"
    assert not any(found[name]["runs"] for name in ("own", "picky", "broken"))


def test_what_a_backend_cannot_run_is_refused_before_weights_are_read(others, tiny_llama: Path, monkeypatch, capfd):
    monkeypatch.setattr(sys, "argv", ["xinfer"])
    monkeypatch.setattr(Weights, "load", lambda weights, name: pytest.fail(f"{name} was read"))
    GlobalHydra.instance().clear()
    assert run(["--model", str(tiny_llama), "backend=picky", "record=none"]) == 2
    message = capfd.readouterr().err.splitlines()[-1]
    assert f"backend=picky can't run {tiny_llama}: layers[0].attention.heads=4 in backend.mode=whole" in message


def test_eager_names_the_field_of_what_it_does_not_know():
    spec = spec_of(shape("llama", "llama3"))
    assert supports(spec, EagerConfig()) is None
    first, second, third = spec.layers
    odd = replace(second, mlp=replace(second.mlp, activation="mish"))
    assert supports(replace(spec, layers=(first, odd, third)), EagerConfig()) == (
        "layers[1].mlp.activation='mish' is unknown to it"
    )
    rope = replace(third.attention.rope, kind="spiral")
    odd = replace(third, attention=replace(third.attention, rope=rope))
    reason = supports(replace(spec, layers=(first, second, odd)), EagerConfig())
    assert reason == "layers[2].attention.rope.kind='spiral' is unknown to it"


# --- the page and errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", SHAPES)
def test_the_page_fits_a_narrow_terminal(told, monkeypatch, family: str, tmp_path: Path):
    found = told(written(tmp_path / "a", shape(family, SHAPES[family][0])))
    stream = io.StringIO()
    page = rich.console.Console(file=stream, width=80, soft_wrap=True, highlight=False)
    monkeypatch.setattr(inspect_page, "console", lambda: page)
    inspect_page.show(found)
    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    text = " ".join(" ".join(lines).split())
    for word in (
        f"family {family}",
        "not stated",
        "engine.max_num_seqs",
        "GB/s",
        "eager can run it",
        "note: no weights",
    ):
        assert word in text


def test_the_page_is_on_standard_output_with_what_is_in_brackets(inspect, tmp_path: Path):
    folder = written(tmp_path / "[red]a", shape("gemma2", "usual"))
    code, out, err = inspect(str(folder))
    assert (code, err) == (0, "")
    for words in ("[red]a", "layers 0, 2", "window 9", "softcapped at 50", "factors + 1", "head tied to the embedding"):
        assert words in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"model_type": "lama"}', "model_type='lama' is not supported (did you mean 'llama'"),
        ('{"model_type": "llama"}', "config.json: "),
        ("{", "not valid JSON"),
        ("[]", "a JSON object is expected"),
    ],
)
def test_a_model_that_cannot_be_described_is_one_line(inspect, content: str, message: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(content)
    for model in (tmp_path, tmp_path / "config.json"):
        for words in ([], ["--json"]):
            code, out, err = inspect(str(model), *words)
            assert (code, out, err.count("\n")) == (2, "", 1), err
            assert message in err


def test_other_errors_are_one_line_with_the_exit_code_of_their_kind(inspect, tiny_llama: Path, tmp_path, monkeypatch):
    broken = write_folder(tmp_path / "model", tiny_config("llama"), seed=0, shards=2)
    (broken / "model-00002-of-00002.safetensors").unlink()
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    for words, code, message in [
        (["nowhere"], 2, "no such file or folder"),
        (["pypi:x==1/y.gguf"], 2, "is not 64 hexadecimal digits"),
        ([str(broken)], 2, "the index names 'model-00002-of-00002.safetensors', which is missing"),
        ([str(tiny_llama), "model.dtype=int3"], 2, "model.dtype='int3' is unknown"),
        ([str(tiny_llama), "engine.max_num_seqs=0"], 2, "engine.max_num_seqs=0 is out of range"),
        ([str(tiny_llama), "backend.device=npu"], 2, "backend.device='npu' is not there"),
        ([str(tiny_llama), "twice"], 2, "unexpected word 'twice'"),
        (["hf:org/name"], 3, "could not fetch hf:org/name"),
    ]:
        found, out, err = inspect(*words)
        assert (found, out, err.count("\n")) == (code, "", 1), (words, err)
        assert message in err


def test_rounded_weights_are_told_of_and_who_can_not_compute_with_them(inspect, tmp_path: Path, monkeypatch):
    plain = [replace(backend, quantizes=backend.name != "eager") for backend in xinfer_backends()]
    monkeypatch.setattr("xinfer.backends.torch.xinfer_backends", hookimpl(lambda: plain))
    folder = write_folder(tmp_path / "model", tiny_config("llama"), seed=0)
    status, out, _ = inspect(str(folder), "model.quantization=int8", "backend=onnx", "json=true")
    page = json.loads(out)
    assert status == 0
    assert any("model.quantization=int8 holds its matrices in" in note for note in page["notes"])
    assert page["backends"]["onnx"]["runs"]
    assert "computes with the weights as they are" in page["backends"]["eager"]["reason"]
