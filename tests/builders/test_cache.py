"""Engine directories: whole or absent, and taken again only for the very same build."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mtp_engines.builders.tensorrt import cache
from mtp_engines.builders.tensorrt.cache import default_directory, key_of, load_entry, publish_entry, refuse_foreign
from mtp_engines.builders.tensorrt.target import FLAVOURS, Target
from mtp_engines.bundle import Bundle, staging
from mtp_engines.contracts.engines import EngineFile, TensorSpec
from mtp_engines.errors import BuildError
from tests.support import refused

TARGET = Target(FLAVOURS["tensorrt-rtx"], "1.7.1.116", (8, 9))
ENGINES = tuple(
    EngineFile(
        graph=graph,
        file=f"{graph}.plan",
        backend="tensorrt-rtx",
        version="1.7.1.116",
        target="sm_89",
        precision="bf16",
        rows=(1, 4),
        inputs=(TensorSpec("x", "bfloat16", (-1, 4)),),
        outputs=(TensorSpec("y", "float32", (-1,)),),
    )
    for graph in ("backbone", "head")
)


def store(place: Path, key: str, content: bytes = b"plan") -> None:
    """Publish two engines at `place`."""
    with staging(place) as staged:
        for engine in ENGINES:
            (staged / engine.file).write_bytes(content + engine.graph.encode())
        publish_entry(staged, place, key, ENGINES)


def test_an_entry_is_found_by_its_key_alone_and_replaced_whole(tmp_path: Path) -> None:
    place = tmp_path / "engines" / "here"
    assert load_entry(place, "a") is None
    store(place, "a")
    assert load_entry(place, "a") == ENGINES
    assert load_entry(place, "b") is None
    store(place, "b", b"another")
    assert (load_entry(place, "a"), load_entry(place, "b")) == (None, ENGINES)
    assert (place / "head.plan").read_bytes() == b"anotherhead"
    assert [path.name for path in place.parent.iterdir()] == ["here"], "nothing stays beside it"


def _cut(place: Path) -> None:
    os.truncate(place / "head.plan", 3)


def _change(place: Path) -> None:
    (place / "head.plan").write_bytes(b"plan" + b"HEAD")


def _remove(place: Path) -> None:
    (place / "head.plan").unlink()


def _spoil_list(place: Path) -> None:
    (place / cache.ENTRY_FILE).write_text("{")


def _unknown_field(place: Path) -> None:
    path = place / cache.ENTRY_FILE
    path.write_text(json.dumps(json.loads(path.read_text()) | {"surplus": 1}))


@pytest.mark.parametrize("damage", [_cut, _change, _remove, _spoil_list, _unknown_field], ids=lambda f: f.__name__)
def test_a_damaged_entry_is_no_entry(tmp_path: Path, damage: object) -> None:
    store(tmp_path / "here", "a")
    assert load_entry(tmp_path / "here", "a") == ENGINES, "control: undamaged it is one"
    damage(tmp_path / "here")  # type: ignore[operator]
    assert load_entry(tmp_path / "here", "a") is None


def test_a_build_that_ends_early_leaves_nothing_or_what_was_there(tmp_path: Path) -> None:
    place = tmp_path / "here"

    def fail() -> None:
        with staging(place) as staged:
            (staged / "backbone.plan").write_bytes(b"half")
            assert not place.exists() or load_entry(place, "a") == ENGINES
            raise BuildError("The library refused it.")

    with refused("refused", error=BuildError):
        fail()
    assert list(tmp_path.iterdir()) == []
    store(place, "a")
    with refused("refused", error=BuildError):
        fail()
    assert load_entry(place, "a") == ENGINES


def test_foreign_directories_are_left_alone(tmp_path: Path) -> None:
    place = tmp_path / "mine"
    place.mkdir()
    refuse_foreign(place)  # Control: an empty one may be used.
    (place / "thesis.txt").write_text("the only copy")
    with refused("holds no engines", error=BuildError):
        refuse_foreign(place)
    with refused("holds no engines", error=BuildError):
        store(place, "a")
    assert (place / "thesis.txt").read_text() == "the only copy"


def test_the_key_knows_everything_that_an_engine_depends_on(carried: Bundle) -> None:
    manifest = carried.manifest
    weights = manifest.files["graphs/weights.data"]
    others = {
        "weights": replace(manifest, files=manifest.files | {"graphs/weights.data": replace(weights, sha256="0" * 64)}),
        "limits": replace(manifest, limits=replace(manifest.limits, max_batch_size=3)),
    }
    keys = {
        "itself": key_of(carried, TARGET, "bf16", (1, 4)),
        "precision": key_of(carried, TARGET, "fp16", (1, 4)),
        "rows": key_of(carried, TARGET, "bf16", (1, 5)),
        "version": key_of(carried, replace(TARGET, version="1.7.2"), "bf16", (1, 4)),
        "device": key_of(carried, replace(TARGET, capability=(12, 0)), "bf16", (1, 4)),
        "backend": key_of(carried, replace(TARGET, flavour=FLAVOURS["tensorrt"]), "bf16", (1, 4)),
    } | {name: key_of(replace(carried, manifest=other), TARGET, "bf16", (1, 4)) for name, other in others.items()}
    assert len(set(keys.values())) == len(keys)
    other_tokenizer = replace(manifest, files=manifest.files | {"tokenizer.json": replace(weights, sha256="1" * 64)})
    same = replace(carried, manifest=other_tokenizer)
    assert key_of(same, TARGET, "bf16", (1, 4)) == keys["itself"], "control: a tokenizer changes no engine"


def test_engines_lie_in_the_bundle_unless_told_otherwise(carried: Bundle) -> None:
    place = default_directory(carried, TARGET, "bf16")
    assert place == carried.directory / "engines" / "tensorrt-rtx-1.7.1.116-sm_89-bf16"
