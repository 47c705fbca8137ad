"""Which tensors are rounded and how, as configured."""

from dataclasses import replace
from pathlib import Path

import pytest

from xinfer import LLM
from xinfer.backends.torch import xinfer_backends
from xinfer.config import ModelConfig
from xinfer.errors import ConfigError
from xinfer.hookspecs import hookimpl
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme, quantizes
from xinfer.models.quantize.text import sample_text
from xinfer.session import quantization
from xinfer.testing.shapes import SHAPES, shape

FLOAT = ("norm", "router", "sinks", "bias", "positions", "shared_gate", "k_b", "v_b")


def spec(family: str, name: str):
    families = {each.name: each for each in xinfer_model_families()}
    return families[family].spec(shape(family, name))


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in SHAPES for name in SHAPES[family]])
def test_every_matrix_of_every_family_is_rounded_and_nothing_else(family: str, name: str) -> None:
    for tensor, dims in spec(family, name).tensors.items():
        stays = any(part in tensor for part in FLOAT) and not tensor.endswith(("embed.weight", "head.weight"))
        assert quantizes(tensor, dims) == (not stays), f"{tensor} {dims}"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("quantization", "int3", r"model\.quantization=int3 is unknown \(did you mean 'int.'.*there are: int8, int4\)"),
        ("quantization_block", 48, r"model\.quantization_block=48 is unknown \(there are: 32, 64, 128\)"),
        ("quantization_method", "rtm", r"model\.quantization_method=rtm is unknown \(did you mean 'rtn'\?\)"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(key: str, value: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        quantization(ModelConfig(**{"reference": "x", "quantization": "int4", key: value}))


@pytest.mark.parametrize("key", ["block", "method", "symmetric"])
def test_a_key_without_a_kind_has_no_effect_and_is_refused(key: str) -> None:
    value = {"block": 64, "method": "rtn", "symmetric": False}[key]
    with pytest.raises(ConfigError, match=rf"model\.quantization_{key}={value} has no effect"):
        quantization(ModelConfig(reference="x", **{f"quantization_{key}": value}))


def test_each_kind_has_defaults_and_keys_change_them() -> None:
    assert quantization(ModelConfig(reference="x")) is None
    for kind, bits in (("int8", 8), ("int4", 4)):
        default = Scheme.configured(kind)
        assert default is not None and default.bits == bits
        changed = Scheme.configured(kind, block=128, method="rtn", symmetric=not default.symmetric)
        assert changed == Scheme(bits, 128, not default.symmetric, "rtn")


def test_bits_are_four_or_eight() -> None:
    with pytest.raises(ConfigError, match="bits=5 is unknown"):
        Scheme(5)


def test_what_suffers_most_gets_eight_bits() -> None:
    scheme = Scheme(4, 64, False, "hqq")
    tensors = spec("llama", next(iter(SHAPES["llama"]))).tensors
    bits = {name: chosen.bits for name, dims in tensors.items() if (chosen := scheme.of(name, dims)) is not None}
    wide = {name for name, number in bits.items() if number == 8}
    assert wide == {name for name in bits if name.startswith(("embed", "head")) or ".attn.v." in name}
    blocks = {name: scheme.of(name, tensors[name]).block for name in bits}
    assert blocks == {name: 32 if name.startswith(("embed", "head")) else 64 for name in bits}
    uniform = Scheme(4, 64, False, "hqq", wide_bits=4)
    assert {uniform.of(name, tensors[name]).bits for name in bits} == {4}


def test_a_model_tells_its_scheme(tiny_llama: Path) -> None:
    model = Model("x", lambda: tiny_llama, xinfer_model_families(), quantization=Scheme(8))
    assert model.quantization == Scheme(8)
    assert Model("x", lambda: tiny_llama, xinfer_model_families()).quantization is None


def test_a_backend_that_can_not_round_says_so(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = [replace(backend, quantizes=False) for backend in xinfer_backends()]
    monkeypatch.setattr("xinfer.backends.torch.xinfer_backends", hookimpl(lambda: plain))
    with pytest.raises(ConfigError, match=r"quantization=int8: backend eager computes with the weights as they are"):
        LLM(str(tiny_llama), overrides=["model.quantization=int8"])


def test_the_text_is_there_and_long_enough() -> None:
    text = sample_text()
    assert len(text) > 50_000
    for words in ("Alice was beginning", "class SizedCache", "H.M.S.", "Anna: Did you manage", "Mr. Sherlock Holmes"):
        assert words in text
