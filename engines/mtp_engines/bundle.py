"""The bundle directory: written aside and renamed when complete, checked when opened."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from mtp_engines.contracts.manifest import MANIFEST, SCHEMA_VERSION, FileEntry, Manifest
from mtp_engines.errors import BuildError, BundleError

MANIFEST_FILE = "manifest.json"
GRAPHS = "graphs"
BACKBONE = f"{GRAPHS}/backbone.onnx"
WEIGHTS = f"{GRAPHS}/weights.data"
ENGINES = "engines"
"""What backends build from the graphs; each directory in it has a list of its own."""
MEASURED = "measured"
"""What a machine measured of the bundle to run it better; may be removed at any time."""
_SUFFIX = ".partial"
_NEW_MANIFEST = f".{MANIFEST_FILE}{_SUFFIX}"
_SMALL = 64 << 20
_BLOCK = 1 << 20
_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
"""Arguments of Linux's renameat2."""


@dataclass(frozen=True)
class Bundle:
    """An opened bundle: its directory and its checked manifest."""

    directory: Path
    manifest: Manifest

    @property
    def backbone(self) -> Path:
        return self.directory / BACKBONE

    @property
    def mtp(self) -> tuple[Path, ...]:
        """The graph of every trained depth of the draft head."""
        head = self.manifest.model.mtp
        return tuple(self.directory / mtp_graph(depth) for depth in range(head.depth if head else 0))


def mtp_graph(depth: int) -> str:
    """File of one trained depth of the draft head."""
    return f"{GRAPHS}/mtp.{depth}.onnx" if depth else f"{GRAPHS}/mtp.onnx"


@contextlib.contextmanager
def staging(out: Path) -> Iterator[Path]:
    """A directory beside `out` that is removed unless `publish` took it.

    Leftovers of builds that were killed are removed first.

    Raises:
        BuildError: the place cannot be written.
    """
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        _clean_up(out)
        directory = Path(tempfile.mkdtemp(prefix=f".{out.name}.{os.getpid()}.", suffix=_SUFFIX, dir=out.parent))
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path.
        raise BuildError(f"{out.parent} cannot be written: {error}. Choose another --out.") from error
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def publish(
    directory: Path, out: Path, manifest: Manifest, advance: Callable[[int], None] = lambda size: None
) -> Manifest:
    """Hash every file of a staged directory, write the manifest last and move it to `out`.

    A bundle that stood at `out` is replaced; anything else there is left alone.

    Raises:
        BuildError: `out` holds something that is no bundle.
    """
    refuse_foreign(out)
    files = {
        path.relative_to(directory).as_posix(): entry_of(path, advance)
        for path in sorted(directory.rglob("*"))
        if path.is_file()
    }
    complete = replace(manifest, files=files)
    directory.chmod(0o755)
    (directory / MANIFEST_FILE).write_bytes(MANIFEST.dump_json(complete, indent=1) + b"\n")
    for path in (*directory.rglob("*"), directory):
        _sync(path)
    if out.exists():
        _exchange(directory, out)
        # What was staged stands at `out` now; what stood there is removed with the staging directory.
    else:
        directory.rename(out)
    return complete


def rewrite_manifest(bundle: Bundle, manifest: Manifest) -> Bundle:
    """Give a bundle another manifest for the same files, in one step."""
    aside = bundle.directory / _NEW_MANIFEST
    aside.write_bytes(MANIFEST.dump_json(manifest, indent=1) + b"\n")
    _sync(aside)
    aside.rename(bundle.directory / MANIFEST_FILE)
    _sync(bundle.directory)
    return Bundle(bundle.directory, manifest)


def _exchange(a: Path, b: Path) -> None:
    """Let two directories change places; in one step where the file system can, so that a kill leaves one at `b`."""
    library = ctypes.CDLL(None, use_errno=True)
    if library.renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return
    aside = a.with_name(a.name.removesuffix(_SUFFIX) + f"old{_SUFFIX}")
    b.rename(aside)
    try:
        a.rename(b)
    except OSError:
        aside.rename(b)
        raise
    aside.rename(a)


def refuse_foreign(out: Path) -> None:
    """Refuse to build over something that is not a bundle.

    Raises:
        BuildError: `out` is a file, or a directory with other content.
    """
    if not out.exists():
        return
    if not out.is_dir() or (any(out.iterdir()) and not (out / MANIFEST_FILE).is_file()):
        raise BuildError(f"{out} exists and is no bundle; choose another --out.")
    if foreign := _foreign_files(out):
        raise BuildError(
            f"{out} is a bundle that also holds {foreign[0]}, which building it again would remove. Move that away, or "
            "choose another --out."
        )


def _foreign_files(out: Path) -> list[str]:
    """Files in a bundle's directory that its manifest does not list; none if the manifest cannot be read."""
    if not (out / MANIFEST_FILE).is_file():
        return []
    try:
        # The second name is what a kill leaves of `rewrite_manifest`.
        known = {MANIFEST_FILE, _NEW_MANIFEST, *_read_manifest(out / MANIFEST_FILE).files}
    except BundleError:
        return []
    found = (path.relative_to(out).as_posix() for path in sorted(out.rglob("*")) if path.is_file())
    return [name for name in found if name not in known and not name.startswith((f"{ENGINES}/", f"{MEASURED}/"))]


