"""Canonical graphs with weights and caches in a half type: every type is said, every value is the cast one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest

from mtp_engines.contracts import names
from mtp_engines.errors import BuildError
from mtp_engines.lowering.heads import without_head
from mtp_engines.lowering.precision import WEIGHT_TYPES, Precision, cast_lazily, to_precision
from mtp_engines.lowering.standard import lower_standard
from tests.fixtures.checkpoints import random_checkpoint
from tests.fixtures.moe_families import MAKERS
from tests.support import build_bundle, refused

CHECKPOINTS: dict[str, Callable[[Path], Path]] = {
    "hybrid, tied": lambda place: random_checkpoint(place, seed=3, tied=True),
    "hybrid with experts": lambda place: MAKERS["qwen3_next"](place, seed=12),
    "latent attention and experts": lambda place: MAKERS["deepseek_v3"](place, seed=6),
}
CARRIED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mtp"
GRAPHS = ("backbone", "mtp")
HALVES: tuple[Precision, ...] = ("bf16", "fp16")
CASTS_BACK = {"MatMul", "CachedAttention", "LatentAttention", "RoutedExperts", "Gather"}


@pytest.fixture(scope="module", params=CHECKPOINTS.values(), ids=CHECKPOINTS)
def graphs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a bundle's graphs."""
    folder = tmp_path_factory.mktemp("precision")
    return build_bundle(request.param(folder / "checkpoint"), folder / "bundle") / "graphs"


