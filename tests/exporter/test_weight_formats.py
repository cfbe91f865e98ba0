"""Bundles with matrices of integers: still exact, measured, and no larger than they say."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from mtp_engines.backends import EngineOptions
from mtp_engines.backends.onnxruntime_cpu.engine import CpuEngine
from mtp_engines.bundle import WEIGHTS, open_bundle
from mtp_engines.contracts.manifest import Manifest, WeightFormats
from mtp_engines.errors import BuildError
from mtp_engines.kernels.library import CHOICE, why_missing
from mtp_engines.kernels.packing import PackedMatrices
from mtp_engines.lowering import blocks, own_kernels, products
from mtp_engines.lowering.products import Matrix
from mtp_exporter import BuildOptions, build
from mtp_exporter.families.description import Need
from mtp_exporter.storing import weights
from mtp_exporter.storing.formats import format_of
from mtp_plugins.graph import GraphBuilder
from mtp_runtime import load
from mtp_tools.verify.checks import checks
from tests.support import build_refused, refused, run_command

CARRIED = Path(__file__).resolve().parents[2] / "checkpoints" / "tiny-mtp"
FORMATS = [
    WeightFormats("int8", "int8", "int8"),
    WeightFormats("int4", "int4", "int4"),
    WeightFormats("int4", "fp32", "int8"),
]


def built(out: Path, formats: WeightFormats) -> Manifest:
    """The carried checkpoint in these formats."""
    names = {"weights": formats.target, "mtp_weights": formats.mtp, "head_weights": formats.head}
    return build(BuildOptions(str(CARRIED), out, max_model_len=96, draft_tokens=3, **names)).manifest


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[WeightFormats, Path]:
    place = tmp_path_factory.mktemp("formats")
    paths = {formats: place / str(number) for number, formats in enumerate([WeightFormats(), *FORMATS])}
    for formats, path in paths.items():
        built(path, formats)
    return paths


@pytest.mark.parametrize("kernels", ["own", "onnxruntime"])
@pytest.mark.parametrize("formats", [WeightFormats(), *FORMATS], ids=str)
def test_speculation_changes_nothing_in_any_format(
    bundles: dict[WeightFormats, Path], formats: WeightFormats, kernels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels == "own" and why_missing() is not None:
        pytest.skip(f"there are no kernels: {why_missing()}")
    monkeypatch.setenv(CHOICE, kernels)
    model = load(bundles[formats], threads=1)
    assert isinstance(model.engine, CpuEngine)
    assert model.engine.kernels.partition(",")[0] == kernels
    assert model.manifest.numerics.promise == "exact"
    failed = [line.text for line in checks(model, 12, 24) if not line.holds]
    assert failed == []


@pytest.mark.parametrize("formats", FORMATS, ids=str)
def test_what_rounding_costs_is_measured_and_kept(bundles: dict[WeightFormats, Path], formats: WeightFormats) -> None:
    quality = open_bundle(bundles[formats]).manifest.quality
    assert quality is not None
    assert 0.85 * quality.rows < quality.agreed <= quality.rows
    assert 0.9 < quality.perplexity / quality.perplexity_fp32 < 1.15


def test_whole_weights_have_no_quality_to_measure(bundles: dict[WeightFormats, Path]) -> None:
    assert open_bundle(bundles[WeightFormats()]).manifest.quality is None


def test_a_bundle_is_as_small_as_its_blocks(bundles: dict[WeightFormats, Path]) -> None:
    sizes = {formats: (path / WEIGHTS).stat().st_size for formats, path in bundles.items()}
    whole = sizes[WeightFormats()]
    # 8 bits of 32; 256 columns are five blocks of 64 4-bit integers and a scale: 5.6 of 32. Small tensors stay whole.
    assert sizes[FORMATS[0]] / whole == pytest.approx(8 / 32, rel=0.25)
    assert sizes[FORMATS[1]] / whole == pytest.approx(5.6 / 32, rel=0.3)
    assert sizes[FORMATS[1]] < sizes[FORMATS[2]] < sizes[FORMATS[0]] * 1.5


def test_a_gpu_backend_runs_the_weights_that_the_bundle_holds(bundles: dict[WeightFormats, Path]) -> None:
    """Its products are float32 here, so states differ by the rows that ONNX Runtime rounds: less than 4 bits do."""
    formats = FORMATS[1]
    ids = np.array([[5, 6, 7, 8, 9, 10]])
    torch = load(bundles[formats], options=EngineOptions(backend="torch", device="cpu")).engine.sequences()
    ours, whole = (load(bundles[f], threads=1).engine.sequences() for f in (formats, WeightFormats()))
    hidden = [sequences.verify(ids, 1).hidden.copy() for sequences in (torch, ours, whole)]
    near, far = (float(np.abs(hidden[0] - other).max()) for other in hidden[1:])
    assert 3 * near < far


def test_a_weight_file_with_several_links_is_read(bundles: dict[WeightFormats, Path], tmp_path: Path) -> None:
    """As deduplicating stores and snapshots make them."""
    os.link(bundles[FORMATS[1]] / WEIGHTS, tmp_path / "another name")
    try:
        assert load(bundles[FORMATS[1]], threads=1).engine.sequences().verify(np.array([[5, 6]]), 1).ids.shape == (1, 1)
    finally:
        (tmp_path / "another name").unlink()


def test_check_compares_with_the_rounded_weights(bundles: dict[WeightFormats, Path]) -> None:
    assert run_command("mtp-export", "check", str(CARRIED), str(bundles[FORMATS[1]])).returncode == 0


def test_the_same_formats_reuse_a_bundle_and_others_do_not(bundles: dict[WeightFormats, Path]) -> None:
    place = bundles[FORMATS[0]]
    before = (place / WEIGHTS).stat().st_ino
    built(place, FORMATS[0])
    assert (place / WEIGHTS).stat().st_ino == before
    built(place, WeightFormats("int8", "fp32", "int8"))
    assert (place / WEIGHTS).stat().st_ino != before
    built(place, FORMATS[0])


def test_matrices_that_decide_stay_whole() -> None:
    formats = FORMATS[1]
    assert format_of(formats, Need("layers.0.mlp.up", "up", (64, 64))) == "int4"
    assert format_of(formats, Need("mtp.layer.mlp.up", "up", (64, 64))) == "int4"
    for role in ("layers.0.mixer.a", "layers.0.mixer.b", "layers.0.mlp.router", "layers.0.mlp.shared_gate"):
        assert format_of(formats, Need(role, "x", (64, 64))) == "fp32"
    assert format_of(formats, Need("layers.0.mlp.up", "up", (64, 40))) == "fp32", "columns that are no multiple of 32"
    assert format_of(formats, Need("layers.0.input_norm", "norm", (64,))) == "fp32"
    assert format_of(WeightFormats("fp32", "fp32", "int8"), Need("embedding", "e", (64, 64))) == "int8"


Rounding = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def nibbles_swapped(blocks: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return blocks >> 4 | blocks << 4, scales


def scales_of_the_next_row(values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return values, np.roll(scales, 1)


def columns_of_a_run_in_another_order(values: np.ndarray, scales: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.roll(values, 1, axis=1), scales


@pytest.mark.parametrize(
    ("formats", "name", "fault"),
    [
        (FORMATS[1], "four_bits", nibbles_swapped),
        (FORMATS[0], "eight_bits", scales_of_the_next_row),
        (FORMATS[0], "eight_bits", columns_of_a_run_in_another_order),
    ],
    ids=["nibbles", "scales", "columns"],
)
def test_control_integers_that_are_written_wrong_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, formats: WeightFormats, name: str, fault: Callable[..., Any]
) -> None:
    right: Rounding = getattr(weights, name)
    monkeypatch.setattr(weights, name, lambda rows: fault(*right(rows)))
    with refused("disagree with a NumPy forward", error=BuildError):
        built(tmp_path / "b", formats)
    assert not (tmp_path / "b").exists()


def test_control_a_lone_row_of_four_bits_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where this processor's kernel rounds some rows otherwise, a build without a row beside them says so."""
    monkeypatch.setenv(CHOICE, "onnxruntime")
    monkeypatch.setattr(blocks, "ZERO_POINT", 8)
    monkeypatch.setattr(blocks, "rows_are_rounded_alike", lambda: True)
    numerics = built(tmp_path / "b", FORMATS[1]).numerics
    if numerics.promise == "exact":
        pytest.skip("this processor's kernel rounds one row like several")
    assert numerics.first_difference is not None


def test_control_products_of_ours_that_depend_on_the_rows_are_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = own_kernels.packed_product

    def wrong(g: GraphBuilder, x: ir.Value, matrix: Matrix, memory: PackedMatrices, axes: list[str]) -> ir.Value:
        rows = g.op("Cast", g.op("Shape", x, start=1, end=2), to=int(ir.DataType.FLOAT))
        little = g.op("Div", g.constant(1e-5, "float32"), rows)
        return g.op("Mul", right(g, x, matrix, memory, axes), g.op("Add", g.constant(1.0, "float32"), little))

    monkeypatch.setattr(products, "packed_product", wrong)
    if why_missing() is not None:
        pytest.skip(f"there are no kernels: {why_missing()}")
    monkeypatch.setenv(CHOICE, "own")
    assert built(tmp_path / "b", FORMATS[1]).numerics.promise == "near-tie"


@pytest.mark.parametrize("option", ["weights", "mtp_weights", "head_weights"])
def test_an_unknown_format_is_refused(tmp_path: Path, option: str) -> None:
    build_refused(CARRIED, tmp_path / "b", f"--{option.replace('_', '-')} int3", "fp32, int8, int4", **{option: "int3"})
