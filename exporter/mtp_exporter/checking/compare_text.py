"""A comparison as lines for people, and as a JSON object."""

from __future__ import annotations

from typing import Any

from mtp_exporter.checking.compare import TOLERANCE, Comparison, StageResult


def as_lines(comparison: Comparison) -> str:
    """One line a stage, then the verdict."""
    lines = [
        f"every row was read: {comparison.rows_proved} rows of {len(comparison.stages)} stages, each changed once and "
        "noticed",
        *(f"note  {name} is another in the checkpoint than in the bundle" for name in comparison.differences),
        *(_line(stage) for stage in comparison.stages),
    ]
    first = comparison.first_difference
    if first is None:
        lines.append(f"the bundle agrees with the checkpoint in {len(comparison.stages)} stages")
    else:
        wrong = sum(not stage.holds for stage in comparison.stages)
        lines.append(
            f"first difference: {first.name}, row {first.worst_row} ({first.worst:.1e} of its values, at most "
            f"{TOLERANCE:.0e} is allowed); {wrong} of {len(comparison.stages)} stages differ"
        )
    return "\n".join(lines)


def as_report(comparison: Comparison) -> dict[str, Any]:
    """Stable keys for programs."""
    first = comparison.first_difference
    return {
        "agrees": first is None,
        "first_difference": first.name if first else None,
        "tolerance": TOLERANCE,
        "rows_proved": comparison.rows_proved,
        "described_differently": list(comparison.differences),
        "stages": [
            {"name": s.name, "rows": s.rows, "worst_row": s.worst_row, "worst": s.worst, "agrees": s.holds}
            for s in comparison.stages
        ],
    }


def _line(stage: StageResult) -> str:
    return f"{'ok  ' if stage.holds else 'DIFF'} {stage.name:<28} {stage.rows} rows, worst {stage.worst:.1e}"
