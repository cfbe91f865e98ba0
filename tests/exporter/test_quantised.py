"""Quantised checkpoints: every format against values computed one by one, and refusals by name.

Over 300 lines because it is a list of independent cases, each short and found by its case id.
"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mtp_engines.errors import CheckpointError
from mtp_exporter.quantised import StoredTensor, Unsupported, describe_methods, logical_tensors
from mtp_exporter.reading.checkpoint import open_checkpoint
from tests.fixtures.quantised import (
    Case,
    Stored,
    awq,
    bf16_scales,
    fp8_block,
    gptq,
    packed,
    scaled,
    stored,
    write,
    zeros,
)
from tests.support import refused

Array = np.ndarray


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def read_case(case: Case, directory: Path) -> StoredTensor:
    """The one logical tensor of a case."""
    tensors = logical_tensors(write(directory / "a.safetensors", case.tensors), case.config)
    assert list(tensors) == [case.name]
    return tensors[case.name]


def is_same(got: Array, want: Array) -> bool:
    """Equal in every bit, except that any NaN equals any."""
    assert got.dtype == want.dtype == np.float32
    return got.shape == want.shape and bool(
        ((got.view(np.uint32) == want.view(np.uint32)) | (np.isnan(got) & np.isnan(want))).all()
    )


def check_case(case: Case, directory: Path) -> StoredTensor:
    """Read a case whole and in parts."""
    tensor = read_case(case, directory)
    assert (tensor.name, tensor.dtype, tensor.shape) == (case.name, case.dtype, case.values.shape)
    assert is_same(tensor.read(), case.values)
    size = case.values.shape[0]
    for start, count in [(0, size), (0, 0), (size, 0), (size - 1, 1), *rng().integers(0, size, (12, 2)).tolist()]:
        count = min(count, size - start)
        assert is_same(tensor.rows(start, count), case.values[start : start + count]), (start, count)
    assert {part.name for part in tensor.parts} == set(case.tensors)
    return tensor


def config_of(**section: Any) -> dict[str, Any]:
    return {"quantization_config": section}


def without(case: Case, *names: str) -> Case:
    return replace(case, tensors={name: tensor for name, tensor in case.tensors.items() if name not in names})


# ------------------------------------------------------------------------------- fp8 and int8


@pytest.mark.parametrize("shape", [(256, 384), (130, 257), (1, 129), (129, 1), (383, 128)])
def test_fp8_blocks_of_128_ragged_or_not(shape: tuple[int, int], tmp_path: Path) -> None:
    tensor = check_case(fp8_block(rng(), shape), tmp_path)
    assert np.isnan(tensor.read()).any(), "a NaN that is stored must be read as one"


def test_a_weight_of_one_block_has_one_scale(tmp_path: Path) -> None:
    check_case(fp8_block(rng(), (100, 128), (128, 128)), tmp_path)
    check_case(replace(fp8_block(rng(), (100, 128)), dtype="F8_E4M3 (per tensor)"), tmp_path)


@pytest.mark.parametrize("seed", range(6))
def test_fp8_blocks_of_any_stated_size_and_shape(seed: int, tmp_path: Path) -> None:
    sizes = rng(seed)
    shape = tuple(int(size) for size in sizes.integers(1, 60, 2))
    block = tuple(int(size) for size in sizes.integers(2, 20, 2))
    check_case(fp8_block(sizes, (shape[0] + 20, shape[1] + 20), (block[0], block[1])), tmp_path)


@pytest.mark.parametrize("name", ["x.experts.gate_up_proj", "x.experts.down_proj"])
def test_fused_experts_have_fp8_blocks_of_their_own(name: str, tmp_path: Path) -> None:
    case = fp8_block(rng(), (3, 11, 14), (4, 8), (name, f"{name}_scale_inv"))
    tensor = check_case(case, tmp_path)
    assert is_same(tensor.rows(1, 1)[0], case.values[1])


PLAIN_SCALES = [
    ((9, 5), (), "per tensor"),
    ((9, 5), (1,), "per tensor"),
    ((9, 5), (9,), "per channel"),
    ((9, 5), (9, 1), "per channel"),
    ((3, 4, 5), (3,), "per expert"),
    ((3, 4, 5), (3, 1, 1), "per expert"),
    ((3, 4, 5), (3, 4, 1), "per channel"),
    ((3, 4, 5), (3, 1, 5), "per channel"),
]


@pytest.mark.parametrize(("shape", "scale_shape", "label"), PLAIN_SCALES)
@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "I8"])
def test_scales_of_a_tensor_a_row_or_an_expert(
    dtype: str, shape: tuple[int, ...], scale_shape: tuple[int, ...], label: str, tmp_path: Path
) -> None:
    check_case(scaled(rng(), shape, scale_shape, label, dtype=dtype), tmp_path)


@pytest.mark.parametrize("scale_dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_scales_of_every_dtype_under_both_names(scale_dtype: str, suffix: str, tmp_path: Path) -> None:
    names = ("m.weight", f"m.weight{suffix}")
    check_case(scaled(rng(), (7, 6), (7, 1), "per channel", scale_dtype=scale_dtype, names=names), tmp_path)


def test_scales_that_are_bare_exponents(tmp_path: Path) -> None:
    case = fp8_block(rng(), (6, 9), (4, 4))
    exponents = rng(1).integers(100, 150, (2, 3))
    scales = np.exp2(exponents - 127.0).astype(np.float32)
    plain = write(tmp_path / "a", case.tensors | {"m.weight_scale_inv": stored("F32", scales)})
    bare = write(tmp_path / "b", case.tensors | {"m.weight_scale_inv": stored("F8_E8M0", exponents)})
    want = logical_tensors(plain, case.config)["m.weight"].read()
    assert is_same(logical_tensors(bare, case.config)["m.weight"].read(), want)


@pytest.mark.parametrize("scale_shape", [(), (1,), (9, 1), (9, 3), (9, 2)])
@pytest.mark.parametrize("has_zeros", [False, True])
def test_int8_with_and_without_zero_points(scale_shape: tuple[int, ...], has_zeros: bool, tmp_path: Path) -> None:
    labels = {(9, 1): "per channel", (9, 3): "group 4", (9, 2): "group 6"}
    label = labels.get(scale_shape, "per tensor")
    check_case(scaled(rng(), (9, 12), scale_shape, label, dtype="I8", has_zeros=has_zeros), tmp_path)


@pytest.mark.parametrize("suffix", ["input_scale", "activation_scale", "k_scale", "output_scale", "input_scale_ub"])
def test_scales_of_activations_are_left_out(suffix: str, tmp_path: Path) -> None:
    case = scaled(rng(), (4, 6), (), "per tensor")
    tensors = write(tmp_path / "a", case.tensors | {f"m.{suffix}": stored("F32", np.float32(3))})
    logical = logical_tensors(tensors, {})
    assert list(logical) == ["m.weight"]
    assert is_same(logical["m.weight"].read(), case.values)


def test_control_scales_of_transposed_blocks_give_other_values(tmp_path: Path) -> None:
    case = fp8_block(rng(), (16, 16), (4, 4))
    scales = np.frombuffer(case.tensors["m.weight_scale_inv"].data, "<f4").reshape(4, 4).T
    fault = replace(case, tensors=case.tensors | {"m.weight_scale_inv": stored("F32", scales)})
    assert not is_same(read_case(fault, tmp_path).read(), case.values)


def test_control_a_zero_point_off_by_one_in_int8_gives_other_values(tmp_path: Path) -> None:
    case = scaled(rng(), (9, 12), (9, 1), "per channel", dtype="I8", has_zeros=True)
    points = np.frombuffer(case.tensors["m.weight_zero_point"].data, "i1").reshape(9, 1)
    fault = replace(case, tensors=case.tensors | {"m.weight_zero_point": stored("I8", points ^ 1)})
    assert not is_same(read_case(fault, tmp_path).read(), case.values)


# ------------------------------------------------------------------------- compressed-tensors


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero_points", ["none", "packed", "int8"])
@pytest.mark.parametrize(
    ("shape", "group"), [((11, 24), 8), ((5, 13), None), ((17, 39), 13), ((1, 16), 4), ((8, 9), 9)]
)
def test_packed_integers(
    bits: int, zero_points: str, shape: tuple[int, int], group: int | None, tmp_path: Path
) -> None:
    check_case(packed(rng(), shape, group, bits, zero_points=zero_points), tmp_path)


@pytest.mark.parametrize("bits", [4, 8])
def test_packed_integers_with_their_columns_in_another_order(bits: int, tmp_path: Path) -> None:
    check_case(packed(rng(), (6, 20), 5, bits, zero_points="packed", is_reordered=True), tmp_path)


def test_an_index_that_was_never_filled_means_columns_in_order(tmp_path: Path) -> None:
    case = packed(rng(), (6, 20), 5, 4)
    case.tensors["m.weight_g_idx"] = stored("I32", np.full(20, -1))
    check_case(case, tmp_path)


@pytest.mark.parametrize(
    ("fault", "options"),
    [("zero point", {"zero_points": "packed"}), ("no index", {"is_reordered": True})],
)
def test_control_faults_in_packed_integers_give_other_values(
    fault: str, options: dict[str, Any], tmp_path: Path
) -> None:
    case = packed(rng(), (9, 24), 8, 4, fault=fault, **options)
    assert not is_same(read_case(case, tmp_path).read(), case.values)


# ------------------------------------------------------------------------------ GPTQ and AWQ


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("layout", ["gptq", None, "gptq_v2"])
@pytest.mark.parametrize(("shape", "group"), [((32, 64), 16), ((64, 32), None), ((16, 48), 32)])
def test_gptq(bits: int, layout: str | None, shape: tuple[int, int], group: int | None, tmp_path: Path) -> None:
    check_case(gptq(rng(), shape, group, bits, layout=layout), tmp_path)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("seed", range(3))
def test_gptq_of_odd_shapes_with_columns_in_another_order(bits: int, seed: int, tmp_path: Path) -> None:
    sizes = rng(seed)
    rows, columns = (int(size) for size in sizes.integers(17, 70, 2))
    case = gptq(sizes, (rows, columns), int(sizes.integers(3, 9)), bits, layout="gptq_v2", is_reordered=True)
    check_case(case, tmp_path)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("group", [16, 32])
def test_gptq_without_an_index_has_its_columns_in_order(bits: int, group: int, tmp_path: Path) -> None:
    check_case(gptq(rng(), (32, 80), group, bits, has_index=False), tmp_path)


@pytest.mark.parametrize(
    ("fault", "options"),
    [("zero point", {}), ("no index", {"is_reordered": True}), ("high bits first", {})],
)
def test_control_faults_in_gptq_give_other_values(fault: str, options: dict[str, Any], tmp_path: Path) -> None:
    case = gptq(rng(2), (8, 32), 8, 8, fault=fault, **options)
    assert not is_same(read_case(case, tmp_path).read(), case.values)


@pytest.mark.parametrize("layout", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("point", [7, 8])
def test_a_symmetric_zero_point_is_the_middle_whatever_its_layout_is_called(
    layout: str, point: int, tmp_path: Path
) -> None:
    case = gptq(rng(), (16, 32), 8, 4, layout=layout)
    tensors = case.tensors | {"m.qzeros": stored("I32", np.full((4, 2), point * 0x11111111, np.uint32).view(np.int32))}
    middle = {"gptq": 7, "gptq_v2": 8}[layout]
    plain = tensors | {"m.qzeros": stored("I32", np.full((4, 2), middle * 0x11111111, np.uint32).view(np.int32))}
    section: Any = case.config["quantization_config"]
    want = logical_tensors(write(tmp_path / "a", plain), case.config)["m.weight"].read()
    got = logical_tensors(write(tmp_path / "b", tensors), config_of(**section, sym=True))["m.weight"]
    assert is_same(got.read(), want)
    assert is_same(got.rows(3, 5), want[3:8])
    mislabelled = logical_tensors(write(tmp_path / "c", tensors), case.config)["m.weight"].read()
    assert is_same(mislabelled, want) == (point == middle), "control: the layout does matter without the word"


def test_symmetric_weights_with_other_zero_points_are_refused(tmp_path: Path) -> None:
    case = gptq(rng(), (16, 32), 8, 4)
    section: Any = case.config["quantization_config"]
    tensor = read_case(replace(case, config=config_of(**section, sym=True)), tmp_path)
    with refused("'m.qzeros'", "symmetric", "7 or 8", "bf16", error=CheckpointError):
        tensor.read()


@pytest.mark.parametrize(("output", "is_certain"), [(0, False), (6, False), (7, True), (9, False), (11, True)])
def test_a_zero_point_that_overflowed_is_refused_where_it_spoils_others(
    output: int, is_certain: bool, tmp_path: Path
) -> None:
    case = gptq(rng(), (12, 32), 8, 4)
    fields = np.full((4, 16), 3)
    fields[:, output] = 15
    packed_fields = (fields.reshape(4, 2, 8) << (4 * np.arange(8))).sum(-1).astype(np.uint32).view(np.int32)
    tensor = read_case(replace(case, tensors=case.tensors | {"m.qzeros": stored("I32", packed_fields)}), tmp_path)
    if is_certain:
        assert is_same(tensor.rows(output, 1), tensor.read()[output : output + 1])
        return
    with refused("'m.qzeros'", "overflowed", "gptq_v2", error=CheckpointError):
        tensor.read()
    with refused("'m.qzeros'", error=CheckpointError):
        tensor.rows(output // 8 * 8, 1)
    tensor.rows(8 - output // 8 * 8, 1)


@pytest.mark.parametrize(("index", "message"), [(-1, "-1 to"), (4, "to 4"), (None, "every column into group 0")])
def test_an_index_that_cannot_be_right_is_refused(index: int | None, message: str, tmp_path: Path) -> None:
    case = gptq(rng(), (16, 32), 8, 4)
    values = np.zeros(32, int) if index is None else np.r_[np.arange(31) // 8, index]
    tensor = read_case(replace(case, tensors=case.tensors | {"m.g_idx": stored("I32", values)}), tmp_path)
    with refused("'m.g_idx'", message, error=CheckpointError):
        tensor.rows(0, 1)


@pytest.mark.parametrize(("shape", "group"), [((8, 12), 4), ((24, 7), None), ((16, 33), 11), ((40, 64), 32)])
def test_awq(shape: tuple[int, int], group: int | None, tmp_path: Path) -> None:
    check_case(awq(rng(), shape, group), tmp_path)


@pytest.mark.parametrize("fault", ["order", "inverse order", "zero point"])
def test_control_faults_in_awq_give_other_values(fault: str, tmp_path: Path) -> None:
    case = awq(rng(), (16, 12), 4, fault=fault)
    assert not is_same(read_case(case, tmp_path).read(), case.values)


@pytest.mark.parametrize("packing", ["auto_round:auto_gptq", "auto_round:auto_awq"])
def test_a_method_that_writes_the_layout_of_another_says_so(packing: str, tmp_path: Path) -> None:
    case = gptq(rng(), (16, 32), 8, 4) if packing.endswith("gptq") else awq(rng(), (16, 32), 8)
    check_case(replace(case, config=config_of(quant_method="auto-round", packing_format=packing, bits=4)), tmp_path)


# ------------------------------------------------------------------------------ large tensors

WIDE = 1 << 20
LARGE: dict[str, tuple[dict[str, Stored], dict[str, Any]]] = {
    "fp8 blocks": (
        {
            "m.weight": zeros("F8_E4M3", (WIDE, 4096), 1),
            "m.weight_scale_inv": zeros("F32", (WIDE // 128, 32), 4),
        },
        {},
    ),
    "int8": ({"m.weight": zeros("I8", (WIDE, 4096), 1), "m.weight_scale": zeros("F32", (WIDE, 1), 4)}, {}),
    "packed": (
        {
            "m.weight_packed": zeros("I32", (WIDE, 512), 4),
            "m.weight_scale": zeros("BF16", (WIDE, 32), 2),
            "m.weight_zero_point": zeros("I32", (WIDE // 8, 32), 4),
            "m.weight_shape": stored("I64", np.array([WIDE, 4096])),
        },
        {},
    ),
    "gptq": (
        {
            "m.qweight": zeros("I32", (512, WIDE), 4),
            "m.qzeros": zeros("I32", (32, WIDE // 8), 4),
            "m.scales": zeros("F16", (32, WIDE), 2),
        },
        config_of(quant_method="gptq"),
    ),
    "awq": (
        {
            "m.qweight": zeros("I32", (4096, WIDE // 8), 4),
            "m.qzeros": zeros("I32", (32, WIDE // 8), 4),
            "m.scales": zeros("F16", (32, WIDE), 2),
        },
        config_of(quant_method="awq"),
    ),
}


@pytest.mark.parametrize("kind", LARGE)
def test_rows_of_a_large_tensor_leave_the_rest_on_disk(kind: str, tmp_path: Path) -> None:
    tensors, config = LARGE[kind]
    tensor = logical_tensors(write(tmp_path / "a", tensors), config)["m.weight"]
    assert tensor.shape == (WIDE, 4096)
    tracemalloc.start()
    try:
        rows = tensor.rows(WIDE - 3, 2)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert rows.shape == (2, 4096)
    assert not rows.any()
    assert peak < 2 << 20, f"{peak} bytes for 32 KiB of values"


def test_rows_that_do_not_exist_are_an_error(tmp_path: Path) -> None:
    tensor = read_case(gptq(rng(), (16, 32), 8, 4), tmp_path)
    for start, count in [(-1, 1), (16, 1), (15, 2), (3, -1)]:
        with pytest.raises(IndexError, match=r"'m.weight', which has 16"):
            tensor.rows(start, count)


@pytest.mark.parametrize(
    "case", [fp8_block(rng(), (6, 9), (4, 4)), gptq(rng(), (16, 32), 8, 4)], ids=["rows", "columns"]
)
def test_a_file_that_got_shorter_is_refused(case: Case, tmp_path: Path) -> None:
    tensor = read_case(case, tmp_path)
    content = tensor.file.read_bytes()
    tensor.file.write_bytes(content[: tensor.parts[0].offset + 4])
    with refused("ended inside tensor", "fetch the file again", error=CheckpointError):
        tensor.rows(3, 2)


# ---------------------------------------------------------------------------- whole checkpoints


def test_a_mixed_checkpoint_is_read_by_its_headers_and_not_by_a_list_that_lies(tmp_path: Path) -> None:
    trunk = fp8_block(rng(), (12, 20), (8, 8), ("layers.0.up.weight", "layers.0.up.weight_scale_inv"))
    head = bf16_scales(rng(1), (5, 12))
    parts: list[dict[str, Stored]] = [
        {**trunk.tensors, "norm.weight": stored("F32", np.ones(12))},
        {"head.weight": stored("BF16", head), "d2t": stored("I64", np.arange(5)), "t2d": stored("BOOL", np.ones(9))},
    ]
    files = {f"model-{i}.safetensors": part for i, part in enumerate(parts)}
    for file, part in files.items():
        write(tmp_path / file, part)
    index = {"weight_map": {name: file for file, part in files.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    # The trunk is said to be left alone and is not; the head is said to be quantised and is not.
    section = {"quant_method": "fp8", "weight_block_size": [8, 8], "modules_to_not_convert": ["layers.0.up"]}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": section}))
    checkpoint = open_checkpoint(tmp_path)
    logical = checkpoint.tensors
    assert set(logical) == {"layers.0.up.weight", "norm.weight", "head.weight", "d2t", "t2d"}
    assert is_same(logical["layers.0.up.weight"].read(), trunk.values)
    assert is_same(logical["head.weight"].read(), head)
    for name in ("norm.weight", "head.weight", "d2t", "t2d"):
        assert logical[name] is checkpoint.stored[name]
    assert describe_methods(logical) == {"BF16": 1, "BOOL": 1, "F32": 1, "F8_E4M3 (block 8x8)": 1, "I64": 1}


def test_a_plain_checkpoint_stays_as_it_is(tmp_path: Path) -> None:
    tensors = write(
        tmp_path / "a",
        {
            "m.weight": stored("BF16", bf16_scales(rng(), (3, 4))),
            "m.bias": stored("F32", np.zeros(3)),
            "x.layer_scale": stored("F32", np.zeros(3)),
            "x.position_ids": stored("I64", np.arange(3)),
            "x.codes": stored("U8", np.arange(3)),
        },
    )
    assert logical_tensors(tensors, {"quantization_config": None}) == tensors


def test_companions_without_a_weight_stay_under_their_own_names(tmp_path: Path) -> None:
    orphans = {
        "a.weight_scale_inv": stored("F32", np.ones((1, 1))),
        "b.weight_scale": stored("F8_E4M3", np.ones((4, 4))),
        "b.weight_shape": stored("I64", np.ones(2)),
        "c.qzeros": stored("I32", np.ones((1, 2))),
        "c.g_idx": stored("I32", np.ones(8)),
        "d.input_scale": stored("F32", np.float32(1)),
        "e.weight.absmax": stored("F32", np.ones(4)),
        "x.experts.up_proj_scale": stored("F32", np.ones(4)),
        "x.experts.down_proj_scale": stored("F8_E4M3", np.ones(4)),
    }
    tensors = write(tmp_path / "a", orphans)
    assert logical_tensors(tensors, {}) == tensors


def test_a_bias_beside_a_quantised_weight_is_a_tensor_of_its_own(tmp_path: Path) -> None:
    cases = [gptq(rng(), (16, 32), 8, 4), packed(rng(), (6, 20), 5, 4), fp8_block(rng(), (6, 9))]
    for i, case in enumerate(cases):
        tensors = write(tmp_path / f"{i}", case.tensors | {"m.bias": stored("F32", np.ones(case.values.shape[0]))})
        logical = logical_tensors(tensors, case.config)
        assert set(logical) == {"m.weight", "m.bias"}
        assert logical["m.bias"] is tensors["m.bias"]


# ----------------------------------------------------------------------------------- refusals


def u8(*shape: int) -> Stored:
    return stored("U8", np.zeros(shape))


def f32(*shape: int) -> Stored:
    return stored("F32", np.ones(shape))


def i32(*shape: int) -> Stored:
    return stored("I32", np.zeros(shape))


def fp8(*shape: int) -> Stored:
    return stored("F8_E4M3", np.zeros(shape))


KINDS: dict[str, tuple[dict[str, Stored], str]] = {
    "nvfp4 packed": (
        {
            "m.weight_packed": u8(8, 8),
            "m.weight_scale": fp8(8, 1),
            "m.weight_global_scale": f32(1),
            "m.input_global_scale": f32(1),
        },
        "NVFP4 (dtype U8)",
    ),
    "nvfp4": ({"m.weight": u8(8, 8), "m.weight_scale": fp8(8, 1), "m.weight_scale_2": f32()}, "NVFP4 (dtype U8)"),
    "mxfp4 packed": ({"m.weight_packed": u8(8, 16), "m.weight_scale": u8(8, 1)}, "MXFP4 (dtype U8)"),
    "mxfp4 in int8": (
        {"m.weight": stored("I8", np.zeros((8, 16))), "m.weight_scale_inv": stored("F8_E8M0", np.zeros((8, 1)))},
        "MXFP4 (dtype I8)",
    ),
    "mxfp8": ({"m.weight": fp8(8, 64), "m.weight_scale": u8(8, 2)}, "its scale has dtype U8"),
    "fp8 without scale": ({"m.weight": fp8(8, 8)}, "fp8 (dtype F8_E4M3) and cannot be read, because it has no scale"),
    "fp8 with a scale of another name": (
        {"m.weight": fp8(8, 8), "m.scale": f32(1, 1)},
        "because it has a companion 'm.scale' of unknown meaning",
    ),
    "fp8 of another bias": (
        {"m.weight": stored("F8_E4M3FNUZ", np.zeros((8, 8))), "m.weight_scale": f32()},
        "dtype F8_E4M3FNUZ",
    ),
    "fp8 with two scales": (
        {"m.weight": fp8(8, 8), "m.weight_scale": f32(), "m.weight_scale_inv": f32()},
        "both weight_scale and weight_scale_inv",
    ),
    "fp8 with a second scale": (
        {"m.weight": fp8(8, 8), "m.weight_scale": f32(), "m.weight_scale_2": f32()},
        "'m.weight_scale_2' of unknown meaning",
    ),
    "fp8 with smoothed inputs": (
        {"m.weight": fp8(8, 8), "m.weight_scale": f32(), "m.pre_quant_scale": f32(8)},
        "'m.pre_quant_scale' of unknown meaning",
    ),
    "fp8 with a scale of another shape": ({"m.weight": fp8(8, 8), "m.weight_scale": f32(8, 4)}, "shape [8, 4]"),
    "fp8 with transposed blocks": ({"m.weight": fp8(300, 100), "m.weight_scale_inv": f32(1, 3)}, "block of 128x128"),
    "bitsandbytes 4-bit": (
        {
            "m.weight": u8(32, 1),
            "m.weight.absmax": u8(1),
            "m.weight.quant_map": f32(16),
            "m.weight.nested_absmax": f32(1),
            "m.weight.quant_state.bitsandbytes__nf4": u8(64),
        },
        "bitsandbytes 4-bit (dtype U8)",
    ),
    "bitsandbytes int8": (
        {"m.weight": stored("I8", np.zeros((8, 8))), "m.SCB": f32(8), "m.weight_format": u8()},
        "bitsandbytes int8 (dtype I8), which cannot be read",
    ),
    "torchao": ({"m._weight_qdata": stored("I8", np.zeros((8, 8))), "m._weight_scale": f32(8)}, "torchao (dtype I8)"),
    "marlin": ({"m.B": i32(1, 16), "m.s": f32(1, 8), "m.workspace": i32(4)}, "Marlin (dtype I32)"),
    "exl2": ({"m.q_weight": i32(4, 8), "m.q_scale": i32(2, 1), "m.q_groups": i32(4)}, "EXL2 (dtype I32)"),
    "exl3": (
        {"m.trellis": stored("I16", np.zeros((1, 1, 64))), "m.suh": f32(16), "m.svh": f32(16)},
        "EXL3 (dtype I16)",
    ),
    "hqq": ({"m.W_q": u8(4, 8), "m.scale": f32(8), "m.zero": f32(8)}, "HQQ (dtype U8)"),
    "quanto": ({"m.weight._data": stored("I8", np.zeros((8, 8))), "m.weight._scale": f32(8, 1)}, "Quanto (dtype I8)"),
    "eetq": ({"m.weight": stored("I8", np.zeros((8, 8))), "m.weight_scales": f32(8)}, "EETQ (dtype I8)"),
    "gguf": ({"m.qweight": u8(8, 18), "m.qweight_type": u8()}, "like those of GGUF (dtype U8)"),
    "int8 without scale": ({"m.weight": stored("I8", np.zeros((8, 8)))}, "it has no scale"),
    "bytes": ({"m.weight": u8(8, 8), "m.weight_scale": f32(1)}, "packed numbers (dtype U8)"),
    "two forms": ({"m.weight": f32(8, 8), "m.qweight": i32(1, 8)}, "more than one form"),
    "two packings": ({"m.weight_packed": i32(8, 1), "m.qweight": i32(1, 8)}, "more than one form"),
    "3-bit": (
        {"m.weight_packed": i32(4, 3), "m.weight_scale": f32(4, 1), "m.weight_shape": stored("I64", np.array([4, 32]))},
        "are 3 bits, expected 4 or 8",
    ),
    "packed without a shape": ({"m.weight_packed": i32(4, 4), "m.weight_scale": f32(4, 1)}, "it has no weight_shape"),
    "another shape": (
        {"m.weight_packed": i32(4, 4), "m.weight_scale": f32(4, 1), "m.weight_shape": stored("I64", np.array([5, 32]))},
        "[5, 32] where 4 rows",
    ),
    "damaged": ({"m.weight": replace(fp8(8, 8), shape=(8, 9)), "m.weight_scale": f32()}, "has 64 bytes"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_what_cannot_be_read_is_refused_by_name_when_it_is_read_and_not_before(kind: str, tmp_path: Path) -> None:
    tensors, text = KINDS[kind]
    other = scaled(rng(), (4, 6), (), "per tensor", names=("other.weight", "other.weight_scale"))
    logical = logical_tensors(write(tmp_path / "a", other.tensors | tensors), {})
    assert is_same(logical["other.weight"].read(), other.values)
    assert list(logical) == ["other.weight", "m.weight"], "its parts belong to it"
    tensor = logical["m.weight"]
    assert isinstance(tensor, Unsupported)
    assert {part.name for part in tensor.parts} == set(tensors) - {"m.input_global_scale"}
    for read in (tensor.read, lambda: tensor.rows(0, 1)):
        with refused(
            "'m.weight'", str(tensor.file), text, "supported are fp8", "bf16 checkpoint", error=CheckpointError
        ):
            read()
    assert describe_methods(logical)[tensor.dtype] == 1
    assert tensor.dtype.endswith("(not supported)")


def test_fused_experts_in_four_bit_floats_are_refused(tmp_path: Path) -> None:
    tensors = {
        "x.experts.up_proj_blocks": u8(2, 4, 1, 16),
        "x.experts.up_proj_scales": u8(2, 4, 1),
        "x.experts.up_proj_bias": f32(2, 4),
        "x.experts.down_proj": fp8(2, 4, 4),
    }
    logical = logical_tensors(write(tmp_path / "a", tensors), {})
    assert set(logical) == {"x.experts.up_proj", "x.experts.up_proj_bias", "x.experts.down_proj"}
    with refused("'x.experts.up_proj'", "MXFP4 (dtype U8)", error=CheckpointError):
        logical["x.experts.up_proj"].rows(0, 1)
    with refused("'x.experts.down_proj'", "it has no scale", error=CheckpointError):
        logical["x.experts.down_proj"].rows(0, 1)


def no_change(case: Case) -> Case:
    return case


def with_part(name: str, part: Stored) -> Callable[[Case], Case]:
    return lambda case: replace(case, tensors=case.tensors | {name: part})


GPTQ, AWQ, PACKED = (gptq(rng(), (16, 32), 8, 4), awq(rng(), (16, 32), 8), packed(rng(), (16, 32), 8, 4))
WEIGHTS = {"num_bits": 4, "group_size": 8, "symmetric": True}
CONTRADICTIONS: dict[str, tuple[Case, Callable[[Case], Case], dict[str, Any], str]] = {
    "no method": (GPTQ, no_change, {}, "config.json says method None"),
    "gptq called awq": (GPTQ, no_change, {"quant_method": "awq"}, "config.json says method 'awq'"),
    "awq called gptq": (AWQ, no_change, {"quant_method": "gptq"}, "config.json says method 'gptq'"),
    "awq in another layout": (AWQ, no_change, {"quant_method": "awq", "version": "GEMV"}, "layout 'gemv'"),
    "gptq in another layout": (GPTQ, no_change, {"quant_method": "gptq", "checkpoint_format": "marlin"}, "'marlin'"),
    "gptq in two layouts": (
        GPTQ,
        no_change,
        {"quant_method": "gptq", "checkpoint_format": "gptq", "format": "gptq_v2"},
        "'gptq and gptq_v2'",
    ),
    "gptq of other bits": (GPTQ, no_change, {"quant_method": "gptq", "bits": 8}, "of 4 bits, config.json says 8"),
    "awq of other bits": (AWQ, no_change, {"quant_method": "awq", "bits": 8}, "of 4 bits, config.json says 8"),
    "gptq of other groups": (GPTQ, no_change, {"quant_method": "gptq", "group_size": 16}, "group size 16"),
    "awq of other groups": (AWQ, no_change, {"quant_method": "awq", "group_size": -1}, "group size -1"),
    "gptq that lost its order": (
        GPTQ,
        lambda case: without(case, "m.g_idx"),
        {"quant_method": "gptq", "desc_act": True},
        "no g_idx",
    ),
    "gptq without zero points": (GPTQ, lambda c: without(c, "m.qzeros"), {"quant_method": "gptq"}, "no qzeros"),
    "gptq with rotated pairs": (GPTQ, with_part("m.theta", f32(4)), {"quant_method": "gptq"}, "'m.theta' of unknown"),
    "awq with rotated pairs": (AWQ, with_part("m.theta", f32(4)), {"quant_method": "awq"}, "'m.theta' of unknown"),
    "awq with an index": (AWQ, with_part("m.g_idx", i32(32)), {"quant_method": "awq"}, "'m.g_idx' of unknown"),
    "awq by output": (
        AWQ,
        with_part("m.scales", stored("F16", np.ones((4, 24)))),
        {"quant_method": "awq"},
        "fit neither GPTQ nor AWQ",
    ),
    "packed of other bits": (
        PACKED,
        no_change,
        {"config_groups": {"g": {"weights": WEIGHTS | {"num_bits": 8}}}},
        "are 4 bits, config.json says 8",
    ),
    "packed of other groups": (
        PACKED,
        no_change,
        {"config_groups": {"g": {"weights": WEIGHTS | {"group_size": 16}}}},
        "4 groups for 32 columns where config.json says group size 16",
    ),
    "packed that lost its zero points": (
        PACKED,
        no_change,
        {"config_groups": {"g": {"weights": WEIGHTS | {"symmetric": False}}}},
        "it has no zero point",
    ),
    "packed with zero points of another shape": (
        PACKED,
        with_part("m.weight_zero_point", i32(4, 16)),
        {},
        "zero point is I32 [4, 16]",
    ),
    "packed with a global scale": (PACKED, with_part("m.weight_global_scale", f32(1)), {}, "of unknown meaning"),
    "gptq of groups that the shapes leave open": (
        gptq(rng(), (16, 40), 16, 4, has_index=False),
        no_change,
        {"quant_method": "gptq"},
        "40 columns in 3 groups leave the group size open",
    ),
    "int8 that lost its zero points": (
        scaled(rng(), (9, 12), (9, 1), "per channel", dtype="I8"),
        no_change,
        {"config_groups": {"g": {"weights": {"num_bits": 8, "symmetric": False}}}},
        "it has no zero point",
    ),
    "int8 with zero points of another shape": (
        scaled(rng(), (9, 12), (9, 1), "per channel", dtype="I8"),
        with_part("m.weight_zero_point", stored("I8", np.zeros(9))),
        {},
        "zero point is I8 [9], expected I8 [9, 1]",
    ),
    "int8 with zero points that are floats": (
        scaled(rng(), (9, 12), (9, 1), "per channel", dtype="I8"),
        with_part("m.weight_zero_point", f32(9, 1)),
        {},
        "zero point is F32 [9, 1], expected I8 [9, 1]",
    ),
    "fp8 of other blocks": (
        fp8_block(rng(), (12, 20), (4, 4)),
        no_change,
        {"weight_block_size": [8, 8]},
        "block of 8x8",
    ),
    "fp8 of blocks that are none": (
        fp8_block(rng(), (12, 20), (4, 4)),
        no_change,
        {"weight_block_size": [0, "x"]},
        "block size [0, 'x']",
    ),
}


@pytest.mark.parametrize("kind", CONTRADICTIONS)
def test_files_and_configuration_that_contradict_each_other_are_refused(kind: str, tmp_path: Path) -> None:
    case, change, section, text = CONTRADICTIONS[kind]
    tensor = read_case(replace(change(case), config=config_of(**section)), tmp_path)
    with refused("'m.weight'", text, "bf16 checkpoint", error=CheckpointError):
        tensor.rows(0, 1)


def test_control_the_same_tensors_are_read_where_nothing_contradicts(tmp_path: Path) -> None:
    for i, case in enumerate((GPTQ, AWQ, PACKED, fp8_block(rng(), (12, 20), (4, 4)))):
        directory = tmp_path / str(i)
        directory.mkdir()
        check_case(case, directory)


def test_overrides_for_single_modules_are_not_a_contradiction(tmp_path: Path) -> None:
    section: Any = {"quant_method": "gptq", "bits": 8, "group_size": 64, "dynamic": {"m": {"bits": 4, "group_size": 8}}}
    check_case(replace(GPTQ, config=config_of(**section)), tmp_path)


@pytest.mark.parametrize("group", [8, None])
def test_schemes_of_several_kinds_are_no_contradiction(group: int | None, tmp_path: Path) -> None:
    schemes = [
        {"num_bits": 4, "strategy": "group", "group_size": 8, "symmetric": True},
        {"num_bits": 4, "strategy": "channel", "group_size": None, "symmetric": True},
        {"num_bits": 8, "strategy": "block", "block_structure": [128, 128], "type": "float"},
    ]
    groups = {f"group_{i}": {"weights": scheme, "targets": ["Linear"]} for i, scheme in enumerate(schemes)}
    check_case(replace(packed(rng(), (16, 32), group, 4), config=config_of(config_groups=groups)), tmp_path)


def test_the_section_may_lie_in_the_text_part_of_the_configuration(tmp_path: Path) -> None:
    check_case(replace(GPTQ, config={"text_config": GPTQ.config}), tmp_path)
