"""Accept as a plugin of TensorRT."""

from __future__ import annotations

from mtp_plugins.accept.launch import launch, signature
from mtp_plugins.tensorrt_plugins.declaration import Fixed, Plugin
from mtp_plugins.tensorrt_plugins.sizes import axis, number
from mtp_plugins.triton_kernels.launch import Launch


def _launch(fixed: Fixed) -> Launch:
    return launch(batch=1, draft_tokens=fixed.sizes["draft_tokens"])


PLUGIN = Plugin(
    name="Accept",
    kernel="mtp_plugins.accept.kernel:accept",
    scalars={"draft_tokens": axis("draft_tokens")},
    inputs={"draft": ("batch", "draft_tokens"), "chosen": ("batch", "rows")},
    outputs={
        "accepted": (axis("batch"),),
        "accepted_rows": (axis("batch"),),
        "emitted": (axis("batch"), axis("rows")),
        "next_token": (axis("batch"),),
    },
    grid=(axis("batch"), number(1), number(1)),
    launch=_launch,
    types=lambda element, attributes: signature(),
)
