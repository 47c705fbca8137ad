"""Which kernel is taken follows from what it can do, and what was against a better one is said."""

from types import SimpleNamespace

import pytest
import torch

from xinfer.backends.torch.choosing import Choice, Device, block_size_of, choose_kernel, note_of
from xinfer.models.spec import AttentionSpec, LatentSpec, NormSpec

PLAIN = AttentionSpec(32, 8, 128)
CAPPED = AttentionSpec(8, 4, 256, softcap=50.0, window=4096)
SINKS = AttentionSpec(64, 8, 64, sinks=True, window=128)
ODD = AttentionSpec(4, 4, 36)
WIDE = AttentionSpec(8, 1, 512)
NARROW = AttentionSpec(4, 2, 12)
LATENT = AttentionSpec(16, 1, 576, latent=LatentSpec(512, None, 128, 64, 128, NormSpec(1e-6)))

HOPPER = Device("cuda", capability=(9, 0), flash=True, triton=True)
TURING = Device("cuda", capability=(7, 5), flash=True, triton=True)
BARE = Device("cuda", capability=(9, 0))
BF16, FP32 = torch.bfloat16, torch.float32

TABLE = [
    (PLAIN, BF16, BF16, HOPPER, "varlen", ()),
    (PLAIN, torch.float16, torch.float16, HOPPER, "varlen", ()),
    (SINKS, BF16, BF16, HOPPER, "varlen", ()),
    (PLAIN, FP32, FP32, HOPPER, "flex", ("varlen_attn: it does not compute in float32",)),
    (CAPPED, BF16, BF16, HOPPER, "flex", ("varlen_attn: it caps no scores",)),
    (ODD, BF16, BF16, HOPPER, "flex", ("varlen_attn: heads are 36 wide, no multiple of 8",)),
    (NARROW, FP32, FP32, HOPPER, "sdpa", ("does not compute in float32", "heads are 12 wide, less than 16")),
    (WIDE, BF16, BF16, HOPPER, "sdpa", ("heads are 512 wide, more than 256",) * 2),
    (LATENT, BF16, BF16, HOPPER, "sdpa", ("values are a part of the keys",) * 2),
    (PLAIN, BF16, torch.int8, HOPPER, "sdpa", ("the cache holds int8, not bfloat16",) * 2),
    (PLAIN, BF16, torch.float8_e4m3fn, HOPPER, "sdpa", ("the cache holds float8_e4m3fn, not bfloat16",) * 2),
    (PLAIN, torch.float16, torch.float16, TURING, "sdpa", ("compute capability 7.5 is below 8.0",) * 2),
    (PLAIN, BF16, BF16, BARE, "sdpa", ("no FlashAttention with block tables", "Triton is not there")),
    (PLAIN, FP32, FP32, Device("cpu", operators=True), "cpp", ()),
    (LATENT, FP32, torch.int8, Device("cpu", operators=True), "cpp", ()),
    (PLAIN, FP32, FP32, Device("cpu"), "sdpa", ("operators in C++: there is no compiler",)),
]


@pytest.mark.parametrize(("spec", "dtype", "kept", "device", "kernel", "reasons"), TABLE)
def test_the_best_kernel_that_can_is_taken(
    spec: AttentionSpec, dtype: torch.dtype, kept: torch.dtype, device: Device, kernel: str, reasons: tuple[str, ...]
) -> None:
    choice = choose_kernel(spec, dtype, kept, device)
    assert choice.kernel == kernel
    assert choice.paged == (kernel != "sdpa")
    assert len(choice.reasons) == len(reasons)
    for told, expected in zip(choice.reasons, reasons, strict=True):
        assert told.endswith(expected)


def test_a_block_is_one_that_all_kernels_of_a_model_can_read() -> None:
    assert block_size_of([Choice("varlen"), Choice("flex"), Choice("sdpa")]) == 256
    assert block_size_of([Choice("flex"), Choice("sdpa")]) == 128
    assert block_size_of([Choice("sdpa")]) == block_size_of([Choice("cpp")]) == 16


def test_a_line_tells_what_computes_which_layers() -> None:
    layers = [SimpleNamespace(attention=each) for each in (PLAIN, WIDE, PLAIN)]
    choices = {each: choose_kernel(each, BF16, BF16, HOPPER) for each in (PLAIN, WIDE)}
    said = note_of(SimpleNamespace(layers=layers), choices)
    gathering = "scaled_dot_product_attention (varlen_attn: "
    assert said.startswith(f"attention is computed in 2 layers by varlen_attn, in 1 layers by {gathering}")
    assert note_of(SimpleNamespace(layers=layers[:1]), choices) == "attention is computed by varlen_attn"


def test_what_this_machine_has_is_found() -> None:
    found = Device.of(torch.device("cpu"))
    assert found.kind == "cpu"
    assert found.capability == (0, 0)
