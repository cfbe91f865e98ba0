"""Bundles: complete or not at all, and every change noticed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mtp_engines import bundle as bundle_module
from mtp_engines.bundle import BACKBONE, MANIFEST_FILE, WEIGHTS, mtp_graph, open_bundle, refuse_foreign, staging
from mtp_engines.errors import BuildError, BundleError
from tests.fixtures.checkpoints import markov_checkpoint, random_checkpoint
from tests.support import build_bundle, ids_of, leftovers


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bundle")
    return build_bundle(markov_checkpoint(folder / "checkpoint", target=lambda t: (t + 1) % 64), folder / "good")


def edit(path: Path, change: Callable[[dict], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def test_control_an_untouched_copy_opens_and_runs_from_anywhere(good: Path, tmp_path: Path) -> None:
    moved = tmp_path / "elsewhere"
    shutil.copytree(good, moved)
    assert open_bundle(moved, thorough=True).manifest.name == "good"
    assert ids_of(moved, [5], 4) == [6, 7, 8, 9]


@pytest.mark.parametrize("name", [BACKBONE, mtp_graph(0), WEIGHTS, "config.json"])
@pytest.mark.parametrize("damage", ["deleted", "truncated", "changed"])
def test_a_damaged_file_is_refused_by_name(good: Path, tmp_path: Path, name: str, damage: str) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    content = bytearray((copy / name).read_bytes())
    if damage == "deleted":
        (copy / name).unlink()
    elif damage == "truncated":
        (copy / name).write_bytes(content[:-7])
    else:
        content[len(content) // 2] ^= 1
        (copy / name).write_bytes(content)
    with pytest.raises(BundleError, match=name.replace(".", r"\.")):
        open_bundle(copy)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda m: m.update(schema_version=99), "schema version 99, this release reads 4"),
        (lambda m: m.update(surprise=1), "surprise"),
        (lambda m: m.pop("limits"), "limits"),
        (lambda m: m["versions"].update(onnxruntime="99.1.0"), "built with ONNX Runtime 99.1.0"),
        (lambda m: m["files"].pop(WEIGHTS), WEIGHTS),
    ],
)
def test_a_manifest_from_elsewhere_is_refused(
    good: Path, tmp_path: Path, change: Callable[[dict], None], expected: str
) -> None:
    from mtp_runtime import load

    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    edit(copy / MANIFEST_FILE, change)
    with pytest.raises(BundleError, match=expected):
        load(copy)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (
            lambda whole: whole[: len(whole) // 2],
            "manifest.json is not valid JSON .EOF while parsing .*, as if it was cut",
        ),
        (lambda whole: b"", "manifest.json is not valid JSON .EOF while parsing .*copy the bundle again"),
        (lambda whole: b"\xff\xfe", "manifest.json is not valid JSON"),
        (lambda whole: b"[]", "manifest.json holds no JSON object, so it is no manifest; build the bundle again"),
    ],
)
def test_half_a_manifest_is_refused_in_a_sentence(
    good: Path, tmp_path: Path, content: Callable[[bytes], bytes], expected: str
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    (copy / MANIFEST_FILE).write_bytes(content((copy / MANIFEST_FILE).read_bytes()))
    with pytest.raises(BundleError, match=expected):
        open_bundle(copy)


def test_large_files_are_sampled_when_opened_and_read_whole_when_verified(
    good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    content = bytearray((copy / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (copy / WEIGHTS).write_bytes(content)
    monkeypatch.setattr(bundle_module, "_SMALL", 0)
    with pytest.raises(BundleError, match="digest differs"):
        open_bundle(copy)
    # A change that no sample meets: only the whole file tells.
    honest = bundle_module._sample
    monkeypatch.setattr(bundle_module, "_sample", lambda path: honest(good / path.relative_to(copy)))
    open_bundle(copy)
    with pytest.raises(BundleError, match="digest differs"):
        open_bundle(copy, thorough=True)


def test_samples_reach_both_ends_of_a_large_file(tmp_path: Path) -> None:
    file = tmp_path / "large"
    content = bytearray(8 << 20)
    file.write_bytes(content)
    before = bundle_module._sample(file)
    for place in (0, len(content) - 1):
        content[place] = 1
        file.write_bytes(content)
        assert bundle_module._sample(file) != before
        content[place] = 0


def test_leftovers_of_a_dead_build_are_removed_and_those_of_a_running_one_are_kept(tmp_path: Path) -> None:
    out = tmp_path / "Qwen3.5-0.8B"
    with subprocess.Popen(["true"]) as process:
        process.wait()
    dead, running = (tmp_path / f".{out.name}.{pid}.abc.partial" for pid in (process.pid, os.getpid()))
    for directory in (dead, running):
        directory.mkdir()
    with staging(out):
        assert not dead.exists()
        assert running.exists()


def test_a_directory_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is no bundle"):
        open_bundle(tmp_path)


def test_a_build_does_not_write_over_something_else(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(BuildError, match="exists and is no bundle"):
        refuse_foreign(tmp_path)
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_building_again_does_not_remove_files_that_are_not_the_bundles(good: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(good, copy)
    refuse_foreign(copy)
    (copy / "notes.txt").write_text("mine")
    with pytest.raises(BuildError, match=r"also holds notes\.txt"):
        refuse_foreign(copy)


@pytest.mark.parametrize("exchange", [True, False])
def test_two_directories_change_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchange: bool) -> None:
    if not exchange:

        class NoExchange:
            @staticmethod
            def renameat2(*arguments: object) -> int:
                return -1

        monkeypatch.setattr(bundle_module.ctypes, "CDLL", lambda *_, **__: NoExchange)
    a, b = tmp_path / ".b.1.x.partial", tmp_path / "b"
    for directory in (a, b):
        directory.mkdir()
        (directory / directory.name).write_text("")
    bundle_module._exchange(a, b)
    assert [path.name for path in b.iterdir()] == [a.name]
    assert [path.name for path in a.iterdir()] == ["b"]
    assert sorted(tmp_path.iterdir()) == [a, b]


def test_what_is_no_bundle_is_told_apart(tmp_path: Path, good: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "config.json").write_text("{}")
    cases = {"missing": "does not exist", "file": "is a file", "checkpoint": "but a checkpoint"}
    for name, expected in cases.items():
        with pytest.raises(BundleError, match=expected):
            open_bundle(tmp_path / name)
    (tmp_path / "several").mkdir()
    (tmp_path / "several" / "one").symlink_to(good)
    with pytest.raises(BundleError, match="holds 1: one"):
        open_bundle(tmp_path / "several")


def test_the_staging_directory_of_a_build_is_not_offered_as_a_bundle(good: Path, tmp_path: Path) -> None:
    for name in ("one", ".two.123.abc.partial"):
        shutil.copytree(good, tmp_path / name)
    assert bundle_module.bundles_in(tmp_path) == [tmp_path / "one"]


def test_a_link_to_a_bundle_stays_a_link(good: Path, tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "disk" / "bundle")
    build_bundle(good.parent / "checkpoint", tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert ids_of(tmp_path / "link", [5], 2) == [6, 7]
    build_bundle(good.parent / "checkpoint", tmp_path / "link", draft_tokens=2)
    assert (tmp_path / "link").is_symlink()


def test_one_changed_byte_anywhere_is_another_checkpoint(tmp_path: Path) -> None:
    """EN-03: every byte of the tensors counts, and every small file that a bundle takes over."""
    checkpoint, out = random_checkpoint(tmp_path / "model", seed=1, vocab_size=30000), tmp_path / "out"
    build_bundle(checkpoint, out)
    first = open_bundle(out).manifest.source_digest
    file = checkpoint / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 + 1234] ^= 1
    file.write_bytes(content)
    build_bundle(checkpoint, out)
    second = open_bundle(out).manifest.source_digest
    (checkpoint / "chat_template.jinja").write_text("{{ messages }}")
    build_bundle(checkpoint, out)
    assert (out / "chat_template.jinja").is_file()
    assert len({first, second, open_bundle(out).manifest.source_digest}) == 3


def test_a_failed_build_leaves_the_old_bundle_and_nothing_else(good: Path, tmp_path: Path) -> None:
    out = tmp_path / "bundle"
    shutil.copytree(good, out)
    with pytest.raises(RuntimeError, match="fault"):
        _fail_while_staging(out)
    assert open_bundle(out, thorough=True)
    assert leftovers(out) == ["bundle"]


def test_a_build_killed_at_any_moment_leaves_the_old_bundle_or_the_new_one(tmp_path: Path) -> None:
    """EN-05: SIGKILL while building over a good bundle, then a build that succeeds and cleans up."""
    out = tmp_path / "bundle"
    build_bundle(markov_checkpoint(tmp_path / "one", target=lambda t: (t + 1) % 64), out)
    other = random_checkpoint(tmp_path / "two", seed=1, vocab_size=9000)
    script = (
        "import sys; from pathlib import Path; from mtp_exporter import BuildOptions, build; "
        "print('ready', flush=True); "
        "build(BuildOptions(sys.argv[1], Path(sys.argv[2]), max_model_len=64))"
    )
    for delay in (0.0, 0.05, 0.1, 0.2, 0.4):
        process = subprocess.Popen([sys.executable, "-c", script, other, out], stdout=subprocess.PIPE)
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert open_bundle(out, thorough=True).manifest.model.vocab_size in (64, 9000)
        ids_of(out, [5], 2)
    build_bundle(other, out)
    assert leftovers(out) == ["bundle"]
    assert open_bundle(out).manifest.model.vocab_size == 9000


def test_the_same_input_is_reused_and_another_one_is_not(tmp_path: Path) -> None:
    """EN-03: the weights, not the name or the time of a file, decide."""
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "bundle"
    notes: list[str] = []
    markov_checkpoint(checkpoint, target=lambda t: (t + 1) % 64)
    build_bundle(checkpoint, out)
    build_bundle(checkpoint, out, notes=notes)
    assert any("used as it is" in note for note in notes)
    assert ids_of(out, [5], 3) == [6, 7, 8]
    shutil.rmtree(checkpoint)
    markov_checkpoint(checkpoint, target=lambda t: (t + 5) % 64)
    build_bundle(checkpoint, out)
    assert ids_of(out, [5], 3) == [10, 15, 20]
    build_bundle(checkpoint, out, draft_tokens=2)
    assert open_bundle(out).manifest.limits.max_draft_tokens == 2


def _fail_while_staging(out: Path) -> None:
    with staging(out) as directory:
        (directory / "half").write_bytes(b"x")
        raise RuntimeError("fault")
