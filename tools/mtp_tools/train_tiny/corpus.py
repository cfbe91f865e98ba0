"""The training text: documentation inside source distributions that never change, named by hash."""

import hashlib
import io
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from mtp_engines.errors import MtpError


class RecipeError(MtpError):
    """The recipe cannot go on; the text says what was found, what was expected and what to do."""


@dataclass(frozen=True)
class Source:
    """One source distribution and which of its files are text to train on."""

    name: str
    version: str
    sha256: str
    licence: str
    folder: str
    suffix: str
    skipped_prefixes: tuple[str, ...]


@dataclass(frozen=True)
class Document:
    """One file of documentation; the name is `package/path-inside-the-distribution`."""

    name: str
    text: str


@dataclass(frozen=True)
class Split:
    """Documents to train on, and whole documents that training never sees."""

    train: tuple[Document, ...]
    held_out: tuple[Document, ...]


SOURCES = (
    Source(
        name="Django",
        version="5.1.4",
        sha256="de450c09e91879fa5a307f696e57c851955c910a438a35e6b4c895e86bedc82a",
        licence="BSD-3-Clause, Copyright (c) Django Software Foundation and individual contributors",
        folder="docs",
        suffix=".txt",
        skipped_prefixes=("requirements",),
    ),
    Source(
        name="SQLAlchemy",
        version="2.0.36",
        sha256="7f2767680b6d2398aea7082e45a774b2b0767b5c8d8ffb9c8b683088ea9b29c5",
        licence="MIT, Copyright 2005-2024 SQLAlchemy authors and contributors",
        folder="doc/build",
        suffix=".rst",
        # Lists of issue numbers and hashes: they teach a model of this size nothing.
        skipped_prefixes=("changelog_", "unreleased_"),
    ),
)

HELD_OUT_ONE_IN = 20


def load_split(cache: Path) -> Split:
    """Return all documents in a fixed order, split by a hash of their names.

    Raises:
        RecipeError: a source distribution could not be fetched, or has another hash.
    """
    documents = [document for source in SOURCES for document in _documents(source, cache)]
    return Split(
        train=tuple(d for d in documents if not _is_held_out(d)),
        held_out=tuple(d for d in documents if _is_held_out(d)),
    )


def _is_held_out(document: Document) -> bool:
    digest = hashlib.sha256(document.name.encode()).digest()
    return int.from_bytes(digest[:8], "big") % HELD_OUT_ONE_IN == 0


def _documents(source: Source, cache: Path) -> Iterator[Document]:
    """Read the text files of one distribution, sorted by name."""
    texts: dict[str, str] = {}
    with tarfile.open(fileobj=io.BytesIO(_sdist_bytes(source, cache)), mode="r:gz") as archive:
        for member in archive.getmembers():
            inside = PurePosixPath(*PurePosixPath(member.name).parts[1:])
            if member.isfile() and _is_wanted(source, inside):
                extracted = archive.extractfile(member)
                assert extracted is not None, "a regular member of an archive has content"
                texts[f"{source.name}/{inside}"] = extracted.read().decode("utf-8")
    for name in sorted(texts):
        yield Document(name, texts[name])


def _is_wanted(source: Source, path: PurePosixPath) -> bool:
    return (
        path.is_relative_to(source.folder)
        and path.suffix == source.suffix
        and not any(part.startswith(source.skipped_prefixes) for part in path.parts)
    )


def _sdist_bytes(source: Source, cache: Path) -> bytes:
    """Return the distribution's bytes, from the cache or else through pip."""
    folder = cache / "sdist" / source.name
    folder.mkdir(parents=True, exist_ok=True)
    if not list(folder.glob("*.tar.gz")):
        _download(source, folder)
    archives = sorted(folder.glob("*.tar.gz"))
    found = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in archives}
    for path in archives:
        if found[path.name] == source.sha256:
            return path.read_bytes()
    raise RecipeError(
        f"{folder} holds {found or 'no archive'}, expected a source distribution of {source.name} "
        f"{source.version} with sha256 {source.sha256}. Delete that folder and run again."
    )


def _download(source: Source, folder: Path) -> None:
    # --no-binary names this package alone: pip builds the metadata of what it downloads, and
    # `:all:` would also compile every build requirement from source, which takes minutes.
    requirement = f"{source.name}=={source.version}"
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--no-binary", source.name, "--dest", str(folder), requirement]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode != 0:
        raise RecipeError(
            f"pip could not download the source distribution of {requirement}: "
            f"{result.stderr.strip()[-500:]} Run `{' '.join(command)}` by hand to see more."
        )
