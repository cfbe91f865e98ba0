"""Custom operators of the canonical graph: one folder each, with schema, NumPy reference and ONNX body."""
