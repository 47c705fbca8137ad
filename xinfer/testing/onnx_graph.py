"""Checks of an ONNX file that was written by hand: by the standard's checker, and of ONNX Runtime's own operators."""

__all__ = ["check_graph"]

from functools import cache
from pathlib import Path
from typing import Any

import onnx

_RUNTIME = "com.microsoft"


def check_graph(path: Path) -> onnx.ModelProto:
    """Check a model file and return its content without weights; what is wrong is an `AssertionError` or the checker's.

    The standard's checker knows nothing of ONNX Runtime's operators and lets nodes of its domain pass; these are held
    against the schemas that the installed ONNX Runtime has: number of inputs and outputs, names and types of
    attributes. Weights need not be there; where they are, their files must be.
    """
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        schema = _schemas().get((node.domain, node.op_type))
        if node.domain == _RUNTIME or not _is_standard(node):
            assert schema is not None, f"{node.op_type}: ONNX Runtime has no such operator in {node.domain!r}"
            _check_node(node, schema)
            node.domain = _RUNTIME  # where the checker lets it be
    names = [name for node in model.graph.node for name in node.output if name]
    assert len(set(names)) == len(names), "a value is made by two nodes"
    used = {name for node in model.graph.node for name in node.input} | {value.name for value in model.graph.output}
    idle = [tensor.name for tensor in model.graph.initializer if tensor.name not in used]
    assert not idle, f"nobody uses {idle}"
    copy = path.with_name(f".{path.name}.checked")
    try:
        onnx.save_model(model, str(copy))
        onnx.checker.check_model(str(copy), full_check=False)
    finally:
        copy.unlink(missing_ok=True)
    return onnx.load(str(path), load_external_data=False)


def _is_standard(node: onnx.NodeProto) -> bool:
    return node.domain == "" and onnx.defs.has(node.op_type)


@cache
def _schemas() -> dict[tuple[str, str], Any]:
    """Return ONNX Runtime's operators by domain and name, of each the newest."""
    from onnxruntime.capi.onnxruntime_pybind11_state import get_all_operator_schema

    return {(each.domain, each.name): each for each in sorted(get_all_operator_schema(), key=lambda e: e.since_version)}


def _check_node(node: onnx.NodeProto, schema: Any) -> None:
    """Hold a node against its operator's schema."""
    where = f"{node.op_type} that makes {node.output[0]}"
    for kind, names, least, most, formal in (
        ("inputs", node.input, schema.min_input, schema.max_input, schema.inputs),
        ("outputs", node.output, schema.min_output, schema.max_output, schema.outputs),
    ):
        assert least <= len(names) <= most, f"{where} has {len(names)} {kind}, but {least} to {most} are expected"
        for name, parameter in zip(names, formal, strict=False):
            optional = parameter.option != type(parameter.option).Single
            assert name or optional or kind == "outputs", f"{where} lacks its input {parameter.name}"
    for attribute in node.attribute:
        known = schema.attributes.get(attribute.name)
        assert known is not None, f"{where} has the attribute {attribute.name}, which is not known"
        kind = onnx.AttributeProto.AttributeType.Name(attribute.type)
        assert known.type.name.upper() == kind, f"{where}: {attribute.name} is {kind}, not {known.type.name}"
    missing = {name for name, each in schema.attributes.items() if each.required} - {a.name for a in node.attribute}
    assert not missing, f"{where} lacks the attributes {missing}"
