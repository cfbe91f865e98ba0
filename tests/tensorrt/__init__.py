"""Tests against the real Python bindings of TensorRT, without its builder."""
