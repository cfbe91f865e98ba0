"""A graph of a bundle in plain ONNX Runtime, fed with states of the oracle: no code of the product runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort

from tests.oracles.float64 import FullState, LinearState, Oracle

STALE = 7.0
"""Fills the cache rows behind the past: a graph that reads one of them is far off."""

State = FullState | LinearState


@dataclass(frozen=True)
class Run:
    """float32 outputs by name, the batch first."""

    outputs: dict[str, np.ndarray]

    @property
    def logits(self) -> np.ndarray:
        """[batch, logit_rows, vocab_size]."""
        return self.outputs["logits"]


class PlainGraph:
    """One graph file, opened as it lies on disk."""

    def __init__(self, path: Path) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = [value.name for value in self.session.get_outputs()]

    def run(
        self,
        ids: Sequence[Sequence[int]],
        states: Sequence[Sequence[State]],
        starts: Sequence[int],
        *,
        hidden: np.ndarray | None = None,
        capacity: int = 48,
    ) -> Run:
        """Run a block of rows of each sequence after what its states have seen.

        Args:
            ids: one list of equal length for each sequence of the batch.
            states: for each sequence the oracle's state of every layer.
            starts: for each sequence how many positions came before.
            hidden: for the head only, [batch, rows, hidden_size].
        """
        rows = len(ids[0])
        feed = {
            "input_ids": np.array(ids, np.int64),
            "position_ids": np.array([np.arange(start, start + rows) for start in starts], np.int64),
            "past_length": np.array(starts, np.int64),
            "logit_rows": np.array([rows], np.int64),
        }
        if hidden is not None:
            feed["hidden_states"] = hidden.astype(np.float32)
        for layer in range(len(states[0])):
            feed |= _layer_feed(layer, [sequence[layer] for sequence in states], capacity)
        given = {name: value for name, value in feed.items() if name in self.inputs}
        values = self.session.run(self.outputs, given)
        return Run(dict(zip(self.outputs, values, strict=True)))


def states_after(oracle: Oracle, ids: Sequence[int]) -> list[State]:
    """The oracle's states after a text that may be empty."""
    return oracle.forward(ids).states if len(ids) else oracle.initial_states()


def distance(got: np.ndarray, want: np.ndarray) -> float:
    """Greatest difference over the greatest reference value."""
    return float(np.abs(got - want).max() / np.abs(want).max())


def weight_regions(*graphs: Path) -> list[tuple[str, int, int, tuple[int, ...]]]:
    """Name, offset, size and shape of every tensor that the graphs keep in a side file."""
    regions = []
    for path in graphs:
        for tensor in onnx.load(path, load_external_data=False).graph.initializer:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            assert entries.get("location") == "weights.data", f"{tensor.name} lies in {entries.get('location')!r}"
            regions.append((tensor.name, int(entries["offset"]), int(entries["length"]), tuple(tensor.dims)))
    return regions


def _layer_feed(layer: int, states: Sequence[State], capacity: int) -> dict[str, np.ndarray]:
    if isinstance(states[0], LinearState):
        return {
            f"past.{layer}.conv": np.stack([state.conv for state in states]).astype(np.float32),
            f"past.{layer}.recurrent": np.stack([state.recurrent for state in states]).astype(np.float32),
        }
    return {
        f"past_key_values.{layer}.{name}": np.stack([_cache(getattr(state, name), capacity) for state in states])
        for name in ("key", "value")
    }


def _cache(rows: np.ndarray, capacity: int) -> np.ndarray:
    """float64[positions, kv_heads, head_dim] -> float32[kv_heads, capacity, head_dim]."""
    full = np.full((rows.shape[1], capacity, rows.shape[2]), STALE, np.float32)
    full[:, : len(rows)] = rows.transpose(1, 0, 2)
    return full
