"""Engines for TensorRT-RTX and TensorRT, whose Python interfaces are nearly the same.

Not built on Polygraphy: its loaders run in the caller's process, which a node that the parser cannot take ends, and
each of its two flavours is chosen by an environment variable before the import.
"""
