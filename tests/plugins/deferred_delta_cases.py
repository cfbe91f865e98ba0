"""Random inputs of DeferredDelta, its kernel and its reference, all on dictionaries of batched arrays."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from mtp_plugins.deferred_delta import OPERATOR
from mtp_plugins.deferred_delta.launch import launch
from mtp_plugins.deferred_delta.reference import Factors, deferred_delta
from mtp_plugins.gated_delta.reference import unit_rows
from tests.plugins.workers import Arrays, Change, Worker, run_kernel

MODULE = "mtp_plugins.deferred_delta.kernel"
NEW_ROWS = ("query", "key", "value", "decay", "beta")
STAGED = ("key", "value", "decay", "beta")


@dataclass(frozen=True)
class Sizes:
    """Sizes of one call; small ones, since every element of a program is interpreted."""

    batch: int = 2
    rows: int = 3
    staged_rows: int = 3
    key_heads: int = 1
    value_heads: int = 1
    key_dim: int = 12
    value_dim: int = 20
    value_block: int = 16

    def widths(self) -> dict[str, int]:
        """Size of the last axis of each new row."""
        key, value = self.key_heads * self.key_dim, self.value_heads * self.value_dim
        return {"query": key, "key": key, "value": value, "decay": self.value_heads, "beta": self.value_heads}


def feeds(sizes: Sizes, *, seed: int = 0, scale: float = 1.0, dtype: np.dtype | type = np.float32) -> Arrays:
    """Inputs in the order of the operator; every sequence accepts a different number of rows where it can, and keeps
    none of the new ones.

    `scale` is that of the queries and keys, `dtype` that of queries, keys and values.
    """
    random = np.random.default_rng(seed)

    def rows(count: int) -> Arrays:
        draws = {name: random.standard_normal((sizes.batch, count, width)) for name, width in sizes.widths().items()}
        draws |= {"query": scale * draws["query"], "key": scale * draws["key"], "decay": -np.abs(draws["decay"])}
        draws["beta"] = random.random(draws["beta"].shape)
        return {k: v.astype(dtype if k in ("query", "key", "value") else np.float32) for k, v in draws.items()}

    new, old = rows(sizes.rows), rows(sizes.staged_rows)
    state = (sizes.batch, sizes.value_heads, sizes.key_dim, sizes.value_dim)
    heads = old["key"].astype(np.float64).reshape(sizes.batch, sizes.staged_rows, sizes.key_heads, -1)
    old["key"] = unit_rows(heads).reshape(old["key"].shape).astype(np.float32)
    x = new | {"past_state": random.standard_normal(state).astype(np.float32)}
    x |= {f"staged_{name}": old[name] for name in STAGED}
    counts = sizes.staged_rows - np.arange(sizes.batch) % (sizes.staged_rows + 1)
    return x | {"accepted_rows": counts.astype(np.int32), "kept_rows": np.zeros(sizes.batch, np.int32)}


def run(
    worker: Worker,
    sizes: Sizes,
    x: Arrays,
    *,
    output: np.dtype | type = np.float32,
    in_place: bool = True,
    change: Change | None = None,
) -> Arrays:
    """Outputs of the kernel."""
    # What is not written stays NaN, and NaN equals nothing. The next_* have room for one sequence more than there are.
    room = {name: (sizes.batch + 1, *x[f"staged_{name}"].shape[1:]) for name in STAGED}
    outputs: dict[str, np.ndarray | str] = {
        "output": np.full(x["value"].shape, np.nan, output),
        "present_state": "past_state" if in_place else np.full_like(x["past_state"], np.nan),
        **{f"next_{name}": np.full(room[name], np.nan, x[f"staged_{name}"].dtype) for name in STAGED},
    }
    constants = {name: getattr(sizes, name) for name in Sizes.__dataclass_fields__}
    inputs = {name: x[name] for name in OPERATOR.inputs}
    results = worker.call(run_kernel, MODULE, "deferred_delta", launch(**constants), inputs, outputs, change)
    for name in STAGED:
        results[f"next_{name}"], behind = np.split(results[f"next_{name}"], [sizes.batch])
        assert np.isnan(behind.astype(np.float32)).all(), f"next_{name} was written behind its end"
    return {name: results[name] for name in OPERATOR.outputs}


def reference(sizes: Sizes, x: Arrays) -> Arrays:
    """Outputs of the reference in float64."""
    wide = {name: value if value.dtype == np.int32 else value.astype(np.float64) for name, value in x.items()}
    results = [_sequence(sizes, {name: value[b] for name, value in wide.items()}) for b in range(sizes.batch)]
    outputs = {name: np.stack([result[name] for result in results]) for name in OPERATOR.outputs}
    flat = ("output", "next_key", "next_value")
    return outputs | {name: outputs[name].reshape(*outputs[name].shape[:2], -1) for name in flat}


def _sequence(sizes: Sizes, x: Arrays) -> Arrays:
    heads = {"query": sizes.key_heads, "key": sizes.key_heads, "value": sizes.value_heads}

    def split(name: str) -> np.ndarray:
        part = name.removeprefix("staged_")
        return x[name].reshape(len(x[name]), heads[part], -1) if part in heads else x[name]

    staged = Factors(**{name: split(f"staged_{name}") for name in STAGED})
    new = [split(name) for name in NEW_ROWS]
    output, state, factors = deferred_delta(*new, x["past_state"], staged, int(x["accepted_rows"]), int(x["kept_rows"]))
    return {"output": output, "present_state": state} | {f"next_{name}": getattr(factors, name) for name in STAGED}


def difference(got: Arrays, want: Arrays) -> float:
    """The largest absolute difference over all outputs, next_* up to the last new row; NaN counts as infinite."""
    pairs = [(got[name][:, : want[name].shape[1]], want[name]) for name in OPERATOR.outputs]
    worst = [np.abs(ours.astype(np.float64) - theirs).max(initial=0.0) for ours, theirs in pairs]
    return float(np.nan_to_num(np.max(worst), nan=np.inf))


def written(got: Arrays, rows: int) -> Arrays:
    """Outputs without the rows of next_* behind the new ones, which mean nothing."""
    return {name: value[:, :rows] if name.startswith("next") else value for name, value in got.items()}
