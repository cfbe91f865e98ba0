"""The folder that keeps compiled kernels."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mtp_plugins.triton_kernels import cache
from mtp_plugins.triton_kernels.ptx import Ptx
from tests.plugins.ptx_cases import accepting, changed_source_in_worker, compiled, digest_in_worker
from tests.plugins.workers import Worker


def test_a_result_is_kept_and_taken_from_the_folder(compiler: Worker, tmp_path: Path) -> None:
    first = compiled(compiler, accepting(), folder=tmp_path / "ptx")
    (path,) = (tmp_path / "ptx").iterdir()
    assert re.fullmatch(r"accept\.sm_90\.[0-9a-f]{32}\.json", path.name)
    assert compiled(compiler, accepting(), folder=tmp_path / "ptx") == first
    stored = json.loads(path.read_text())
    # The name has the first half of the key; an entry that someone signed for another key is not taken.
    cache.store(path, "another key", stored["fields"] | {"shared": 12345})
    assert compiled(compiler, accepting(), folder=tmp_path / "ptx") == first
    assert json.loads(path.read_text()) == stored


def test_the_folder_is_really_read(compiler: Worker, tmp_path: Path) -> None:
    first = compiled(compiler, accepting(), folder=tmp_path)
    (path,) = tmp_path.iterdir()
    key = compiler.call(digest_in_worker, accepting(), 90)
    marked = {"entry": "accept", "text": "marked", "shared": 1, "version": "8.7", "target": "sm_90a"}
    cache.store(path, key, marked)
    assert compiled(compiler, accepting(), folder=tmp_path) == Ptx(**marked) != first


@pytest.mark.parametrize("damage", ["", "{}", "[]", "null", "cut", "changed", "not utf-8"])
def test_a_damaged_entry_is_made_again(compiler: Worker, tmp_path: Path, damage: str) -> None:
    first = compiled(compiler, accepting(), folder=tmp_path)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    damaged = {"cut": whole[:-20], "changed": whole.replace(b"ld.global", b"ld.local", 1), "not utf-8": b"\xff\xfe"}
    path.write_bytes(damaged.get(damage, damage.encode()))
    assert path.read_bytes() != whole
    assert compiled(compiler, accepting(), folder=tmp_path) == first
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path], "nothing half-written stays"


CHANGES: list[dict[str, Any]] = [{"num_warps": 2}, {"num_stages": 2}, {"constexprs": {"block": 32}}]


def test_whatever_the_text_depends_on_changes_the_key(compiler: Worker) -> None:
    case = accepting()
    key = compiler.call(digest_in_worker, case, 90)
    assert compiler.call(digest_in_worker, accepting(), 90) == key
    types = dict(case.signature) | {"next_token_ptr": "*i32"}
    others = [
        compiler.call(digest_in_worker, case, 89),
        *(
            compiler.call(digest_in_worker, replace(case, launch=replace(case.launch, **change)), 90)
            for change in CHANGES
        ),
        compiler.call(digest_in_worker, replace(case, signature=types), 90),
        compiler.call(changed_source_in_worker, case, 90),
    ]
    assert len({key, *others}) == 1 + len(others)
    another = replace(case.launch, scalars={"draft_tokens": 9}, grid=(7, 1, 1))
    assert compiler.call(digest_in_worker, replace(case, launch=another), 90) == key, "what the text does not depend on"
