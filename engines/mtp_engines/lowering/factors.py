"""What a verify leaves for a commit on a CPU: one output a layer, of the rows that may have to be repeated.

An output of a graph stays in memory until the run ends. The factors of a prompt, which is kept whole, would be most of
what reading it takes: 0.74 MB a row at the 0.8B shape.
"""

from __future__ import annotations

import itertools

import onnx_ir as ir

from mtp_engines.contracts import names
from mtp_engines.contracts.model import GatedDeltaSpec
from mtp_plugins.graph import GraphBuilder

FACTOR_ROWS = "factor_rows"
"""int64[1]: of how many rows, the last ones, the factors are wanted."""
_END = 9223372036854775807


def packed(layer: int) -> str:
    """float32[batch, factor_rows, width]: all factors of a layer beside each other, in the order of `factor_widths`."""
    return f"factors.{layer}"


def pack_factors(graph: ir.Graph) -> None:
    """Put one output in the place of the factors of each layer; a graph without any stays as it is."""
    outputs = [output for output in graph.outputs if names.is_factor(str(output.name))]
    if not outputs:
        return
    g = GraphBuilder("factors")
    wanted = g.input(FACTOR_ROWS, "int64", [1])
    with g.scope("factors"):
        rows = g.op("Shape", next(value for value in graph.inputs if value.name == names.INPUT_IDS), start=1, end=2)
        start = (g.op("Sub", rows, wanted), g.constant([_END]), g.constant([1]))
    places = {node: place for place, node in enumerate(graph)}
    graph.insert_before(next(iter(graph)), g.nodes)
    graph.inputs.append(wanted)
    # A layer's factors stand together, in the order in which the graph was built.
    for layer, group in itertools.groupby(outputs, lambda output: names.layer_of(str(output.name))):
        factors = list(group)
        g = GraphBuilder(packed(layer))
        with g.scope(packed(layer)):
            last = g.op("Slice", g.op("Concat", *factors, axis=-1), *start)
        last.name, last.type = packed(layer), ir.TensorType(ir.DataType.FLOAT)
        last.shape = ir.Shape(["batch", FACTOR_ROWS, None])
        # As early as can be: nodes run in this order, and what they read is freed then.
        producers = [producer for factor in factors if (producer := factor.producer()) is not None]
        graph.insert_after(max(producers, key=places.__getitem__), g.nodes)
        for factor in factors:
            graph.outputs.remove(factor)
        graph.outputs.append(last)


def unpacked(g: GraphBuilder, together: ir.Value, mixer: GatedDeltaSpec) -> dict[str, ir.Value]:
    """The factors of a layer by name."""
    widths = mixer.factor_widths
    parts = g.op_multi("Split", together, g.constant(list(widths.values())), outputs=tuple(widths), axis=-1)
    return dict(zip(widths, parts, strict=True))
