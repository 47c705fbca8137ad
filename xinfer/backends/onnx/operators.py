"""What the operators of the ONNX Runtime that is installed can do: asked of their schemas, not of a version."""

__all__ = ["takes"]


def takes(operator: str, name: str) -> bool:
    """Whether an operator of com.microsoft has an input of this name; false where there is no such operator."""
    from onnxruntime.capi import onnxruntime_pybind11_state as state

    for schema in state.get_all_operator_schema():
        if schema.name == operator and schema.domain == "com.microsoft":
            return any(each.name == name for each in schema.inputs)
    return False
