"""Whole cycles through the Triton kernels, and by their bodies; run in a process of its own with TRITON_INTERPRET=1.

Triton reads that variable when it is imported, so the process that runs the tests cannot do this itself.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from mtp_engines.backends import open_engine
from mtp_engines.backends.gpu import accepting, caches, pages
from mtp_engines.backends.options import EngineOptions
from mtp_engines.backends.torch import engine as torch_engine
from mtp_engines.backends.torch import kernels
from mtp_engines.bundle import open_bundle
from tests.gpu.parts import Opened, Said, by_cycles, state_error

PROMPT = [5, 6, 20, 3, 9, 1, 30, 12, 7, 5, 6]
TOKENS = 8


@dataclass(frozen=True)
class Compared:
    """What the kernels say, and how it compares with the bodies.

    Attributes:
        state_error: of every state at the end, as a share of its greatest value; None where the lengths differ.
        runs: how often each kernel ran.
    """

    ids: list[int]
    drafts: list[list[int]]
    body_ids: list[int]
    body_drafts: list[list[int]]
    accepted: list[int]
    state_error: float | None
    runs: dict[str, int]


def compare(opened: Opened, theirs: Said, *, skinny: bool, tokens: int = TOKENS, fault: str = "") -> Compared:
    """Generate by kernels, one of which may be wrong; `theirs` is what the bodies said."""
    runs: dict[str, int] = {}
    table = {name: _counted(name, run, runs) for name, run in kernels._KERNELS.items()}
    if fault:
        table[fault] = _wrong(table[fault])
    ours = _said(opened, table, skinny, tokens)
    shared = {length: state for length, state in ours.states.items() if length in theirs.states}
    error = state_error(shared, theirs.states) if len(shared) == len(ours.states) else None
    return Compared(ours.ids, ours.drafts, theirs.ids, theirs.drafts, ours.accepted, error, runs)


def _counted(name: str, run: kernels.Operator, runs: dict[str, int]) -> kernels.Operator:
    def counted(call: kernels.Call) -> kernels.Values:
        runs[name] = runs.get(name, 0) + 1
        return run(call)

    return counted


def _wrong(run: kernels.Operator) -> kernels.Operator:
    """Rolls the first output by one place if it is of numbers; raises counts by one."""

    def wrong(call: kernels.Call) -> kernels.Values:
        values = run(call)
        if values[0].dtype.is_floating_point:
            values[0].copy_(values[0].roll(1, -1))
        else:
            values[1].add_(1)
        return values

    return wrong


def _said(opened: Opened, table: dict[str, kernels.Operator], skinny: bool, tokens: int = TOKENS) -> Said:
    """All of the prompt and TOKENS; of fewer tokens, behind one chunk of it."""
    for module in (torch_engine, accepting):
        module.kernels_for = lambda device: table  # type: ignore[attr-defined]
    for module in (pages, caches):
        module.PAGE_SIZE = 16
    engine = opened.torch(skinny=skinny, max_model_len=24, max_draft_tokens=2, prefill_chunk=4)
    sequences = engine.sequences()
    prompt = PROMPT if tokens == TOKENS else PROMPT[:3]
    said = by_cycles(engine, prompt, tokens, [2, 1, 2, 0, *[2] * 9], sequences=sequences)
    # At the end only: a look at the states runs the target.
    said.look(sequences, True)
    return said


def main(directory: str) -> None:
    """Print comparisons as one JSON object: both forms, and one for each kernel that was made wrong."""
    torch.set_num_threads(1)
    bundle = open_bundle(Path(directory))
    opened = Opened(bundle, open_engine(bundle, EngineOptions(threads=1)))
    found: dict[str, Compared] = {}
    for form in ("library", "skinny"):
        found[form] = compare(opened, _said(opened, {}, form == "skinny"), skinny=form == "skinny")
    for name in kernels._KERNELS:
        # A wrong count shows in the cycle after it.
        skinny, tokens = name == "SkinnyProduct", 3 if name == "Accept" else 2
        found[name] = compare(opened, _said(opened, {}, skinny, tokens), skinny=skinny, tokens=tokens, fault=name)
    sys.stdout.write(json.dumps({name: asdict(each) for name, each in found.items()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
