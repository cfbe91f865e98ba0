"""Packed weights in huge pages: a token reads all of them, and of small pages a processor knows too few at a time.

Linux gives huge pages to who asks for them when memory is first written to. ONNX Runtime does not ask, so the kernel is
asked afterwards to put what was written together. See decision 0023 for what that brings.
"""

from __future__ import annotations

import ctypes
import mmap
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

Span = tuple[int, int]
"""Addresses, the second one exclusive."""

_SETTINGS = Path("/sys/kernel/mm/transparent_hugepage")
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25
_PATIENCE_S = 10.0
"""Longest wait; what is left then the kernel does in its own time. Without fragments a second does for 3 GB."""


@contextmanager
def in_huge_pages() -> Iterator[None]:
    """Move what is allocated and written inside to huge pages when it is left.

    Only memory that is used already is moved, so nothing grows. Where the system has none to give, nothing happens.
    """
    size = _huge_page_bytes()
    before: list[Span] | None = None
    with suppress(OSError):
        before = _anonymous() if size else None
    yield
    if before is not None:
        with suppress(OSError):
            _collapse(_without(_anonymous(), before), size)


def _huge_page_bytes() -> int:
    """Size of a huge page; 0 where there are none, or where whoever runs the machine has turned them off."""
    if sys.platform != "linux":
        return 0
    try:
        turned_off = "[never]" in (_SETTINGS / "enabled").read_text()
        return 0 if turned_off else int((_SETTINGS / "hpage_pmd_size").read_text())
    except (OSError, ValueError):
        return 0


def _anonymous() -> list[Span]:
    """Private writable memory of this process that belongs to no file, in order."""
    spans = []
    for line in Path("/proc/self/maps").read_text().splitlines():
        addresses, permissions, _, _, inode, *name = line.split(maxsplit=5)
        if permissions == "rw-p" and inode == "0" and (not name or name[0].startswith(("[heap]", "[anon"))):
            first, _, end = addresses.partition("-")
            spans.append((int(first, 16), int(end, 16)))
    return spans


def _without(spans: list[Span], known: list[Span]) -> list[Span]:
    """The parts of `spans` that lie in none of `known`."""
    left = []
    for start, end in spans:
        for first, last in known:
            if start < last and first < end:
                if start < first:
                    left.append((start, first))
                start = max(start, last)
        if start < end:
            left.append((start, end))
    return left


def _collapse(spans: list[Span], size: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    deadline = time.monotonic() + _PATIENCE_S
    for start, end in spans:
        first, last = -(-start // size) * size, end // size * size
        if first >= last:
            continue
        pages = np.zeros((last - first) // mmap.PAGESIZE, np.uint8)
        if libc.mincore(first, last - first, pages.ctypes.data):
            continue
        used = (pages.reshape(-1, size // mmap.PAGESIZE) & 1).all(axis=1)
        for place in np.flatnonzero(used):
            address = first + int(place) * size
            libc.madvise(address, size, _MADV_HUGEPAGE)
            if time.monotonic() < deadline:
                libc.madvise(address, size, _MADV_COLLAPSE)
