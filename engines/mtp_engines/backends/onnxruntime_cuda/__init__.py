"""ONNX Runtime on a GPU: the shared runner over sessions of the CUDA provider."""
