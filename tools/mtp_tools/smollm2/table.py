"""The measured figures as Markdown tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from mtp_tools.smollm2.measure import Row
from mtp_tools.smollm2.prompts import KINDS

_ROWS = (
    "| prompts | K | accepted / drafted | acceptance | tokens a cycle | tokens/s | against plain | by cost of rows |\n"
    "|---|---|---|---|---|---|---|---|"
)
_COSTS = "| K | rows | ms a verify | of one row | acceptance that breaks even |\n|---|---|---|---|---|"
_SOURCES = (
    "| prompts | tokens of prompts | of answers | runs of 4 from the prompt | from the answer itself | new |\n"
    "|---|---|---|---|---|---|"
)


def rows_table(rows: Sequence[Row]) -> str:
    """Acceptance and speed: medians over the repeats, slowest and fastest in brackets."""
    return "\n".join([_ROWS, *(_line(row) for row in rows)])


def costs_table(costs: Mapping[int, float]) -> str:
    """What a verify costs by its rows, and the share of K drafts that must be kept to pay for them.

    Args:
        costs: rows -> seconds.
    """
    lines = [_COSTS]
    for rows, seconds in costs.items():
        factor = seconds / costs[1]
        even = f"{(factor - 1) / (rows - 1):.3f}" if rows > 1 else ""
        lines.append(f"| {rows - 1} | {rows} | {seconds * 1e3:.1f} | {factor:.2f} | {even} |")
    return "\n".join(lines)


def sources_table(found: Mapping[str, tuple[int, int, tuple[int, int, int]]]) -> str:
    """Where the tokens of the answers stood before.

    Args:
        found: kind -> tokens of its prompts, tokens of its answers, and the three counts of `measure.sources`.
    """
    lines = [_SOURCES]
    for kind, (asked, answered, counts) in found.items():
        shares = " | ".join(f"{count / max(sum(counts), 1):.2f}" for count in counts)
        lines.append(f"| {KINDS[kind]} | {asked} | {answered} | {shares} |")
    return "\n".join(lines)


def _line(row: Row) -> str:
    kind, speed = KINDS[row.kind], f"{median(row.speeds):.1f} ({min(row.speeds):.1f} .. {max(row.speeds):.1f})"
    if row.draft_tokens == 0:
        return f"| {kind} | 0 | | | {row.per_cycle:.2f} | {speed} | 1 | 1 |"
    share = f"{row.accepted / row.drafted:.3f}" if row.drafted else "n/a"
    ratio = f"{median(row.ratios):.2f} ({min(row.ratios):.2f} .. {max(row.ratios):.2f})"
    return (
        f"| {kind} | {row.draft_tokens} | {row.accepted} / {row.drafted} | {share} | {row.per_cycle:.2f} | {speed} | "
        f"{ratio} | {row.expected:.2f} |"
    )
