"""SkinnyProduct as a plugin of TensorRT."""

from __future__ import annotations

from mtp_plugins.skinny_product.launch import OUT_BLOCK, ROW_BLOCK, launch, signature
from mtp_plugins.tensorrt_plugins.declaration import Fixed, Plugin
from mtp_plugins.tensorrt_plugins.sizes import axis, ceil, number
from mtp_plugins.triton_kernels.launch import Launch


def _launch(fixed: Fixed) -> Launch:
    return launch(
        batch=1,
        rows=1,
        width_in=fixed.sizes["width_in"],
        width_out=fixed.sizes["width_out"],
        item_bytes=fixed.item_bytes,
    )


_ROWS = axis("batch") * axis("rows")

PLUGIN = Plugin(
    name="SkinnyProduct",
    kernel="mtp_plugins.skinny_product.kernel:skinny_product",
    inputs={"x": ("batch", "rows", "width_in"), "weight": ("width_out", "width_in")},
    scalars={"rows": _ROWS},
    outputs={"output": (axis("batch"), axis("rows"), axis("width_out"))},
    grid=(ceil(_ROWS, ROW_BLOCK), ceil(axis("width_out"), OUT_BLOCK), number(1)),
    launch=_launch,
    types=lambda element, attributes: signature(element, attributes["output_type"]),
    element="x",
    attributes={"output_type": str},
)
