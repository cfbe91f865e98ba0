"""Engines of TensorRT under the shared GPU runner. Never run by this project so far: that needs TensorRT and a GPU."""
