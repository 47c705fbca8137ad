"""What a model is, before any backend touches it.

    reference ─ sources ─► folder | gguf/            where it lies, in which format; quantized/ and lora/ change tensors
                              │
             config.json's words ─ families/ ─► DecoderSpec (spec, layers, rope; shapes: its tensors by canonical name)
                              │                      │
                          Tensors ─ names ─────► Weights ─► a backend asks for one tensor after the other
                              │
                           text/                     tokenizer and chat template

Begin with `model.py`, which has all of these as properties, each read when first asked for; then `spec.py`, and
`families/llama.py` as an example.
"""

__all__: list[str] = []