def open_bundle(directory: Path, *, thorough: bool = False) -> Bundle:
    """Read and check a bundle.

    Args:
        directory: the bundle.
        thorough: read every byte of large files too; otherwise their size and samples are compared.

    Raises:
        BundleError: not a bundle, another schema, or a file that is missing, cut short or changed.
    """
    path = directory / MANIFEST_FILE
    if not path.is_file():
        raise BundleError(_no_bundle(directory))
    manifest = _read_manifest(path)
    for name, entry in manifest.files.items():
        _check_file(directory / name, entry, thorough)
    depths = manifest.model.mtp.depth if manifest.model.mtp else 0
    for name in (BACKBONE, WEIGHTS, *(mtp_graph(depth) for depth in range(depths))):
        if name not in manifest.files:
            raise BundleError(f"{path} does not list {name}, which every bundle has. Build the bundle again.")
    return Bundle(directory, manifest)


def _no_bundle(directory: Path) -> str:
    if not directory.exists():
        return f"{directory} does not exist; give the directory of a bundle, or build one with `mtp-export build`."
    if not directory.is_dir():
        return f"{directory} is a file; give the directory of a bundle."
    if (directory / "config.json").is_file():
        return (
            f"{directory} is no bundle but a checkpoint: it has no {MANIFEST_FILE}. Build it first with "
            f"`mtp-export build --model {directory}`."
        )
    inside = bundles_in(directory)
    if inside:
        names = ", ".join(path.name for path in inside)
        return f"{directory} is no bundle but holds {len(inside)}: {names}. Give one of them."
    return f"{directory} is no bundle: it has no {MANIFEST_FILE}. Give the directory that `mtp-export build` wrote."


def bundles_in(directory: Path) -> list[Path]:
    """Bundles directly below a directory, by name; staging directories of builds are hidden and do not count."""
    found = (path.parent for path in directory.glob(f"*/{MANIFEST_FILE}"))
    return sorted(path for path in found if not path.name.startswith("."))


def entry_of(path: Path, advance: Callable[[int], None] = lambda size: None) -> FileEntry:
    """Size and digests of a file; `advance` is told of the bytes just read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
            advance(len(block))
    return FileEntry(path.stat().st_size, digest.hexdigest(), _sample(path))


def _read_manifest(path: Path) -> Manifest:
    content = path.read_bytes()
    # The version comes first: a manifest of another one has other fields.
    version = _schema_version(content)
    if version is not None and version != SCHEMA_VERSION:
        raise BundleError(
            f"{path} has schema version {version}, this release reads {SCHEMA_VERSION}. Build the bundle again with "
            "this release."
        )
    try:
        manifest: Manifest = MANIFEST.validate_json(content)
    except ValidationError as error:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            raise BundleError(
                f"{path} is not valid JSON ({first['ctx']['error']}), as if it was cut off; copy the bundle again, or "
                "build it again."
            ) from error
        if not first["loc"]:
            raise BundleError(f"{path} holds no JSON object, so it is no manifest; build the bundle again.") from error
        where = ".".join(str(part) for part in first["loc"])
        raise BundleError(
            f"{path} cannot be read: {where}: {first['msg']}. It was written by another version or is damaged; build "
            "the bundle again."
        ) from error
    return manifest


def _schema_version(content: bytes) -> object:
    """What a manifest says its version is; None if it says nothing that can be read."""
    try:
        found = json.loads(content)
    except ValueError:
        return None
    return found.get("schema_version") if isinstance(found, dict) else None


def _check_file(path: Path, entry: FileEntry, thorough: bool) -> None:
    if not path.is_file():
        raise BundleError(f"{path} is missing, but the manifest lists it. Copy the whole directory, or build it again.")
    size = path.stat().st_size
    if size != entry.size:
        raise BundleError(f"{path} has {size} bytes, the manifest says {entry.size}. Copy it again, or build it again.")
    same = entry_of(path).sha256 == entry.sha256 if thorough or size <= _SMALL else _sample(path) == entry.sample
    if not same:
        raise BundleError(f"{path} was changed since the bundle was built: its digest differs. Build the bundle again.")


def _sample(path: Path) -> str:
    """sha256 of 64 blocks of 64 KiB spread over the file, first and last included."""
    size, block, digest = path.stat().st_size, 1 << 16, hashlib.sha256()
    with path.open("rb") as stream:
        for i in range(64):
            stream.seek(max(size - block, 0) * i // 63)
            digest.update(stream.read(block))
    return digest.hexdigest()


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _clean_up(out: Path) -> None:
    """Remove what dead builds of the same bundle left; nothing that another name or a person made."""
    ours = re.compile(re.escape(f".{out.name}.") + r"(\d+)\.\w+" + re.escape(_SUFFIX))
    for path in out.parent.iterdir():
        found = ours.fullmatch(path.name)
        if found and not Path(f"/proc/{found.group(1)}").exists():
            shutil.rmtree(path, ignore_errors=True)
