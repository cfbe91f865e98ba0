"""The attention that TensorRT-RTX is given: what its parser makes of the graphs, and what the builder makes of that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.builders.tensorrt.attention import heed_lengths
from mtp_engines.builders.tensorrt.graphs import standard_form, write_graphs
from mtp_engines.bundle import Bundle
from mtp_engines.errors import BuildError
from mtp_engines.lowering.attention import KEY_VALUE_LENGTHS
from tests.builders.conftest import needs_rtx

pytestmark = needs_rtx


class Parsed:
    """A graph as the parser reads it."""

    def __init__(self, path: Path) -> None:
        self.trt = pytest.importorskip("tensorrt_rtx")
        logger = self.trt.Logger(self.trt.Logger.ERROR)
        self._builder = self.trt.Builder(logger)
        self.network = self._builder.create_network(0)
        self._parser = self.trt.OnnxParser(self.network, logger)
        assert self._parser.parse_from_file(str(path))

    def layers(self, kind: str) -> list[Any]:
        """Those of one type."""
        layers = [self.network.get_layer(index) for index in range(self.network.num_layers)]
        return [layer for layer in layers if layer.type == getattr(self.trt.LayerType, kind)]

    def attentions(self) -> list[Any]:
        """Every attention; its boundary is told its class."""
        boundaries = self.layers("ATTENTION_INPUT")
        for layer in boundaries:
            layer.__class__ = self.trt.IAttentionInputLayer
        return [layer.attention for layer in boundaries]

    def faults(self) -> list[str]:
        """What an attention over caches of different lengths lacks."""
        caches = {layer.get_output(0).name for layer in self.layers("KV_CACHE_UPDATE")}
        counted = {layer.get_output(0).name: layer.get_input(0).name for layer in self.layers("CAST")}
        found = []
        for attention in self.attentions():
            if attention.causal_kind != self.trt.CausalMaskKind.LOWER_RIGHT:
                found.append("alignment")
            lengths = attention.key_value_lengths
            if lengths is None or counted.get(lengths.name) != KEY_VALUE_LENGTHS or lengths.dtype != self.trt.int32:
                found.append("lengths")
            if not {attention.get_input(index).name for index in (1, 2)} <= caches:
                found.append("cache")
            if attention.mask is not None:
                found.append("mask")
        return found


@pytest.fixture(scope="module")
def graphs(carried: Bundle, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The lowered graphs of the carried checkpoint."""
    return write_graphs(carried, "bf16", tmp_path_factory.mktemp("graphs"), standard_form(carried.manifest.limits))


@pytest.mark.parametrize("graph", ["backbone", "mtp"])
def test_attention_is_aligned_at_the_end_of_caches_with_lengths(graphs: dict[str, Path], graph: str) -> None:
    parsed = Parsed(graphs[graph])
    assert len(parsed.attentions()) == 1
    assert len(parsed.layers("KV_CACHE_UPDATE")) == 2
    assert parsed.layers("TRIP_LIMIT") == [], "a loop"
    assert parsed.layers("SOFTMAX") == [], "an attention that is spelled out"
    assert parsed.faults() == ["alignment", "lengths", "cache"], "control: as parsed it is wrong, and that is seen"
    heed_lengths(parsed.trt, parsed.network)
    assert parsed.faults() == []
    parsed.attentions()[0].key_value_lengths = None
    assert parsed.faults() == ["lengths"], "control: lengths that are not wired are seen"


def test_a_graph_without_attention_stays_as_it_is(graphs: dict[str, Path]) -> None:
    parsed = Parsed(graphs["head"])
    before = parsed.network.num_layers
    heed_lengths(parsed.trt, parsed.network)
    assert parsed.network.num_layers == before


def test_an_attention_without_lengths_or_without_a_cache_is_refused(graphs: dict[str, Path]) -> None:
    parsed = Parsed(graphs["mtp"])
    layers = [parsed.network.get_layer(index) for index in range(parsed.network.num_layers)]
    outputs = {layer.get_output(i).name: layer.get_output(i) for layer in layers for i in range(layer.num_outputs)}
    outputs[KEY_VALUE_LENGTHS].name = "something_else"
    with pytest.raises(BuildError, match=f"no lengths of its caches under the name {KEY_VALUE_LENGTHS}"):
        heed_lengths(parsed.trt, parsed.network)
    outputs[KEY_VALUE_LENGTHS].name = KEY_VALUE_LENGTHS
    attention = parsed.attentions()[0]
    attention.set_input(1, attention.get_input(0))
    with pytest.raises(BuildError, match="has another key than a cache"):
        heed_lengths(parsed.trt, parsed.network)


def _built(order: str) -> bool:
    """Whether a network of attentions (A) and running sums by a loop (L), in this order, is built."""
    trt = pytest.importorskip("tensorrt_rtx")
    rows, heads, width = 64, 2, 64
    builder = trt.Builder(trt.Logger(trt.Logger.INTERNAL_ERROR))
    network = builder.create_network(0)
    x = network.add_input("x", trt.bfloat16, (1, heads, rows, width))
    for index, kind in enumerate(order):
        if kind == "A":
            key, value = (network.add_input(f"{name}{index}", trt.bfloat16, (1, heads, 512, width)) for name in "kv")
            softmax = trt.AttentionNormalizationOp.SOFTMAX
            x = network.add_attention_v2(x, key, value, softmax, trt.CausalMaskKind.LOWER_RIGHT).get_output(0)
            continue
        loop = network.add_loop()
        trips = network.add_constant((), np.array(rows, np.int32)).get_output(0)
        loop.add_trip_limit(trips, trt.TripLimit.COUNT)
        past = network.add_input(f"s{index}", trt.bfloat16, (1, heads, width))
        state = loop.add_recurrence(past)
        row = loop.add_iterator(x, 2, False).get_output(0)
        total = network.add_elementwise(state.get_output(0), row, trt.ElementWiseOperation.SUM).get_output(0)
        state.set_input(1, total)
        steps = loop.add_loop_output(total, trt.LoopOutput.CONCATENATE, 2)
        steps.set_input(1, trips)
        x = steps.get_output(0)
    network.mark_output(x)
    config = builder.create_builder_config()
    config.num_compute_capabilities = 1
    config.set_compute_capability(trt.ComputeCapability.SM89, 0)
    return builder.build_serialized_network(network, config) is not None


def test_why_the_delta_rule_has_no_loop_still_holds() -> None:
    """A version that builds this could have the Scan of the canonical body back."""
    assert not _built("ALA"), "control: an attention behind a loop behind an attention is built now"
    for order in ("LAA", "AA", "LLA"):
        assert _built(order), order
