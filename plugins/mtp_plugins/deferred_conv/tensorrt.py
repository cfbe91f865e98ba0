"""DeferredConv as a plugin of TensorRT."""

from __future__ import annotations

from mtp_plugins.deferred_conv.launch import CHANNEL_BLOCK, launch, signature
from mtp_plugins.tensorrt_plugins.declaration import Alias, Fixed, Plugin
from mtp_plugins.tensorrt_plugins.sizes import axis, ceil, number
from mtp_plugins.triton_kernels.launch import Launch


def _launch(fixed: Fixed) -> Launch:
    names = ("staged_rows", "channels", "taps")
    return launch(batch=1, rows=1, **{name: fixed.sizes[name] for name in names})


PLUGIN = Plugin(
    name="DeferredConv",
    kernel="mtp_plugins.deferred_conv.kernel:deferred_conv",
    inputs={
        "x": ("batch", "rows", "channels"),
        "weight": ("channels", "one", "taps"),
        "past_state": ("batch", "state_rows", "channels"),
        "staged_x": ("batch", "staged_rows", "channels"),
        "accepted_rows": ("batch",),
        "kept_rows": ("batch",),
    },
    scalars={"rows": axis("rows")},
    outputs={
        "output": (axis("batch"), axis("rows"), axis("channels")),
        "present_state": Alias("past_state"),
        "next_x": (axis("batch"), axis("staged_rows"), axis("channels")),
    },
    grid=(ceil(axis("channels"), CHANNEL_BLOCK), axis("batch"), number(1)),
    launch=_launch,
    types=lambda element, attributes: signature(element),
    element="x",
)
