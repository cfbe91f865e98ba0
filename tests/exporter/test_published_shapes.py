"""Released sizes: their graphs are built whole; weights are made up where a test can afford them."""

from __future__ import annotations

from math import prod
from pathlib import Path

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.contracts import names
from mtp_engines.contracts.manifest import Limits
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.onnxruntime_cpu import lower
from mtp_exporter.families import describe
from mtp_exporter.families.description import claim
from mtp_exporter.graphs import backbone_graph, mtp_graph
from mtp_exporter.reading.checkpoint import Checkpoint
from mtp_exporter.reading.safetensors_file import TensorInfo
from mtp_tools.made_up.shapes import FLOAT32, PUBLISHED, PublishedShape, config, tensors
from mtp_tools.made_up.write import write_checkpoint
from tests.support import build_bundle, ids_of

# Parameters of target and head together, in billions, as the sizes' names promise within a quarter.
BILLIONS = {"0.8B": 0.8, "2B": 2.0, "4B": 4.4, "9B": 9.3, "27B": 27.6}


def headers(shape: PublishedShape) -> Checkpoint:
    """A checkpoint that consists of headers only."""
    found = {}
    for name, axes in tensors(shape).items():
        wide = name.endswith(FLOAT32)
        found[name] = TensorInfo(name, Path("model.safetensors"), "F32" if wide else "BF16", axes, 0, prod(axes) * 2)
    return Checkpoint(Path("published"), config(shape), {}, found, dict(found))


@pytest.mark.parametrize("size", PUBLISHED)
def test_the_graphs_of_a_published_size_are_complete(size: str) -> None:
    shape = PUBLISHED[size]
    checkpoint = headers(shape)
    description = describe(checkpoint)
    claimed = claim(checkpoint, description)
    assert sum(prod(t.shape) for t in checkpoint.tensors.values()) / 1e9 == pytest.approx(BILLIONS[size], rel=0.25)
    references = {
        role: ir.ExternalTensor("weights.data", 0, 0, ir.DataType.FLOAT, shape=ir.Shape(need.shape), name=role)
        for role, (need, _) in claimed.items()
    }
    limits = Limits(128, 1, 7)
    backbone = backbone_graph(description.spec, limits, references)
    inputs = [value.name for value in backbone.graph.inputs]
    full = shape.layers // 4
    assert sum(name.endswith(".recurrent") for name in inputs) == shape.layers - full
    assert sum(name.endswith(".key") for name in inputs) == full
    head = mtp_graph(description.spec, limits, references)
    assert [value.name for value in head.graph.outputs if value.name == names.HIDDEN_OUT]
    used = set(backbone.graph.initializers) | set(head.graph.initializers)
    assert used == set(references)
    ir.to_proto(lower(without_head(backbone)))


def test_a_made_up_checkpoint_builds_and_generates(tmp_path: Path) -> None:
    """The layout of the releases with the dimensions of none, since a test can afford no real one."""
    small = PublishedShape(4, 64, 96, 3, 1, 32, True)
    size = write_checkpoint(tmp_path / "checkpoint", small, seed=1)
    assert size == sum(prod(axes) * (4 if name.endswith(FLOAT32) else 2) for name, axes in tensors(small).items())
    bundle = build_bundle(tmp_path / "checkpoint", tmp_path / "bundle")
    prompt = np.arange(5, 15).tolist()
    assert ids_of(bundle, prompt, 6, draft_tokens=3) == ids_of(bundle, prompt, 6, draft_tokens=0)
