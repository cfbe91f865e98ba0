"""What a benchmark says of the machine: cores, instruction sets, memory of this process, bandwidth; no names."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import resource
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mtp_engines.cores import physical_cores as physical_cores
from mtp_engines.cores import read_cpuinfo as read_cpuinfo
from mtp_runtime.timing import Clock

BANDWIDTH_BYTES = 256 << 20
"""More than the caches of a CPU hold."""
_PASSES = 3
_INSTRUCTION_SETS = {
    "avx2": ("avx2",),
    "avx512f": ("avx512f",),
    "avx512_vnni": ("avx512_vnni",),
    "amx": ("amx_tile",),
}


def instruction_sets(cpuinfo: str) -> dict[str, bool]:
    """Which sets that matter for matrix products the text of /proc/cpuinfo names."""
    flags = {word for line in cpuinfo.splitlines() if line.startswith("flags") for word in line.split()}
    return {name: flags.issuperset(needed) for name, needed in _INSTRUCTION_SETS.items()}


def available_cores() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0))


def resident_bytes() -> int:
    """Memory of this process now, mapped pages of files included."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * resource.getpagesize()


def peak_bytes() -> int:
    """The most that `resident_bytes` has been in this process."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def versions() -> dict[str, str]:
    """Of what a benchmark runs on."""
    packages = ("mtp-export", "onnxruntime", "numpy", "torch", "triton", "tensorrt-cu13")
    installed = {dist.name.lower(): dist.version for dist in map(_distribution, packages) if dist is not None}
    return {"python": platform.python_version(), **installed}


def _distribution(name: str) -> importlib.metadata.Distribution | None:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None


class ReadBandwidth:
    """Reads a large array with several threads; the best of a few passes is how fast memory can be read now."""

    def __init__(self, threads: int, size: int = BANDWIDTH_BYTES, clock: Clock = time.perf_counter) -> None:
        self.threads, self._size, self._clock = threads, size, clock
        self._array: npt.NDArray[np.uint64] | None = None

    @property
    def how(self) -> str:
        """In words."""
        return (
            f"bitwise or over {self._size >> 20} MiB of uint64 in {self.threads} parts, one thread each, "
            f"best of {_PASSES} passes, before every round"
        )

    def __call__(self) -> float:
        """Bytes a second. The array is made at the first call and kept, so that its pages are there."""
        if self._array is None:
            self._array = np.ones(self._size // 8, np.uint64)
        parts = np.array_split(self._array, self.threads)
        with ThreadPoolExecutor(self.threads) as pool:
            return self._size / min(self._pass(pool, parts) for _ in range(_PASSES))

    def _pass(self, pool: ThreadPoolExecutor, parts: list[npt.NDArray[np.uint64]]) -> float:
        read: Callable[[npt.NDArray[np.uint64]], np.uint64] = np.bitwise_or.reduce
        start = self._clock()
        list(pool.map(read, parts))
        return self._clock() - start
