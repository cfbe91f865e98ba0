"""What an engine must look like, the row widths that it may have, and the shapes of its profiles."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtp_engines.builders.tensorrt.io import BACKBONE, HEAD, MTP, checked_rows, interface_of, profiles_of
from mtp_engines.bundle import Bundle
from mtp_engines.contracts import names
from mtp_engines.contracts.engines import TensorSpec
from mtp_engines.errors import BuildError
from tests.support import refused


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        ((1, 17), ("17 rows", "1 to 16", "256")),
        ((0, 1), ("0 rows",)),
        ((1, -4), ("-4 rows",)),
        ((2, 4), ("lack 1",)),
        ((), ("lack 1",)),
    ],
)
def test_row_widths_out_of_range_are_refused(carried: Bundle, rows: tuple[int, ...], parts: tuple[str, ...]) -> None:
    with refused(*parts, error=BuildError):
        checked_rows(rows, carried.manifest.limits)


def test_row_widths_are_sorted_and_counted_once(carried: Bundle) -> None:
    limits = carried.manifest.limits
    assert checked_rows([256, 4, 1, 64, 16, 4], limits) == (1, 4, 16, 64, 256)
    with refused("256 rows", "prefill 64", error=BuildError):
        checked_rows([1, 256], replace(limits, max_model_len=64))
    with refused("16 rows", "ends at 8", error=BuildError):
        checked_rows([1, 16], replace(limits, max_model_len=8))


def specs(bundle: Bundle, graph: str) -> tuple[list[TensorSpec], list[TensorSpec]]:
    """Inputs and outputs as a right network has them."""
    interface = interface_of(graph, bundle.manifest.model, bundle.manifest.limits, "bf16")
    made = []
    for tensors in (interface.inputs, interface.outputs):
        shapes = [tuple(axis if isinstance(axis, int) else -1 for axis in tensor.axes) for tensor in tensors]
        made.append([TensorSpec(t.name, t.dtype, shape) for t, shape in zip(tensors, shapes, strict=True)])
    return made[0], made[1]


def test_an_engine_of_other_inputs_or_outputs_is_refused(carried: Bundle) -> None:
    inputs, outputs = specs(carried, BACKBONE)
    interface = interface_of(BACKBONE, carried.manifest.model, carried.manifest.limits, "bf16")
    interface.check(BACKBONE, inputs[::-1], outputs)
    key = next(spec for spec in inputs if spec.name == names.past_key(3))
    rest = [spec for spec in inputs if spec is not key]
    assert key.shape == (-1, 2, carried.manifest.limits.capacity, 64)
    assert key.dtype == "bfloat16"
    wrong = {
        "nothing": rest,
        "float32[": [*rest, replace(key, dtype="float32")],
        "513": [*rest, replace(key, shape=(-1, 2, 513, 64))],
        "surplus": [*inputs, TensorSpec("surplus", "int64", (1,))],
    }
    for part, found in wrong.items():
        with refused("graph backbone", "as input", part, error=BuildError):
            interface.check(BACKBONE, found, outputs)
    with refused("as output", error=BuildError):
        interface.check(BACKBONE, inputs, outputs[1:])


def test_profiles_fix_the_rows_and_leave_the_batch_free(carried: Bundle) -> None:
    spec, limits = carried.manifest.model, replace(carried.manifest.limits, max_batch_size=2)
    backbone = profiles_of(BACKBONE, interface_of(BACKBONE, spec, limits, "bf16"), (1, 4, 256), limits)
    assert [shapes[names.INPUT_IDS] for shapes in backbone] == [((1, n), (2, n), (2, n)) for n in (1, 4, 256)]
    cache = (2, limits.capacity, 64)
    assert backbone[0][names.past_key(3)] == ((1, *cache), (2, *cache), (2, *cache))
    head = profiles_of(HEAD, interface_of(HEAD, spec, limits, "bf16"), (1, 4, 256), limits)
    assert [shapes[names.HIDDEN] for shapes in head] == [((n, 256), (2 * n, 256), (2 * n, 256)) for n in (1, 4)]
    mtp = profiles_of(MTP, interface_of(MTP, spec, limits, "bf16"), (1, 4), replace(limits, max_batch_size=1))
    assert [shapes[names.HIDDEN][2] for shapes in mtp] == [(1, 1, 256), (1, 4, 256)]
