"""Whether ONNX Runtime's attention gives a row the same bits among any others, tried on this processor."""

from __future__ import annotations

from functools import cache

import numpy as np
import onnx_ir as ir
import onnxruntime as ort

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.lowering.caches import UNSPLIT, cache_shape
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_plugins.graph import DOMAIN, GraphBuilder

_PANEL = 16384
"""Values of a panel of the library's product: where cached rows fill another one, sums may be taken otherwise."""
_ROWS = 8
_FATAL_ONLY = 4


def attention_that_splits(spec: ModelSpec) -> str | None:
    """What depends on the number of rows in a model's attention, in words; None if nothing does."""
    mixers = [*(mixer for _, mixer in spec.cached_layers()), *spec.head_mixers()]
    for width in sorted({cache_shape(mixer)[1] for mixer in mixers}):
        past = first_difference(width) if width > UNSPLIT else None
        if past is not None:
            return f"attention over {past} cached rows of {width} values"
    return None


@cache
def first_difference(width: int) -> int | None:
    """Cached rows, of those near the end of a panel, behind which fewer rows differ from more of them; None if none.

    Args:
        width: of a head in the cache.
    """
    g = GraphBuilder("trial")
    shapes = (("query", 2), ("key", 1), ("value", 1))
    rows = [g.input(name, "float32", ["batch", "rows", heads * width]) for name, heads in shapes]
    pasts = [g.input(f"past_key_values.0.{name}", "float32", ["batch", 1, "capacity", width]) for name, _ in shapes[1:]]
    length = g.input("past_length", "int64", ["batch"])
    names = ("output", "present_key", "present_value")
    outputs = g.op_multi(
        "CachedAttention", *rows, *pasts, length, outputs=names, domain=DOMAIN, num_heads=2, num_kv_heads=1
    )
    g.output(names[0], outputs[0], "float32", ["batch", "rows", 2 * width])
    for name, value in zip(names[1:], outputs[1:], strict=True):
        g.output(name, value, "float32", ["batch", 1, "capacity", width])
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, _FATAL_ONLY
    payload = ir.to_proto(lower(g.model(domains=[DOMAIN]))).SerializeToString()
    session = ort.InferenceSession(payload, options, providers=["CPUExecutionProvider"])
    draw, border = np.random.default_rng(0), max(_PANEL // width, _ROWS)
    given = {name: draw.standard_normal((1, _ROWS, heads * width), np.float32) for name, heads in shapes}
    caches = {
        f"past_key_values.0.{name}": draw.standard_normal((1, 1, border + 4 * _ROWS, width), np.float32)
        for name, _ in shapes[1:]
    }

    def run(past: int, count: int) -> np.ndarray:
        feed = {name: array[:, :count] for name, array in given.items()}
        (output,) = session.run(["output"], {**feed, **caches, "past_length": np.array([past])})
        return np.asarray(output)

    for past in range(border - _ROWS, border + 1):
        whole = run(past, _ROWS)
        if any((run(past, count) != whole[:, :count]).any() for count in range(1, _ROWS)):
            return past
    return None
