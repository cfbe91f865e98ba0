"""The results as Markdown tables; what did not run is said in one line each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtp_tools.bench.summary import Spread
from mtp_tools.neighbours.results import Comparison, Row
from mtp_tools.neighbours.rounds import Case
from mtp_tools.neighbours.starting import Absent

_SPEED = (
    "engine | weights | K | prefill tok/s | decode tok/s | over its plain | whole request s | accepted / drafted | "
    "peak RSS GB | ids"
)
_RATIOS = "weights | figure | ours | best neighbour | ours better by"


def speed_table(rows: Sequence[Row]) -> Iterator[str]:
    """Medians of the rounds, least and greatest in brackets."""
    yield from _header(_SPEED)
    for row in rows:
        contender = row.case.contender
        counts = "" if row.drafted is None else f"{row.accepted} / {row.drafted}"
        yield (
            f"| {contender.engine.name} | {contender.weights} | {row.case.draft_tokens} | "
            f"{_bracketed(row.figures['prefill_tokens_per_s'], '.1f')} | "
            f"{_bracketed(row.figures['decode_tokens_per_s'], '.1f')} | "
            f"{'1' if row.over_plain is None else _bracketed(row.over_plain, '.2f')} | "
            f"{_bracketed(row.figures['request_s'], '.2f')} | {counts} | {row.peak_bytes / 1e9:.2f} | "
            f"{_ids(row.case)} |"
        )


def ratio_table(comparisons: Sequence[Comparison]) -> Iterator[str]:
    """Ours against the best neighbour of each group; a star marks one whose tokens are wrong."""
    if comparisons:
        yield from _header(_RATIOS)
    for found in comparisons:
        yield (
            f"| {found.group} | {found.what} | {_side(found.ours, found.figure)} | "
            f"{_side(found.theirs, found.figure)} | {_bracketed(found.ratio, '.2f')} |"
        )


def absent_lines(absent: Sequence[Absent], cases: Sequence[Case]) -> Iterator[str]:
    """One line for each contender, or K, that did not come through."""
    for missing in absent:
        yield f"{missing.contender.name}: {missing.reason}"
    for case in cases:
        if case.failure is not None:
            kept = f", {len(case.replies)} rounds kept" if case.replies else ""
            yield f"{case.contender.name}, K = {case.draft_tokens}{kept}: {case.failure}"


def about_lines(cases: Sequence[Case]) -> Iterator[str]:
    """What the workers say of themselves, once for each."""
    entries = {id(case.entry): case.entry for case in cases}
    for entry in entries.values():
        yield f"{entry.contender.name}: {', '.join(f'{name} {text}' for name, text in entry.ready.about.items())}"


def _ids(case: Case) -> str:
    return "equal" if case.wrong_at is None else f"**differ from token {case.wrong_at}**"


def _side(row: Row, figure: str) -> str:
    case = row.case
    width = f" K = {case.draft_tokens}" if case.draft_tokens else ""
    star = "" if case.wrong_at is None else "*"
    return f"{row.figures[figure].median:.2f} ({case.contender.name}{width}){star}"


def _header(columns: str) -> tuple[str, str]:
    return f"| {columns} |", "|" + "---|" * (columns.count(" | ") + 1)


def _bracketed(value: Spread, form: str) -> str:
    return f"{value.median:{form}} ({value.least:{form}} .. {value.greatest:{form}})"