@pytest.fixture(scope="module")
def backbone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The backbone of a tied hybrid."""
    folder = tmp_path_factory.mktemp("one")
    checkpoint = random_checkpoint(folder / "checkpoint", seed=3, tied=True)
    return build_bundle(checkpoint, folder / "bundle") / "graphs" / "backbone.onnx"


def save(model: ir.Model, folder: Path) -> Path:
    """A model with all its weights in a folder."""
    folder.mkdir(exist_ok=True)
    ir.save(model, folder / "model.onnx", external_data="model.data")
    return folder / "model.onnx"


def inferred(model: ir.Model, folder: Path) -> dict[str, int]:
    """Element type of every value of the main graph, after the strictest check that ONNX has."""
    path = save(model, folder)
    onnx.checker.check_model(str(path), full_check=True)
    proto = onnx.shape_inference.infer_shapes(
        onnx.load(str(path), load_external_data=False), check_type=True, strict_mode=True, data_prop=True
    )
    values = (*proto.graph.input, *proto.graph.output, *proto.graph.value_info)
    found = {value.name: value.type.tensor_type.elem_type for value in values}
    return found | {tensor.name: tensor.data_type for tensor in proto.graph.initializer}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_every_type_is_inferred_and_only_weights_products_and_caches_are_half(
    graphs: Path, tmp_path: Path, graph: str, precision: Precision
) -> None:
    half = int(WEIGHT_TYPES[precision])
    model = to_precision(ir.load(graphs / f"{graph}.onnx"), precision)
    types = inferred(model, tmp_path / "model")
    for value in (*model.graph.inputs, *model.graph.outputs):
        assert value.name is not None
        if names.is_cache(value.name):
            assert types[value.name] == half, value.name
        else:
            assert types[value.name] in (ir.DataType.FLOAT, ir.DataType.INT64), value.name
    assert types[names.LOGITS] == ir.DataType.FLOAT
    halves = [node for node in model.graph for value in node.outputs if types[str(value.name)] == half]
    assert {node.op_type for node in halves} <= {*CASTS_BACK, "Cast", "Transpose"}
    for node in model.graph:
        if node.op_type in ("RMSNormalization", "GatedDelta", "CausalConvState", "DeltaGate", "Add", "Mul", "Sigmoid"):
            assert all(types[str(value.name)] == ir.DataType.FLOAT for value in (*node.inputs, *node.outputs)), (
                node.name
            )


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_the_plugin_free_form_has_a_type_for_every_value_too(
    graphs: Path, tmp_path: Path, graph: str, precision: Precision
) -> None:
    half = int(WEIGHT_TYPES[precision])
    model = lower_standard(without_head(to_precision(ir.load(graphs / f"{graph}.onnx"), precision)), 16)
    types = inferred(model, tmp_path / "model")
    products = [node for node in model.graph if node.op_type == "MatMul"]
    of_weights = [node for node in products if _reads_a_weight(node)]
    assert {types[str(node.outputs[0].name)] for node in of_weights} == {half}
    rules = {types[str(node.outputs[0].name)] for node in products if "GatedDelta" in str(node.name)}
    assert rules == ({int(ir.DataType.FLOAT)} if any("GatedDelta" in str(node.name) for node in model.graph) else set())
    attentions = [node for node in model.graph if node.op_type == "Attention"]
    assert {types[str(node.outputs[0].name)] for node in attentions} == {half}


def _reads_a_weight(node: ir.Node) -> bool:
    matrix = node.inputs[1]
    assert matrix is not None
    transpose = matrix.producer()
    stored = transpose.inputs[0] if transpose is not None and transpose.op_type == "Transpose" else matrix
    return stored is not None and stored.is_initializer()


def test_control_a_missing_cast_is_no_valid_graph(backbone: Path, tmp_path: Path) -> None:
    model = to_precision(ir.load(backbone), "bf16")
    removed = {"before": 0, "after": 0}
    for what, dtype in (("before", ir.DataType.BFLOAT16), ("after", ir.DataType.FLOAT)):
        broken = model.clone()
        cast = next(node for node in broken.graph if node.op_type == "Cast" and node.attributes["to"].as_int() == dtype)
        ir.convenience.replace_all_uses_with(cast.outputs[0], cast.inputs[0])
        broken.graph.remove(cast, safe=True)
        with pytest.raises(Exception, match=r"type|Type"):
            inferred(broken, tmp_path / what)
        removed[what] += 1
    assert removed == {"before": 1, "after": 1}


@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("graph", GRAPHS)
def test_weights_equal_the_cast_ones_and_stay_shared(graphs: Path, graph: str, precision: Precision) -> None:
    before = ir.load(graphs / f"{graph}.onnx")
    after = to_precision(ir.load(graphs / f"{graph}.onnx"), precision)
    assert list(after.graph.initializers) == list(before.graph.initializers)
    kinds = set()
    for name, value in after.graph.initializers.items():
        original = before.graph.initializers[name].const_value
        assert original is not None
        assert value.const_value is not None
        got, full = value.const_value.numpy(), original.numpy()
        assert value.dtype is value.const_value.dtype
        if got.ndim >= 2 and "conv" not in name:
            assert value.dtype is WEIGHT_TYPES[precision], name
            np.testing.assert_array_equal(got, full.astype(got.dtype), err_msg=name)
            kinds.add("cast")
        else:
            np.testing.assert_array_equal(got, full, err_msg=name)
            kinds.add("kept")
            assert value.dtype is original.dtype
    assert kinds == {"cast", "kept"}


def test_a_tied_matrix_is_one_tensor_for_embedding_and_head(backbone: Path) -> None:
    model = to_precision(ir.load(backbone), "bf16")
    users = {use.node.op_type for use in model.graph.initializers["embedding"].uses()}
    assert users == {"Gather", "Transpose"}


def test_no_weight_is_read_before_it_is_written(backbone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def read(tensor: Any) -> None:
        raise AssertionError(f"{tensor.name} was read")

    with monkeypatch.context() as patch:
        patch.setattr(ir.ExternalTensor, "numpy", read)
        model = to_precision(ir.load(backbone), "bf16")
        weight = model.graph.initializers["embedding"].const_value
        assert weight is not None
        with pytest.raises(AssertionError, match="embedding was read"):  # Control: reading it would be seen.
            weight.numpy()
    assert weight.numpy() is not weight.numpy(), "a cast weight is let go after it was read"


def test_float32_changes_nothing(graphs: Path) -> None:
    for graph in GRAPHS:
        payloads = [ir.to_proto(ir.load(graphs / f"{graph}.onnx")).SerializeToString(deterministic=True)]
        payloads.append(
            ir.to_proto(to_precision(ir.load(graphs / f"{graph}.onnx"), "fp32")).SerializeToString(deterministic=True)
        )
        other = to_precision(ir.load(graphs / f"{graph}.onnx"), "bf16")
        assert payloads[0] == payloads[1]
        assert len(other.graph) > len(ir.load(graphs / f"{graph}.onnx").graph), "control: bf16 changes the graph"


def test_both_half_types_make_the_same_graph(backbone: Path) -> None:
    """ONNX Runtime runs no bfloat16 on a CPU, so what is run below in float16 must stand for both."""
    texts = []
    for precision in HALVES:
        nodes = to_precision(ir.load(backbone), precision).graph
        lines = [
            f"{node.op_type} {[str(v.name) for v in node.inputs if v]} {[str(v.name) for v in node.outputs]} "
            f"{'half' if node.op_type == 'Cast' and node.attributes['to'].as_int() != 1 else ''}"
            for node in nodes
        ]
        texts.append(lines)
    assert texts[0] == texts[1]


def run(model: ir.Model, folder: Path, half: type[np.generic]) -> np.ndarray:
    """Hidden states of a backbone over nine rows."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(save(model, folder), options, providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {
        names.INPUT_IDS: np.random.default_rng(1).integers(0, 64, (1, 9)),
        names.POSITION_IDS: np.arange(9)[None],
        names.PAST_LENGTH: np.zeros(1, np.int64),
        names.LOGIT_ROWS: np.ones(1, np.int64),
    }
    for value in session.get_inputs():
        if value.name not in feed:
            shape = [axis if isinstance(axis, int) else {"batch": 1, "capacity": 32}[axis] for axis in value.shape]
            feed[value.name] = np.zeros(shape, half if names.is_cache(value.name) else np.float32)
    feed = {name: value for name, value in feed.items() if name in {known.name for known in session.get_inputs()}}
    hidden: np.ndarray = session.run([names.HIDDEN], feed)[0]
    return hidden


