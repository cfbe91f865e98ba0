"""The entry of a PTX text: its parameters, and whether it is what its caller will launch. Needs no triton."""

from __future__ import annotations

import re

_ARCHITECTURE_SPECIFIC = 90
"""From this capability on Triton compiles for `sm_XXa`, which runs on that capability alone."""
_SCRATCH = 2
"""Triton 3.6 appends the addresses of a global and a profiling scratch buffer to the parameters."""
_TYPES = {"*": "u64", "i64": "u64", "i32": "u32"}
_ENTRY = re.compile(r"\.visible \.entry (\w+)\(\n(.*?)\n\)", re.DOTALL)
_PARAMETER = re.compile(r"\.param \.(\w+) .*?(\w+)$")


class PtxError(Exception):
    """A kernel did not compile to what its caller would launch."""


def without_scratch(text: str, entry: str) -> str:
    """Take away the scratch pointers: whoever launches the kernel passes the arguments of the signature only."""
    found = _ENTRY.search(text)
    if found is None:
        raise PtxError(f"The PTX of {entry} has no entry that could be read. Use Triton 3.6.")
    parameters = found[2].split(",\n")
    for line in parameters[-_SCRATCH:]:
        name = line.split()[-1]
        if len(re.findall(rf"\b{name}\b", text)) != 1:
            raise PtxError(f"{entry} uses {name}, a scratch buffer of Triton. Write it without one.")
    kept = ",\n".join(parameters[:-_SCRATCH])
    return text[: found.start(2)] + kept + text[found.end(2) :]


def check(text: str, entry: str, types: list[str], capability: int, num_warps: int, ptx_version: int) -> None:
    """Compare the text with what was asked for; a wrong parameter list would be silent garbage at launch."""
    found = _ENTRY.search(text)
    if found is None:
        raise PtxError(f"The PTX of {entry} has no entry that could be read. Use Triton 3.6.")
    parameters = [match[1] for line in found[2].split(",\n") if (match := _PARAMETER.search(line.strip()))]
    suffix = "a" if capability >= _ARCHITECTURE_SPECIFIC else ""
    fused = re.findall(r"\b(?:add|sub|mul)(?:\.ftz)?\.f32(?:x2)?\b", text)
    threads = re.search(r"\.reqntid (\d+)", text)
    facts = {
        "entry": (found[1], entry),
        "parameters": (parameters, [_TYPES.get("*" if "*" in kind else kind, kind) for kind in types]),
        "version": (directive(text, "version"), f"{ptx_version // 10}.{ptx_version % 10}"),
        "target": (directive(text, "target"), f"sm_{capability}{suffix}"),
        "threads": (threads and threads[1], str(32 * num_warps)),
        "operations without a rounding mode, which ptxas may fuse": (fused, []),
    }
    for name, (got, want) in facts.items():
        if got != want:
            raise PtxError(f"{name} of {entry}: the PTX has {got}, {want} was expected. Use Triton 3.6.")


def directive(text: str, name: str) -> str:
    """The value of `.version` or `.target`; "none" if the text has no such line."""
    found = re.search(rf"^\.{name} (\S+)$", text, re.MULTILINE)
    return found[1] if found else "none"
