"""Compiling the kernels; needs nothing but the standard library, since it runs while the package is installed."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

SOURCES = Path(__file__).parent / "source"
LIBRARY = Path(__file__).parent / "mtp_kernels.so"
# Sums stay in the order of the source, without which registers do not suffice; no product and sum become one where the
# source has two, so that one row and several are rounded alike.
_FLAGS = ("-std=c++17", "-O3", "-mavx2", "-mfma", "-ffp-contract=off", "-fno-tree-reassoc", "-fPIC", "-shared")
_FLAGS_OF_LIBRARY = ("-fvisibility=hidden", "-pthread")


def source_digest() -> str:
    """sha256 over flags and sources, which the library carries, so that one of other sources is not used."""
    digest = hashlib.sha256(" ".join(_FLAGS).encode())
    for path in sorted(SOURCES.iterdir()):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def why_not_here() -> str | None:
    """What keeps this machine from compiling the kernels; None if nothing does."""
    if sys.platform != "linux" or platform.machine() not in ("x86_64", "AMD64"):
        return f"the CPU kernels are for x86-64 on Linux, this is {platform.machine()} on {sys.platform}"
    if compiler() is None:
        return "the CPU kernels need a C++ compiler, and neither c++ nor g++ nor clang++ was found (CXX names one)"
    return None


def compiler() -> str | None:
    """The compiler's path."""
    names = [os.environ.get("CXX", ""), "c++", "g++", "clang++"]
    return next((found for name in names if name and (found := shutil.which(name))), None)


def compile_kernels(library: Path = LIBRARY) -> str | None:
    """Write the shared library; what went wrong as one sentence, or None.

    The library appears whole or not at all.
    """
    reason = why_not_here()
    if reason is not None:
        return reason
    sources = [str(path) for path in sorted(SOURCES.glob("*.cpp"))]
    unfinished = library.with_suffix(f".{os.getpid()}.so")
    digest = f'-DMTP_SOURCE_DIGEST="{source_digest()}"'
    command = [str(compiler()), *_FLAGS, *_FLAGS_OF_LIBRARY, digest, *sources, "-o", str(unfinished)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return f"{command[0]} could not compile the CPU kernels: {done.stderr.strip()[-2000:]}"
        os.replace(unfinished, library)
    finally:
        unfinished.unlink(missing_ok=True)
    return None