def test_float16_runs_and_is_near_float32(tmp_path: Path) -> None:
    """With the carried checkpoint: random weights magnify what float16 rounds."""
    backbone = build_bundle(CARRIED, tmp_path / "bundle") / "graphs" / "backbone.onnx"
    full = run(ir.load(backbone), tmp_path / "full", np.float32)
    half = run(to_precision(ir.load(backbone), "fp16"), tmp_path / "half", np.float16)
    difference = np.abs(half - full).max()
    # Measured: 1.1e-3 on values up to 5. A mixer left out moves them by more than 0.2.
    assert 0 < difference < 5e-3
    plugin_free = lower_standard(without_head(to_precision(ir.load(backbone), "fp16")), 16)
    assert np.abs(run(plugin_free, tmp_path / "standard", np.float16) - full).max() < 5e-3
    broken = to_precision(ir.load(backbone), "fp16")
    output = broken.graph.initializers["layers.0.mixer.output"]
    assert output.const_value is not None
    output.const_value = ir.tensor(np.zeros_like(output.const_value.numpy()), name=output.name)
    assert np.abs(run(broken, tmp_path / "broken", np.float16) - full).max() > 40 * 5e-3, (
        "control: a lost layer is seen"
    )


def test_a_weight_beyond_float16_is_refused_and_bfloat16_takes_it() -> None:
    large = ir.tensor(np.array([[1.0, 70000.0]], np.float32), name="layers.0.mlp.up")
    with refused("layers.0.mlp.up", "7e+04", "--precision bf16", error=BuildError):
        cast_lazily(large, ir.DataType.FLOAT16).numpy()
    assert np.isfinite(cast_lazily(large, ir.DataType.BFLOAT16).numpy().astype(np.float32)).all()
