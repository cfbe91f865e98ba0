"""Writing the checkpoint directory: configuration, tokenizer, and the weights streamed in blocks of rows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from math import prod
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from mtp_tools.smollm2.gguf_file import GgufFile, GgufTensor
from mtp_tools.smollm2.layout import is_rotated, model_config, paired_to_halves, special_ids, tensor_name
from mtp_tools.smollm2.tokenizer import build_tokenizer, check_tokenizer, tokenizer_config

DTYPES: dict[str, tuple[str, np.dtype[Any]]] = {
    "float32": ("F32", np.dtype(np.float32)),
    "bfloat16": ("BF16", np.dtype(ml_dtypes.bfloat16)),
}
"""Name in config.json -> name in safetensors, and NumPy's type."""
_BLOCK_HEADS = 64


def write_checkpoint(file: GgufFile, directory: Path, dtype: str = "float32") -> str:
    """Write a GGUF Llama as a Hugging Face checkpoint; returns what the tokenizer's check found.

    float32 keeps the dequantised values as they are, bfloat16 rounds them once more.

    Raises:
        ModelError: the file is not a Llama with a byte-level vocabulary that this package knows.
    """
    tied = all(tensor.name != "output.weight" for tensor in file.tensors)
    config = model_config(file.metadata, tied, dtype)
    tokenizer = build_tokenizer(file.metadata)
    found = check_tokenizer(tokenizer, file.metadata)
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(directory / "config.json", config)
    _write_json(directory / "generation_config.json", dict(special_ids(file.metadata)))
    _write_json(directory / "tokenizer_config.json", tokenizer_config(file.metadata))
    _write_weights(file, directory / "model.safetensors", dtype, config["head_dim"])
    return found


def _write_weights(file: GgufFile, path: Path, dtype: str, head_dim: int) -> None:
    stored, kind = DTYPES[dtype]
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in file.tensors:
        size = prod(tensor.shape) * kind.itemsize
        entries[tensor_name(tensor.name)] = {
            "dtype": stored,
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    header = json.dumps(entries).encode()
    header += b" " * (-len(header) % 8)
    with path.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        for tensor in file.tensors:
            for block in _blocks(tensor, head_dim):
                stream.write(block.astype(kind).tobytes())


def _blocks(tensor: GgufTensor, head_dim: int) -> Iterator[npt.NDArray[np.float32]]:
    """The tensor in blocks of whole heads, so that rows can be put in order within a block."""
    step = _BLOCK_HEADS * head_dim
    for start in range(0, tensor.shape[0], step):
        rows = tensor.rows(start, min(step, tensor.shape[0] - start))
        yield paired_to_halves(rows, head_dim) if is_rotated(tensor.name) else rows


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
