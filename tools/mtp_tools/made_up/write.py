"""Writes a checkpoint tensor by tensor; memory stays at one block whatever the size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mtp_tools.made_up.chosen import ChosenWeights
from mtp_tools.made_up.shapes import FLOAT32, PublishedShape, Shapes, config, tensors
from mtp_tools.made_up.successors import Successors

_BLOCK = 1 << 22


def write_checkpoint(directory: Path, shape: PublishedShape, seed: int = 0, acceptance: float | None = None) -> int:
    """Write config.json and model.safetensors; returns the bytes of all tensors.

    Values repeat from one random block at changing offsets: right in scale, cheap to make, and no two
    tensors alike.

    acceptance: the share of its drafts that the head is to be right with; None leaves all weights random.
    """
    chosen = None if acceptance is None else chosen_weights(shape, acceptance, seed)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config(shape), indent=1), encoding="utf-8")
    shapes = tensors(shape)
    header, total = _header(shapes)
    generator = np.random.default_rng(seed)
    values = generator.standard_normal(_BLOCK, np.float32)
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for name, axes in shapes.items():
            random = partial(_blocks, name, values, int(generator.integers(_BLOCK)))
            for block in random(axes) if chosen is None else chosen.blocks(name, axes, random):
                stream.write(block.tobytes())
    return total


def chosen_weights(shape: PublishedShape, acceptance: float, seed: int) -> ChosenWeights:
    """What a checkpoint with a chosen acceptance has in place of random weights."""
    return ChosenWeights(shape, Successors(config(shape)["text_config"]["vocab_size"], acceptance, seed), seed)


def write_headers(directory: Path, shape: PublishedShape) -> None:
    """Write a checkpoint that can be described and not be read: its tensors are a hole in a file."""
    (directory / "config.json").write_text(json.dumps(config(shape), indent=1), encoding="utf-8")
    header, total = _header(tensors(shape))
    with (directory / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + total)


def _header(shapes: Shapes) -> tuple[bytes, int]:
    entries: dict[str, Any] = {}
    offset = 0
    for name, axes in shapes.items():
        wide = name.endswith(FLOAT32)
        size = prod(axes) * (4 if wide else 2)
        dtype = "F32" if wide else "BF16"
        entries[name] = {"dtype": dtype, "shape": list(axes), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(entries).encode()
    return text + b" " * (-len(text) % 8), offset


def _blocks(
    name: str, values: npt.NDArray[np.float32], start: int, axes: tuple[int, ...]
) -> Iterator[npt.NDArray[Any]]:
    """A tensor in pieces: gains near their neutral value, matrices scaled by their width."""
    dtype = np.float32 if name.endswith(FLOAT32) else ml_dtypes.bfloat16
    scale = 0.02 if "embed" in name else 0.1 if len(axes) == 1 else axes[-1] ** -0.5
    shift = 1.0 if name.endswith("linear_attn.norm.weight") else 0.0
    left = prod(axes)
    while left:
        piece = values[start : start + left]
        yield (piece * np.float32(scale) + np.float32(shift)).astype(dtype)
        left -= len(piece)
        start = 0
