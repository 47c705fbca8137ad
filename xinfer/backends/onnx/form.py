"""What a graph is written for, besides the model: all that its nodes and the shapes of its weights depend on."""

__all__ = ["Form"]

from dataclasses import dataclass

from xinfer.models.quantize import Scheme


@dataclass(frozen=True, slots=True)
class Form:
    """A graph's precision, and the kernels that it may use.

    Attributes:
        max_len: most tokens of a sequence; rotary tables have as many rows.
        dtype: precision of activations and of weights that are not quantized: float32, float16, bfloat16.
        scheme: how matrices are quantized; None leaves them as they are.
        accuracy_level: in which precision quantized products are computed: 0 leaves it to the kernel, 1 float32,
            4 int8 activations; see com.microsoft.MatMulNBits.
        kv_dtype: precision of keys and values in the cache: that of activations, or int8.
        paged: whether attention reads a cache in blocks (com.microsoft.PagedAttention, which only CUDA has), not one
            row a sequence; then weights are inputs.
        ragged: whether several sequences may have different numbers of new tokens in one call (`query_seqlens`).
        genai: whether inputs and outputs are those of onnxruntime-genai, not of `OnnxRunner`.
        all_logits: of those outputs, whether logits are those of all new tokens, not of each sequence's last.
        layers: whether there are outputs `layers.N` too, [B, S, H]: what goes into layer N, and out of the last.
    """

    max_len: int
    dtype: str = "float32"
    scheme: Scheme | None = None
    accuracy_level: int = 4
    kv_dtype: str = "float32"
    paged: bool = False
    ragged: bool = False
    genai: bool = False
    all_logits: bool = False
    layers: bool = False
