"""Quantised checkpoints built whole: the bundle is that of the floats they encode, to the last value (LD-27)."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mtp_engines.bundle import WEIGHTS
from mtp_exporter.inspecting.inspect import inspect_checkpoint
from tests.fixtures.checkpoints import drop_tensors, edit_config, edit_tensor, markov_checkpoint, read_tensors
from tests.fixtures.quantised import Case, Stored, awq, fp8_block, gptq, packed, scaled, stored, write
from tests.support import build_bundle, build_refused, copy_of, ids_of

Maker = Callable[[np.random.Generator, tuple[int, int]], Case]


def finite(case: Case) -> Case:
    """The case with a zero wherever its random bits are no number, which a build refuses."""
    name, numbers = next((name, part) for name, part in case.tensors.items() if part.dtype.startswith("F8"))
    bits = np.frombuffer(numbers.data, np.uint8).reshape(case.values.shape)
    absent = ~np.isfinite(case.values)
    assert absent.any()
    kept = replace(numbers, data=np.where(absent, 0, bits).astype(np.uint8).tobytes())
    return replace(case, tensors={**case.tensors, name: kept}, values=np.where(absent, 0, case.values))


METHODS: dict[str, Maker] = {
    "fp8 by blocks": lambda rng, shape: finite(fp8_block(rng, shape, (48, 32))),
    "fp8 by channel": lambda rng, shape: finite(scaled(rng, shape, (shape[0], 1), "channel")),
    "int8 by channel": lambda rng, shape: scaled(rng, shape, (shape[0], 1), "channel", dtype="I8"),
    "compressed-tensors 4-bit": lambda rng, shape: packed(rng, shape, 32, 4, zero_points="packed"),
    "GPTQ 4-bit": lambda rng, shape: gptq(rng, shape, 32, 4, is_reordered=True),
    "AWQ 4-bit": lambda rng, shape: awq(rng, shape, 32),
}
PROMPT = [5, 6, 7]


def in_trunk(name: str) -> bool:
    return name.endswith("up_proj.weight") and not name.startswith("mtp.")


def in_head(name: str) -> bool:
    return name.endswith("up_proj.weight") and name.startswith("mtp.")


def quantise(plain: Path, where: Path, make: Maker, chosen: Callable[[str], bool]) -> tuple[Path, Path]:
    """Two copies of a checkpoint: with the chosen matrices quantised, and with the floats that they stand for."""
    packed_copy, float_copy = copy_of(plain, where / "packed"), copy_of(plain, where / "floats")
    tensors: dict[str, Stored] = {}
    config: dict[str, object] = {}
    for index, (name, array) in enumerate(read_tensors(plain).items()):
        if not chosen(name):
            tensors[name] = stored("F32", np.asarray(array, np.float32))
            continue
        case = make(np.random.default_rng(index), array.shape)
        module = name.removesuffix(".weight")
        tensors |= {part.replace("m.", f"{module}.", 1): value for part, value in case.tensors.items()}
        config |= case.config
        edit_tensor(float_copy, name, lambda _, case=case: case.values.astype(np.float32))
    write(packed_copy / "model.safetensors", tensors)
    section = config.get("quantization_config", config)
    edit_config(packed_copy, lambda found: {**found, "quantization_config": section})
    return packed_copy, float_copy


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markov_checkpoint(tmp_path_factory.mktemp("plain") / "model", noise=0.05)


def weights(bundle: Path) -> list[float]:
    """Every value of the weight file."""
    values: list[float] = np.fromfile(bundle / WEIGHTS, np.float32).tolist()
    return values


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("chosen", [in_trunk, in_head], ids=["trunk", "head"])
def test_a_quantised_part_is_built_as_the_floats_that_it_encodes(
    plain: Path, tmp_path: Path, method: str, chosen: Callable[[str], bool]
) -> None:
    quantised, floats = quantise(plain, tmp_path, METHODS[method], chosen)
    built, expected = build_bundle(quantised, tmp_path / "out"), build_bundle(floats, tmp_path / "expected")
    assert weights(built) == weights(expected)
    assert weights(built) != weights(build_bundle(plain, tmp_path / "plain")), "control: the values differ"
    assert [ids_of(built, PROMPT, 12, k) for k in (0, 3)] == [ids_of(expected, PROMPT, 12)] * 2
    report = inspect_checkpoint(quantised)
    assert report["can_build"]
    groups = {group for group, kinds in report["dtypes"].items() if any(name != "F32" for name in kinds)}
    assert groups == {"mtp" if chosen is in_head else "mlp"}


def test_an_ignore_list_that_lies_changes_nothing(plain: Path, tmp_path: Path) -> None:
    quantised, floats = quantise(plain, tmp_path, METHODS["fp8 by blocks"], in_trunk)
    lie = {"modules_to_not_convert": ["up_proj"], "ignore": ["re:.*up_proj"]}
    edit_config(quantised, lambda config: {**config, "quantization_config": config["quantization_config"] | lie})
    assert weights(build_bundle(quantised, tmp_path / "out")) == weights(build_bundle(floats, tmp_path / "expected"))


def test_a_method_that_cannot_be_read_is_refused_by_tensor_and_only_where_it_is_used(
    plain: Path, tmp_path: Path
) -> None:
    checkpoint = copy_of(plain, tmp_path / "model")
    name = "mtp.layers.0.mlp.up_proj.weight"
    bare = {key: stored("F32", np.asarray(array, np.float32)) for key, array in read_tensors(checkpoint).items()}
    shape = bare[name].shape
    write(checkpoint / "model.safetensors", bare | {name: stored("F8_E4M3", np.zeros(shape, np.uint8))})
    build_refused(checkpoint, tmp_path / "out", f"{name!r}", "fp8", "bf16 checkpoint")
    assert len(ids_of(build_bundle(checkpoint, tmp_path / "plain", mtp=False), PROMPT, 3)) == 3


def test_parts_of_a_quantised_tensor_in_a_missing_shard_are_missed(plain: Path, tmp_path: Path) -> None:
    """Without its scales it would be unreadable, without its zero points wrong."""
    quantised, _ = quantise(plain, tmp_path, METHODS["compressed-tensors 4-bit"], in_head)
    tensors = dict.fromkeys(_names(quantised), "model.safetensors")
    lost = "mtp.layers.0.mlp.up_proj.weight_zero_point"
    drop_tensors(quantised, lambda name: name == lost)
    index = {"weight_map": tensors | {lost: "lost.safetensors"}}
    (quantised / "model.safetensors.index.json").write_text(json.dumps(index))
    build_refused(quantised, tmp_path / "out", "lost.safetensors is missing")


def _names(checkpoint: Path) -> list[str]:
    with (checkpoint / "model.safetensors").open("rb") as stream:
        header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
    return [name for name in header if name != "__metadata__"]
