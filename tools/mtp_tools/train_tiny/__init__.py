"""Train a small Qwen3.5-layout checkpoint with an MTP head, from pinned public text, on a CPU.

The recipe counts steps, never seconds, so the same seed, versions and thread count give the same
weights. This package alone may import torch and transformers.
"""
