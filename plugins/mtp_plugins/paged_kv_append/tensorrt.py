"""PagedKvAppend as a plugin of TensorRT, which writes into the pages that it is given."""

from __future__ import annotations

from mtp_plugins.paged_kv_append.launch import launch, signature
from mtp_plugins.tensorrt_plugins.declaration import Alias, Fixed, Plugin
from mtp_plugins.tensorrt_plugins.sizes import axis, number
from mtp_plugins.triton_kernels.launch import Launch


def _launch(fixed: Fixed) -> Launch:
    names = ("page_size", "kv_heads", "head_dim")
    return launch(batch=1, rows=1, max_pages=1, **{name: fixed.sizes[name] for name in names})


_POOL = ("pages", "page_size", "kv_heads", "head_dim")

PLUGIN = Plugin(
    name="PagedKvAppend",
    kernel="mtp_plugins.paged_kv_append.kernel:paged_kv_append",
    inputs={
        "key": ("batch", "rows", "width"),
        "value": ("batch", "rows", "width"),
        "past_key_pages": _POOL,
        "past_value_pages": _POOL,
        "block_table": ("batch", "max_pages"),
        "lengths": ("batch",),
    },
    scalars={"rows": axis("rows"), "max_pages": axis("max_pages")},
    outputs={"present_key_pages": Alias("past_key_pages"), "present_value_pages": Alias("past_value_pages")},
    grid=(axis("rows"), axis("batch"), number(1)),
    launch=_launch,
    types=lambda element, attributes: signature(element),
    element="key",
)
