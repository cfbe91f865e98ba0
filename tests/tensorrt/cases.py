"""Every plugin with sizes at which all its axes differ, and the launch of its kernel at these sizes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from mtp_plugins.accept import launch as accept
from mtp_plugins.deferred_conv import launch as conv
from mtp_plugins.deferred_delta import launch as delta
from mtp_plugins.paged_attention import launch as attention
from mtp_plugins.paged_kv_append import launch as append
from mtp_plugins.skinny_product import launch as product
from mtp_plugins.tensorrt_plugins.registry import PLUGINS
from mtp_plugins.triton_kernels.launch import Launch
from tests.tensorrt.building import Request

TYPES = {"fp32": "FLOAT", "fp16": "HALF", "bf16": "BF16", "i32": "INT32", "i64": "INT64"}
OPEN = frozenset({"batch", "rows", "pages", "max_pages", "splits"})
"""Axes that a graph leaves open."""


@dataclass(frozen=True)
class Case:
    """A plugin in a graph: `fixed` sizes, and what an engine does at some sizes of the open axes.

    `aliased` has the outputs that lie in the memory of an input; `shapes` those of the other outputs.
    """

    plugin: str
    kernel: str
    fixed: Mapping[str, int]
    launch: Callable[[Mapping[str, int]], Launch]
    shapes: Callable[[Mapping[str, int]], Mapping[str, tuple[int, ...]]]
    types: Mapping[str, str]
    """Types of outputs other than the element's."""
    aliased: Mapping[str, str] = field(default_factory=dict)
    attributes: Mapping[str, float | str] = field(default_factory=dict)
    element: str = "bf16"

    def request(self, sizes: Mapping[str, int]) -> Request:
        """The plugin in a network at these sizes of the open axes."""
        declared, all_sizes = PLUGINS[self.plugin], {**sizes, **self.fixed}
        signature = declared.signature(self.element, self.attributes)
        types = [TYPES[signature[declared.pointer(name)][1:]] for name in declared.inputs]
        shapes = [
            tuple(-1 if axis in OPEN - set(self.fixed) else all_sizes[axis] for axis in axes)
            for axes in declared.inputs.values()
        ]
        concrete = [tuple(all_sizes[axis] for axis in axes) for axes in declared.inputs.values()]
        return Request(self.plugin, types, shapes, concrete, self.attributes)


SIZES = (
    {"batch": 1, "rows": 1, "pages": 9, "max_pages": 3, "splits": 1},
    {"batch": 3, "rows": 5, "pages": 50, "max_pages": 37, "splits": 3},
)
HEADS = {"key_heads": 2, "value_heads": 4, "key_dim": 16, "value_dim": 40}
POOL = {"page_size": 16, "kv_heads": 2, "head_dim": 64}


def _delta_shapes(s: Mapping[str, int]) -> dict[str, tuple[int, ...]]:
    staged = (s["batch"], 6)
    return {
        "output": (s["batch"], s["rows"], 160),
        "next_key": (*staged, 32),
        "next_value": (*staged, 160),
        "next_decay": (*staged, 4),
        "next_beta": (*staged, 4),
    }


def _attention(s: Mapping[str, int]) -> attention.Sizes:
    return attention.Sizes(batch=s["batch"], rows=s["rows"], heads=6, max_pages=s["max_pages"], item_bytes=2, **POOL)


def _combine(s: Mapping[str, int]) -> Launch:
    # A table of this many pages has as many splits.
    pages = s["splits"] * attention.SPLIT_SIZE // POOL["page_size"]
    return attention.launch_combine(_attention({**s, "max_pages": pages}))


CASES = [
    Case(
        "Accept",
        "accept",
        {"draft_tokens": 4, "rows": 5},
        lambda s: accept.launch(batch=s["batch"], draft_tokens=4),
        lambda s: {
            "accepted": (s["batch"],),
            "accepted_rows": (s["batch"],),
            "emitted": (s["batch"], 5),
            "next_token": (s["batch"],),
        },
        {"accepted": "INT32", "accepted_rows": "INT32", "emitted": "INT64", "next_token": "INT64"},
    ),
    Case(
        "DeferredConv",
        "deferred_conv",
        {"channels": 200, "one": 1, "taps": 4, "state_rows": 3, "staged_rows": 6},
        lambda s: conv.launch(batch=s["batch"], rows=s["rows"], staged_rows=6, channels=200, taps=4),
        lambda s: {"output": (s["batch"], s["rows"], 200), "next_x": (s["batch"], 6, 200)},
        {"present_state": "FLOAT"},
        {"present_state": "past_state"},
    ),
    Case(
        "DeferredDelta",
        "deferred_delta",
        {"staged_rows": 6, "key_width": 32, "value_width": 160, "value_heads": 4, "key_dim": 16, "value_dim": 40},
        lambda s: delta.launch(batch=s["batch"], rows=s["rows"], staged_rows=6, **HEADS),
        _delta_shapes,
        dict.fromkeys(("present_state", "next_key", "next_decay", "next_beta"), "FLOAT"),
        {"present_state": "past_state"},
    ),
    Case(
        "PagedAttentionCombine",
        "paged_attention_combine",
        {"heads": 6, "head_dim": 64},
        _combine,
        lambda s: {"output": (s["batch"], s["rows"], 384)},
        {},
        attributes={"output_type": "bf16"},
    ),
    Case(
        "PagedAttentionPartial",
        "paged_attention_partial",
        {"width": 384, **POOL},
        lambda s: attention.launch_partial(_attention(s), scale=0.25),
        lambda s: _attention(s).scratch(),
        dict.fromkeys(("partial_max", "partial_sum", "partial_output"), "FLOAT"),
        attributes={"scale": 0.25},
    ),
    Case(
        "PagedKvAppend",
        "paged_kv_append",
        {"width": 128, **POOL},
        lambda s: append.launch(batch=s["batch"], rows=s["rows"], max_pages=s["max_pages"], **POOL),
        lambda s: {},
        {},
        {"present_key_pages": "past_key_pages", "present_value_pages": "past_value_pages"},
    ),
    Case(
        "SkinnyProduct",
        "skinny_product",
        {"width_in": 96, "width_out": 200},
        lambda s: product.launch(batch=s["batch"], rows=s["rows"], width_in=96, width_out=200),
        lambda s: {"output": (s["batch"], s["rows"], 200)},
        {"output": "FLOAT"},
        attributes={"output_type": "fp32"},
    ),
]
BY_NAME = {case.plugin: case for case in CASES}
