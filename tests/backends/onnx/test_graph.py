"""What the graphs of all shapes have in common: ONNX's checker and ONNX Runtime's own schemas find nothing in them."""

import json
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from cases import PROMPT, STEPS
from onnx import AttributeProto, ModelProto, NodeProto
from onnx.helper import np_dtype_to_tensor_dtype
from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

from xinfer.backends.onnx import OnnxConfig, supports
from xinfer.backends.onnx.decoder import write
from xinfer.backends.onnx.form import Form
from xinfer.backends.onnx.recipe import Recipe
from xinfer.backends.onnx.weights import make
from xinfer.models.families import xinfer_model_families
from xinfer.models.model import Model
from xinfer.models.quantize import Scheme
from xinfer.models.reader import Reader
from xinfer.testing.shapes import SHAPES, shape

LONGEST = PROMPT + STEPS
FP32 = Form(LONGEST)
FORMS = (
    FP32,
    Form(LONGEST, dtype="float16"),
    Form(LONGEST, scheme=Scheme(4, 32)),
    Form(LONGEST, scheme=Scheme(8, 64, symmetric=False)),
    Form(LONGEST, kv_dtype="int8"),
)
SCHEMAS = {(schema.domain, schema.name): schema for schema in get_all_operator_schema()}
OURS = ("SimplifiedLayerNormalization",)  # ONNX Runtime registers it in the standard's domain, which does not have it
KINDS = {getattr(AttributeProto, name): name for name in AttributeProto.AttributeType.keys()}  # noqa: SIM118

Graph = tuple[Model, ModelProto, dict[str, Recipe]]


@pytest.fixture(
    scope="module",
    params=[(family, name) for family, names in SHAPES.items() for name in names],
    ids=lambda param: "-".join(param),
)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Graph:
    folder: Path = tmp_path_factory.mktemp("graph")
    (folder / "config.json").write_text(json.dumps(shape(*request.param)))
    model = Model("dummy", lambda: folder, xinfer_model_families(), dtype="float32", load_format="dummy")
    if reason := supports(model.spec, OnnxConfig(device="cpu")):
        pytest.skip(reason)
    graph, recipes = write(model.spec, FP32)
    return model, ir.to_proto(graph), recipes


def test_the_checker_and_the_runtimes_schemas_find_nothing(written: Graph) -> None:
    for form in FORMS:
        proto = ir.to_proto(write(written[0].spec, form)[0])
        for node in proto.graph.node:
            if node.domain or node.op_type in OURS:
                against_schema(node)
        onnx.checker.check_model(standard(proto), full_check=True)


def against_schema(node: NodeProto) -> None:
    """Assert that a node has the inputs, outputs and attributes that the runtime's operator takes."""
    schema = SCHEMAS[node.domain, node.op_type]
    assert schema.min_input <= len(node.input) <= schema.max_input, node.op_type
    assert schema.min_output <= len(node.output) <= schema.max_output, node.op_type
    for place, formal in enumerate(schema.inputs[: len(node.input)]):
        assert node.input[place] or formal.option.name == "Optional", f"{node.op_type} lacks {formal.name}"
    given = {attribute.name: KINDS[attribute.type] for attribute in node.attribute}
    known = {name: attribute.type.name for name, attribute in schema.attributes.items()}
    assert given.items() <= known.items(), f"{node.op_type} does not know {given.items() - known.items()}"
    needed = {name for name, attribute in schema.attributes.items() if attribute.required}
    assert needed <= given.keys(), f"{node.op_type} needs {needed - given.keys()}"


def standard(proto: ModelProto) -> ModelProto:
    """Return the graph as the checker can read it: weights are inputs, and what is not ONNX's is in another domain."""
    copy = ModelProto()
    copy.CopyFrom(proto)
    for node in copy.graph.node:
        if node.op_type in OURS:
            node.domain = "com.microsoft"
    weights = [each for each in copy.graph.initializer if each.data_location == onnx.TensorProto.EXTERNAL]
    for weight in weights:
        copy.graph.input.append(onnx.helper.make_tensor_value_info(weight.name, weight.data_type, weight.dims))
        copy.graph.initializer.remove(weight)
    return copy


def test_what_is_not_made_by_a_recipe_is_a_small_constant(written: Graph) -> None:
    model, proto, recipes = written
    outside = {each.name for each in proto.graph.initializer if each.data_location == onnx.TensorProto.EXTERNAL}
    assert outside == recipes.keys()
    for each in proto.graph.initializer:
        if each.name not in outside:
            assert np.prod(each.dims) <= model.spec.hidden_size, each.name  # a norm without factors has ones


def test_recipes_make_what_the_graph_says_and_leave_nothing_out(written: Graph) -> None:
    model, proto, recipes = written
    said = {each.name: (tuple(each.dims), each.data_type) for each in proto.graph.initializer if each.name in recipes}
    with torch.inference_mode(), Reader(model.weights, torch.device("cpu"), torch.float32) as reader:
        made = {name: make(recipe, reader, FP32).numpy() for name, recipe in recipes.items()}
    assert said == {name: (each.shape, np_dtype_to_tensor_dtype(each.dtype)) for name, each in made.items()}
    assert {source for recipe in recipes.values() for source in recipe.sources} == model.spec.tensors.keys()


def test_every_value_that_is_computed_is_used(written: Graph) -> None:
    _, proto, _ = written
    used = {name for node in proto.graph.node for name in node.input} | {each.name for each in proto.graph.output}
    for node in proto.graph.node:
        assert used & set(node.output), f"nobody reads what {node.op_type} computes"
    given = [each.name for each in proto.graph.input] + [each.name for each in proto.graph.initializer]
    assert not set(given) - used
