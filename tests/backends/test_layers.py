"""What goes into each layer and out of the last is what transformers has there, on every backend that tells it."""

import pytest
import torch
from cases import TOLERANCE, Case, difference

from xinfer.engine.batch import make_batch
from xinfer.engine.forcing import forced_layers
from xinfer.testing.reference import write_reference
from xinfer.testing.shapes import SHAPES, shape


def of_reference(case: Case, token_ids: list[int]) -> list[torch.Tensor]:
    """What goes into each of the reference's layers, and out of the last, [T, H]."""
    model, told = case.reference(), []

    def tell(layer, arguments, named, output):
        told.append((arguments[0] if arguments else named["hidden_states"])[0])
        last[:] = [output[0] if isinstance(output, tuple) else output]

    last: list[torch.Tensor] = []
    for layer in model.model.layers:
        layer.register_forward_hook(tell, with_kwargs=True)
    with torch.inference_mode():
        model(torch.tensor([token_ids]), use_cache=False)
    return [*told, last[0].reshape(told[0].shape)]


@pytest.mark.parametrize("backend", ["eager", "onnx"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "phi", "qwen2_moe"])
def test_layers_are_those_of_transformers(backend: str, family: str, tmp_path):
    case = Case(tmp_path, shape(family, next(iter(SHAPES[family]))), write=write_reference, max_len=64)
    ids = case.prompt(20)
    stepper = case.ours(backend=backend)
    assert "layers" in stepper.runner.info.capabilities
    told = forced_layers(stepper.runner, ids)
    theirs = of_reference(case, ids)
    assert len(told) == len(theirs) == len(case.reference().model.layers) + 1
    for one, other in zip(told, theirs, strict=True):
        assert one.dtype == torch.float32 and one.shape == other.shape
        assert difference(one, other) <= TOLERANCE * float(other.abs().max())
    stepper.runner.close()


@pytest.mark.parametrize("backend", ["eager", "onnx"])
def test_layers_of_several_sequences_go_on_from_what_is_cached(backend: str, tmp_path):
    case = Case(tmp_path, shape("llama", next(iter(SHAPES["llama"]))), write=write_reference, max_len=64)
    texts = [case.prompt(length, seed=length) for length in (20, 7, 1, 12)]
    stepper = case.ours(backend=backend)
    sequences = [stepper.start(text) for text in texts]
    stepper.step([sequences[0]], [15])
    counts = [5, 7, 1, 12]
    for sequence in sequences:
        size = stepper.runner.info.block_size
        while len(sequence.blocks) * size < len(sequence.token_ids):
            sequence.blocks.append(stepper._free.pop())
    told = stepper.runner.layers(make_batch(sequences, counts, [1] * 4, stepper.runner.info.block_size))
    start = 0
    for text, count in zip(texts, counts, strict=True):
        theirs = of_reference(case, text)
        for one, other in zip(told, theirs, strict=True):
            assert difference(one[start : start + count], other[-count:]) <= TOLERANCE * float(other.abs().max())
        start += count
    stepper.runner.close()
