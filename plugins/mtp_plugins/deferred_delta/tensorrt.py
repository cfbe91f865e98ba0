"""DeferredDelta as a plugin of TensorRT."""

from __future__ import annotations

from mtp_plugins.deferred_delta.launch import VALUE_BLOCK, launch, signature
from mtp_plugins.tensorrt_plugins.declaration import Alias, Fixed, Plugin
from mtp_plugins.tensorrt_plugins.sizes import axis, ceil
from mtp_plugins.triton_kernels.launch import Launch


def _launch(fixed: Fixed) -> Launch:
    return launch(
        batch=1,
        rows=1,
        staged_rows=fixed.sizes["staged_rows"],
        key_heads=fixed.sizes["key_width"] // fixed.sizes["key_dim"],
        value_heads=fixed.sizes["value_heads"],
        key_dim=fixed.sizes["key_dim"],
        value_dim=fixed.sizes["value_dim"],
    )


_STAGED = tuple(axis(name) for name in ("batch", "staged_rows"))

PLUGIN = Plugin(
    name="DeferredDelta",
    kernel="mtp_plugins.deferred_delta.kernel:deferred_delta",
    inputs={
        "query": ("batch", "rows", "key_width"),
        "key": ("batch", "rows", "key_width"),
        "value": ("batch", "rows", "value_width"),
        "decay": ("batch", "rows", "value_heads"),
        "beta": ("batch", "rows", "value_heads"),
        "past_state": ("batch", "value_heads", "key_dim", "value_dim"),
        "staged_key": ("batch", "staged_rows", "key_width"),
        "staged_value": ("batch", "staged_rows", "value_width"),
        "staged_decay": ("batch", "staged_rows", "value_heads"),
        "staged_beta": ("batch", "staged_rows", "value_heads"),
        "accepted_rows": ("batch",),
        "kept_rows": ("batch",),
    },
    scalars={"rows": axis("rows")},
    outputs={
        "output": (axis("batch"), axis("rows"), axis("value_width")),
        "present_state": Alias("past_state"),
        "next_key": (*_STAGED, axis("key_width")),
        "next_value": (*_STAGED, axis("value_width")),
        "next_decay": (*_STAGED, axis("value_heads")),
        "next_beta": (*_STAGED, axis("value_heads")),
    },
    grid=(ceil(axis("value_dim"), VALUE_BLOCK), axis("value_heads"), axis("batch")),
    launch=_launch,
    types=lambda element, attributes: signature(element),
    element="query",
)
