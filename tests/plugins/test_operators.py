"""Each custom operator: ONNX body and ONNX Runtime kernels against the NumPy reference, with controls."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_plugins.cached_attention.reference import cached_attention
from mtp_plugins.causal_conv_state.reference import causal_conv_state
from mtp_plugins.delta_gate.reference import delta_gate
from mtp_plugins.gated_delta.reference import gated_delta
from mtp_plugins.graph import DOMAIN, GraphBuilder
from mtp_plugins.latent_attention.reference import latent_attention
from mtp_plugins.paged_attention.reference import paged_attention
from mtp_plugins.paged_kv_append.reference import paged_kv_append
from mtp_plugins.registry import OPERATORS
from mtp_plugins.routed_experts.reference import routed_experts

BATCH, ROWS = 2, 7
KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM = 3, 9, 8, 5
HEADS, KV_HEADS, HEAD_DIM, CAPACITY = 6, 2, 16, 24
CHANNELS, KERNEL = 11, 4
EXPERTS, TOP_K, HIDDEN, INTERMEDIATE = 5, 2, 12, 7
# float32 against float64: rounding stays under 2e-6 at these sizes, a wrong term moves more than 1e-2.
TOLERANCE = 2e-5
PAST = np.array([9, 4])
PAGE_SIZE, PAGES, MAX_PAGES, SCALE = 4, 11, 6, 0.4
# What decides on the device what was kept has tests of its own: test_deferred_operators.py; so has SkinnyProduct.
# So have matrices of integers: test_blocks.py and test_rotated.py.
MATRICES = {"BlockRows", "BlockWeight", "RotatedRows", "RotatedWeight"}
ELSEWHERE = {"Accept", "DeferredConv", "DeferredDelta", "SkinnyProduct"} | MATRICES
HERE = sorted(set(OPERATORS) - ELSEWHERE)
# Pages are for backends on a GPU, which have kernels for them; here only the bodies run.
WITHOUT_KERNELS = {"PagedAttention", "PagedKvAppend"}

Arrays = dict[str, np.ndarray]


def feeds(name: str, seed: int = 0) -> tuple[Arrays, dict[str, float]]:
    """Random inputs of an operator and its attributes."""
    draw = np.random.default_rng(seed).standard_normal
    if name == "GatedDelta":
        widths = {"query": KEY_HEADS * KEY_DIM, "key": KEY_HEADS * KEY_DIM, "value": VALUE_HEADS * VALUE_DIM}
        inputs = {key: draw((BATCH, ROWS, width)) for key, width in widths.items()}
        inputs["decay"] = -np.abs(draw((BATCH, ROWS, VALUE_HEADS)))
        inputs["beta"] = 1 / (1 + np.exp(-draw((BATCH, ROWS, VALUE_HEADS))))
        inputs["past_state"] = draw((BATCH, VALUE_HEADS, KEY_DIM, VALUE_DIM))
        return inputs, {"num_key_heads": KEY_HEADS, "num_value_heads": VALUE_HEADS}
    if name == "DeltaGate":
        inputs = {key: draw((BATCH, ROWS, VALUE_HEADS)) for key in ("a", "b")}
        return inputs | {"dt_bias": draw(VALUE_HEADS), "a_log": draw(VALUE_HEADS)}, {}
    if name == "CausalConvState":
        inputs = {"x": draw((BATCH, ROWS, CHANNELS)), "weight": draw((CHANNELS, 1, KERNEL))}
        return inputs | {"past_state": draw((BATCH, KERNEL - 1, CHANNELS))}, {}
    if name == "RoutedExperts":
        inputs = {"x": draw((BATCH, ROWS, HIDDEN)), "gate_up": draw((EXPERTS, 2 * INTERMEDIATE, HIDDEN))}
        ids = np.argsort(draw((BATCH, ROWS, EXPERTS)), axis=-1)[..., :TOP_K]
        weights = {"expert_ids": ids, "expert_weights": draw((BATCH, ROWS, TOP_K))}
        return inputs | weights | {"down": draw((EXPERTS, HIDDEN, INTERMEDIATE))}, {}
    if name == "LatentAttention":
        inputs = {"query": draw((BATCH, ROWS, HEADS * HEAD_DIM)), "rows": draw((BATCH, ROWS, HEAD_DIM))}
        return inputs | {"past": draw((BATCH, 1, CAPACITY, HEAD_DIM)), "past_length": PAST}, {"num_heads": HEADS}
    if name in WITHOUT_KERNELS:
        return _paged_feeds(name, seed)
    assert name == "CachedAttention"
    inputs = {"query": draw((BATCH, ROWS, HEADS * HEAD_DIM))}
    inputs |= {key: draw((BATCH, ROWS, KV_HEADS * HEAD_DIM)) for key in ("key", "value")}
    inputs |= {key: draw((BATCH, KV_HEADS, CAPACITY, HEAD_DIM)) for key in ("past_key", "past_value")}
    return inputs | {"past_length": PAST}, {"num_heads": HEADS, "num_kv_heads": KV_HEADS}


def _paged_feeds(name: str, seed: int) -> tuple[Arrays, dict[str, float]]:
    """Shuffled pages; the columns behind a sequence name no page, and what lies behind its rows is NaN."""
    generator = np.random.default_rng(seed)
    draw = generator.standard_normal
    stores = [draw((PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM)) for _ in range(2)]
    table = np.full((BATCH, MAX_PAGES), 999, np.int32)
    columns = -(-(PAST + ROWS) // PAGE_SIZE)
    order = iter(generator.permutation(PAGES))
    for b, count in enumerate(columns):
        table[b, :count] = [next(order) for _ in range(count)]
    common = {"block_table": table, "lengths": PAST.astype(np.int32)}
    if name == "PagedKvAppend":
        rows = {key: draw((BATCH, ROWS, KV_HEADS * HEAD_DIM)) for key in ("key", "value")}
        return rows | dict(zip(("past_key_pages", "past_value_pages"), stores, strict=True)) | common, {}
    for b, end in enumerate(PAST + ROWS):
        for store in stores:
            store[table[b, columns[b] - 1], (end - 1) % PAGE_SIZE + 1 :] = np.nan
    query = {"query": draw((BATCH, ROWS, HEADS * HEAD_DIM))}
    return query | dict(zip(("key_pages", "value_pages"), stores, strict=True)) | common, {"scale": SCALE}


def reference(name: str, x: Arrays) -> list[np.ndarray]:
    """The outputs that the NumPy reference gives, in float64, batched."""
    if name == "DeltaGate":
        return list(delta_gate(x["a"], x["b"], x["dt_bias"], x["a_log"]))
    if name == "CausalConvState":
        rows = [causal_conv_state(x["x"][b], x["weight"], x["past_state"][b]) for b in range(BATCH)]
        return [np.stack(part) for part in zip(*rows, strict=True)]
    if name == "GatedDelta":
        return _gated_delta(x)
    if name == "PagedAttention":
        return [paged_attention(*x.values(), SCALE)]
    if name == "PagedKvAppend":
        return [paged_kv_append(x[k], x[f"past_{k}_pages"], x["block_table"], x["lengths"]) for k in ("key", "value")]
    if name == "RoutedExperts":
        return [np.stack([_experts(x, b) for b in range(BATCH)])]
    return _latent_attention(x) if name == "LatentAttention" else _attention(x)


def _experts(x: Arrays, b: int) -> np.ndarray:
    matrices = (x["gate_up"].__getitem__, x["down"].__getitem__)
    return routed_experts(x["x"][b], x["expert_ids"][b], x["expert_weights"][b], *matrices)


def _latent_attention(x: Arrays) -> list[np.ndarray]:
    outputs, cache = [], x["past"].copy()
    for b, past in enumerate(x["past_length"]):
        cache[b, 0, past : past + ROWS] = x["rows"][b]
        query = x["query"][b].reshape(ROWS, HEADS, HEAD_DIM)
        outputs.append(latent_attention(query, cache[b, 0, : past + ROWS], int(past)).reshape(ROWS, -1))
    return [np.stack(outputs), cache]


def _gated_delta(x: Arrays) -> list[np.ndarray]:
    heads = {"query": (KEY_HEADS, KEY_DIM), "key": (KEY_HEADS, KEY_DIM), "value": (VALUE_HEADS, VALUE_DIM)}
    split = {key: x[key].reshape(BATCH, ROWS, *shape) for key, shape in heads.items()}
    rows = [
        gated_delta(
            split["query"][b], split["key"][b], split["value"][b], x["decay"][b], x["beta"][b], x["past_state"][b]
        )
        for b in range(BATCH)
    ]
    outputs, states = (np.stack(part) for part in zip(*rows, strict=True))
    key = split["key"] / np.sqrt((split["key"] ** 2).sum(-1, keepdims=True) + 1e-6)
    return [outputs.reshape(BATCH, ROWS, -1), states, key.reshape(BATCH, ROWS, -1)]


def _attention(x: Arrays) -> list[np.ndarray]:
    outputs, caches = [], {"key": x["past_key"].copy(), "value": x["past_value"].copy()}
    for b, past in enumerate(x["past_length"]):
        for part, cache in caches.items():
            rows = x[part][b].reshape(ROWS, KV_HEADS, HEAD_DIM)
            cache[b, :, past : past + ROWS] = rows.transpose(1, 0, 2)
        key, value = (cache[b, :, : past + ROWS].transpose(1, 0, 2) for cache in caches.values())
        query = x["query"][b].reshape(ROWS, HEADS, HEAD_DIM)
        outputs.append(cached_attention(query, key, value, int(past)).reshape(ROWS, -1))
    return [np.stack(outputs), caches["key"], caches["value"]]


def session(name: str, x: Arrays, attributes: dict[str, float], *, lowered: bool) -> ort.InferenceSession:
    """One node of the operator, run through its ONNX body or through the kernels that replace it."""
    operator = OPERATORS[name]
    g = GraphBuilder(name)
    values = []
    for key in operator.inputs:
        dtype = str(x[key].dtype) if x[key].dtype.kind == "i" else "float32"
        shape = [
            f"{key}.{axis}" if axis < 2 and key != "past_state" else size for axis, size in enumerate(x[key].shape)
        ]
        values.append(g.input(key, dtype, shape))
    results = g.op_multi(name, *values, outputs=operator.outputs, domain=DOMAIN, **attributes)
    for output, value in zip(operator.outputs, results, strict=True):
        g.output(output, value, "float32", [f"{output}.{axis}" for axis in range(_rank(name, output))])
    model = g.model([operator.function()], [DOMAIN])
    payload = ir.to_proto(lower(model) if lowered else model).SerializeToString()
    return ort.InferenceSession(payload, providers=["CPUExecutionProvider"])


def _rank(name: str, output: str) -> int:
    return 4 if "present" in output and name != "CausalConvState" else 3


def run(opened: ort.InferenceSession, x: Arrays) -> list[np.ndarray]:
    """Outputs for inputs given in float64."""
    # A cache that is key and value at once is written under a second name, which no reader needs.
    wanted = [value.name for value in opened.get_outputs() if not value.name.endswith(".again")]
    return opened.run(wanted, {key: v if v.dtype.kind == "i" else v.astype(np.float32) for key, v in x.items()})


def has_kernels(name: str) -> bool:
    return name not in WITHOUT_KERNELS


def visible(name: str, outputs: list[np.ndarray], x: Arrays) -> list[np.ndarray]:
    """Outputs with the cache rows cut off that nothing may read."""
    if "past_length" not in x:
        return outputs
    rows = [slice(0, past + ROWS) for past in x["past_length"]]
    return [outputs[0], *(np.concatenate([c[b, :, r] for b, r in enumerate(rows)], axis=1) for c in outputs[1:])]


@pytest.mark.parametrize(
    ("name", "lowered"),
    [(name, lowered) for name in HERE for lowered in (False, True) if not lowered or has_kernels(name)],
)
def test_an_operator_equals_its_reference(name: str, lowered: bool) -> None:
    x, attributes = feeds(name)
    got = visible(name, run(session(name, x, attributes, lowered=lowered), x), x)
    want = visible(name, reference(name, x), x)
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("lowered", [False, True], ids=["body", "kernels"])
def test_the_norm_of_tiny_keys_keeps_its_epsilon_inside_the_root(lowered: bool) -> None:
    """With keys this small the epsilon decides; a wrong place or size of it moves the result by a tenth."""
    x, attributes = feeds("GatedDelta")
    x |= {key: x[key] * 3e-4 for key in ("query", "key")}
    got = run(session("GatedDelta", x, attributes, lowered=lowered), x)
    for ours, theirs in zip(got, reference("GatedDelta", x), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=TOLERANCE)
    larger = reference("GatedDelta", x | {"key": x["key"] * 2, "query": x["query"] * 2})
    assert np.abs(got[2] - larger[2]).max() > 100 * TOLERANCE, "control: the epsilon matters at this size"


def _faults() -> list[tuple[str, str, Callable[[Arrays], Arrays]]]:
    return [
        ("GatedDelta", "no decay", lambda x: x | {"decay": np.zeros_like(x["decay"])}),
        ("GatedDelta", "stale state", lambda x: x | {"past_state": np.zeros_like(x["past_state"])}),
        ("GatedDelta", "value heads in another order", lambda x: x | {"beta": x["beta"][..., ::-1]}),
        ("DeltaGate", "no bias", lambda x: x | {"dt_bias": np.zeros_like(x["dt_bias"])}),
        ("CausalConvState", "taps reversed", lambda x: x | {"weight": x["weight"][..., ::-1]}),
        ("CausalConvState", "empty state", lambda x: x | {"past_state": np.zeros_like(x["past_state"])}),
        ("CachedAttention", "one row too few", lambda x: x | {"past_length": x["past_length"] - 1}),
        ("CachedAttention", "stale cache row", lambda x: x | {"past_value": np.roll(x["past_value"], 1, axis=2)}),
        ("LatentAttention", "one row too few", lambda x: x | {"past_length": x["past_length"] - 1}),
        ("LatentAttention", "stale cache row", lambda x: x | {"past": np.roll(x["past"], 1, axis=2)}),
        (
            "RoutedExperts",
            "gate and up swapped",
            lambda x: x | {"gate_up": np.roll(x["gate_up"], INTERMEDIATE, axis=1)},
        ),
        ("PagedAttention", "one row too few", lambda x: x | {"lengths": x["lengths"] - 1}),
        ("PagedAttention", "keys as values", lambda x: x | {"value_pages": x["key_pages"]}),
        ("PagedKvAppend", "one row too few", lambda x: x | {"lengths": x["lengths"] - 1}),
        ("RoutedExperts", "weights in another order", lambda x: x | {"expert_weights": x["expert_weights"][..., ::-1]}),
    ]


@pytest.mark.parametrize(("name", "fault", "change"), _faults(), ids=lambda v: v if isinstance(v, str) else "")
def test_control_a_wrong_input_is_noticed(name: str, fault: str, change: Callable[[Arrays], Arrays]) -> None:
    x, attributes = feeds(name)
    got = run(session(name, x, attributes, lowered=has_kernels(name)), x)
    wrong = reference(name, change(x))
    assert np.abs(got[0] - wrong[0]).max() > 100 * TOLERANCE, f"this test cannot see {fault}"


@pytest.mark.parametrize("name", [name for name in HERE if has_kernels(name)])
def test_rows_of_the_kernels_do_not_depend_on_their_number(name: str) -> None:
    x, attributes = feeds(name)
    opened = session(name, x, attributes, lowered=True)
    whole = run(opened, x)
    fixed = ("weight", "dt_bias", "a_log", "gate_up", "down")
    rowed = [key for key in x if not key.startswith("past") and key not in fixed]
    carried = {f"present{part}": f"past{part}" for part in ("", "_state", "_key", "_value")}
    for width in (1, 2, 3):
        part, outputs, start = dict(x), [], 0
        while start < ROWS:
            end = min(start + width, ROWS)
            results = dict(
                zip(
                    OPERATORS[name].outputs,
                    run(opened, part | {key: x[key][:, start:end] for key in rowed}),
                    strict=True,
                )
            )
            outputs.append(results[OPERATORS[name].outputs[0]])
            part |= {past: results[present] for present, past in carried.items() if present in results}
            if "past_length" in part:
                part["past_length"] = part["past_length"] + (end - start)
            start = end
        np.testing.assert_array_equal(np.concatenate(outputs, axis=1), whole[0], err_msg=f"{width} rows a call")
