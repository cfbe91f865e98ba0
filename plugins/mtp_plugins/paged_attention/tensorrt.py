"""PagedAttention as two plugins of TensorRT, since a plugin is one launch and has no memory of its own."""

from __future__ import annotations

from mtp_plugins.paged_attention.launch import (
    SPLIT_SIZE,
    Sizes,
    launch_combine,
    launch_partial,
    signature_combine,
    signature_partial,
)
from mtp_plugins.tensorrt_plugins.declaration import Fixed, Plugin
from mtp_plugins.tensorrt_plugins.sizes import axis, ceil
from mtp_plugins.triton_kernels.launch import Launch


def _partial(fixed: Fixed) -> Launch:
    head_dim = fixed.sizes["head_dim"]
    sizes = Sizes(
        batch=1,
        rows=1,
        max_pages=1,
        heads=fixed.sizes["width"] // head_dim,
        kv_heads=fixed.sizes["kv_heads"],
        head_dim=head_dim,
        page_size=fixed.sizes["page_size"],
        item_bytes=fixed.item_bytes,
    )
    return launch_partial(sizes, scale=fixed.attributes["scale"])


def _combine(fixed: Fixed) -> Launch:
    heads, head_dim = fixed.sizes["heads"], fixed.sizes["head_dim"]
    # Heads of keys and pages do not matter to it.
    return launch_combine(
        Sizes(batch=1, rows=1, heads=heads, kv_heads=heads, head_dim=head_dim, page_size=1, max_pages=1)
    )


_POOL = ("pages", "page_size", "kv_heads", "head_dim")
_HEADS = axis("width") // axis("head_dim")
_SPLITS = ceil(axis("max_pages") * axis("page_size"), SPLIT_SIZE)
_PARTIALS = ("batch", "rows", "heads", "splits")
_SHAPE = (axis("batch"), axis("rows"), _HEADS, _SPLITS)

PARTIAL = Plugin(
    name="PagedAttentionPartial",
    kernel="mtp_plugins.paged_attention.kernel:paged_attention_partial",
    inputs={
        "query": ("batch", "rows", "width"),
        "key_pages": _POOL,
        "value_pages": _POOL,
        "block_table": ("batch", "max_pages"),
        "lengths": ("batch",),
    },
    scalars={"rows": axis("rows"), "max_pages": axis("max_pages")},
    outputs={"partial_max": _SHAPE, "partial_sum": _SHAPE, "partial_output": (*_SHAPE, axis("head_dim"))},
    grid=(axis("rows"), axis("batch") * axis("kv_heads"), _SPLITS),
    launch=_partial,
    types=lambda element, attributes: signature_partial(element),
    element="query",
    attributes={"scale": float},
)
COMBINE = Plugin(
    name="PagedAttentionCombine",
    kernel="mtp_plugins.paged_attention.kernel:paged_attention_combine",
    inputs={
        "partial_max": _PARTIALS,
        "partial_sum": _PARTIALS,
        "partial_output": (*_PARTIALS, "head_dim"),
        "lengths": ("batch",),
    },
    scalars={"rows": axis("rows"), "splits": axis("splits")},
    outputs={"output": (axis("batch"), axis("rows"), axis("heads") * axis("head_dim"))},
    grid=(axis("heads"), axis("rows"), axis("batch")),
    launch=_combine,
    # No input has the type of the output.
    types=lambda element, attributes: signature_combine(attributes["output_type"]),
    attributes={"output_type": str},
)
