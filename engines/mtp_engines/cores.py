"""How many cores this machine has, counted as ONNX Runtime does when it chooses the number of its threads."""

from __future__ import annotations

import os
from pathlib import Path

_CPUINFO = Path("/proc/cpuinfo")


def physical_cores(cpuinfo: str) -> int:
    """Cores that the text of /proc/cpuinfo tells apart; processors where it names no cores."""
    blocks = [dict(_field(line) for line in block.splitlines()) for block in cpuinfo.split("\n\n") if block.strip()]
    cores = {(block["physical id"], block["core id"]) for block in blocks if "core id" in block}
    return len(cores) or os.cpu_count() or 1


def read_cpuinfo() -> str:
    """The text of /proc/cpuinfo, empty where there is no such file."""
    return _CPUINFO.read_text(encoding="utf-8") if _CPUINFO.is_file() else ""


def _field(line: str) -> tuple[str, str]:
    name, _, value = line.partition(":")
    return name.strip(), value.strip()
