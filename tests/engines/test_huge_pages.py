"""Weights in huge pages: what is written while sessions are opened is moved, and nothing else."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from mtp_engines.backends.onnxruntime_cpu import huge_pages
from mtp_engines.backends.onnxruntime_cpu.huge_pages import in_huge_pages

BLOCKS = 4


@pytest.fixture
def size() -> int:
    """Bytes of a huge page."""
    found = huge_pages._huge_page_bytes()
    if not found:
        pytest.skip("this system has no huge pages for the asking")
    return found


class Memory:
    """Memory that nobody else uses, with blocks of the size of a huge page."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._map = mmap.mmap(-1, (BLOCKS + 1) * size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        self._skip = -start % size
        self.start = start + self._skip

    def write(self, blocks: int, count: int | None = None) -> None:
        """The first bytes of each of the first blocks; all of them unless a count is given."""
        for place in range(blocks):
            first, length = self._skip + place * self._size, count or self._size
            self._map[first : first + length] = b"\1" * length

    def counted(self, what: str) -> int:
        """Bytes of it that are `AnonHugePages` or `Rss`."""
        found, inside = 0, False
        for line in Path("/proc/self/smaps").read_text().splitlines():
            if addresses := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
                first, end = (int(part, 16) for part in addresses.groups())
                inside = first < self.start + BLOCKS * self._size and self.start < end
            elif inside and line.startswith(f"{what}:"):
                found += int(line.split()[1]) * 1024
        return found


def kernel_moves_on_demand(size: int) -> bool:
    """Asked of the kernel itself, apart from what is tested."""
    memory, libc = Memory(size), ctypes.CDLL(None)
    memory.write(1)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return bool(libc.madvise(memory.start, size, 25) == 0)


def test_what_is_written_inside_is_moved(size: int) -> None:
    if not kernel_moves_on_demand(size):
        pytest.skip("this kernel moves nothing on demand")
    with in_huge_pages():
        memory = Memory(size)
        memory.write(BLOCKS)
    assert memory.counted("AnonHugePages") == BLOCKS * size


def test_blocks_that_are_used_in_part_do_not_grow(size: int) -> None:
    with in_huge_pages():
        memory = Memory(size)
        memory.write(BLOCKS, 1)
        before = memory.counted("Rss")
    assert 0 < before == memory.counted("Rss")


def test_what_was_there_before_is_left_alone(size: int) -> None:
    memory = Memory(size)
    memory.write(BLOCKS)
    before = memory.counted("AnonHugePages")
    with in_huge_pages():
        pass
    assert memory.counted("AnonHugePages") == before


def test_parts_of_memory_that_are_new() -> None:
    assert huge_pages._without([(0, 10), (20, 40)], [(0, 10), (25, 30)]) == [(20, 25), (30, 40)]
    assert huge_pages._without([(5, 50)], [(0, 10), (40, 60)]) == [(10, 40)]
    assert huge_pages._without([(5, 9)], []) == [(5, 9)]


@pytest.mark.parametrize("setting", ["always madvise [never]", None])
def test_a_system_without_them_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str | None
) -> None:
    if setting is not None:
        (tmp_path / "enabled").write_text(setting)
        (tmp_path / "hpage_pmd_size").write_text("2097152")
    monkeypatch.setattr(huge_pages, "_SETTINGS", tmp_path)
    assert huge_pages._huge_page_bytes() == 0
    with in_huge_pages():
        pass
