"""Memory of states and caches."""

from __future__ import annotations

import mmap
from pathlib import Path

import numpy as np
import psutil
import pytest

from mtp_engines.backends.onnxruntime_cpu.buffers import zeros


@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5), (7, 1000), (300, 1000)])
def test_zeros_are_aligned_and_can_be_written(shape: tuple[int, ...]) -> None:
    array = zeros(*shape)
    assert array.shape == shape
    assert array.dtype == np.float32
    assert array.size == 0 or array.ctypes.data % 64 == 0
    assert not array.any()
    array[...] = 1
    assert array.all()


def test_large_ones_go_back_to_the_system_one_by_one() -> None:
    process = psutil.Process()
    kept, freed = [zeros(64, 4096) for _ in range(100)], [zeros(64, 4096) for _ in range(100)]
    for first, second in zip(kept, freed, strict=True):
        first[...] = second[...] = 1
    before = process.memory_info().rss
    freed.clear()
    assert before - process.memory_info().rss > 90 << 20
    before = process.memory_info().rss
    assert all(array.all() for array in kept)
    assert before - process.memory_info().rss < 10 << 20, "control: what is kept stays"


def test_memory_is_not_shared_with_processes_that_are_forked() -> None:
    def access(array: np.ndarray) -> str:
        for line in Path("/proc/self/maps").read_text().splitlines():
            place, permissions, *_ = line.split()
            start, end = (int(part, 16) for part in place.split("-"))
            if start <= array.ctypes.data < end:
                return permissions
        raise AssertionError("the array lies in no mapping")

    assert access(zeros(300, 1000)) == "rw-p"
    shared = np.frombuffer(mmap.mmap(-1, 1 << 20), np.float32)
    assert access(shared) == "rw-s", "control: Python's own default is"
