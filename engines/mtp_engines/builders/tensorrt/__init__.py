"""Engines for TensorRT-RTX and TensorRT, whose Python interfaces are nearly the same, by Polygraphy."""
