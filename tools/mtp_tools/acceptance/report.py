"""A study as text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from mtp_tools.acceptance.figures import Expected, Share
from mtp_tools.acceptance.results import Result, Setting, Taught, warnings_of

_NONE = "n/a"


def report(results: Sequence[Result], setting: Setting) -> Iterator[str]:
    """Tables of every domain, then one line for each, then what to know of them."""
    for result in results:
        yield from _domain(result, setting)
    yield from _summary(results)
    yield ""
    yield (
        "Brackets: 95 % intervals as if trials were independent; of a speed-up, with all rates at one end. Expected: "
        "from free-running rates and the costs of this bundle on this machine."
    )
    yield from warnings_of(results[-1], setting)


def _domain(result: Result, setting: Setting) -> Iterator[str]:
    domain, stats = result.domain, result.domain.stats.as_dict()
    yield f"== {domain.name}: {_counted(domain.prompts, 'prompt')}, {_counted(domain.stats.cycles, 'cycle')}"
    yield ""
    yield f"free-running, drafter {setting.drafter}, K = {max(setting.widths)}"
    yield from _table("position | reached | kept | kept of reached | kept of proposed")
    for position, (reached, proposed) in enumerate(zip(result.conditional, result.of_proposed, strict=True), 1):
        cells = (position, reached.trials, reached.kept, _cell(reached), _cell(proposed))
        yield _row(*cells)
    yield f"emitted by a cycle: {_histogram(stats['emitted_histogram'])}; mean {_number(stats['emitted_per_cycle'])}"
    yield ""
    for name, taught in result.taught.items():
        yield from _taught(name, taught)
    if setting.missing_coverage is not None:
        yield from (f"no coverage: {setting.missing_coverage}", "")
    yield from _table("K | expected tokens a cycle | ms a cycle | expected speed-up")
    for one in result.expected:
        seconds = None if one.seconds is None else 1e3 * one.seconds
        yield _row(one.draft_tokens, _number(one.tokens), _number(seconds, ".3f"), _speedup(one))
    yield from (f"best K: {result.best.draft_tokens}", "")


def _taught(name: str, taught: Taught) -> Iterator[str]:
    yield f"teacher-forced, teacher: {name}"
    if not taught.coverage:
        yield from _table("position | reached | kept | kept of reached")
        for position, share in enumerate(taught.conditional, 1):
            yield _row(position, share.trials, share.kept, _cell(share))
        yield ""
        return
    tops = taught.coverage
    yield from _table(
        " | ".join(("position | reached | kept | kept of reached | scored", *(f"top {top}" for top in tops)))
    )
    for index, places in enumerate(zip(*tops.values(), strict=True)):
        share = taught.conditional[index] if index < len(taught.conditional) else Share(0, 0)
        yield _row(index + 1, share.trials, share.kept, _cell(share), places[0].trials, *map(_cell, places))
    yield ""


def _summary(results: Sequence[Result]) -> Iterator[str]:
    yield from _table("domain | prompts | drafted | accepted | first draft kept | tokens a cycle | best K | speed-up")
    for result in results:
        stats = result.domain.stats
        first = result.conditional[0] if result.conditional else Share(0, 0)
        yield _row(
            result.domain.name,
            result.domain.prompts,
            stats.drafted,
            stats.accepted,
            _cell(first),
            _number(stats.as_dict()["emitted_per_cycle"]),
            result.best.draft_tokens,
            _speedup(result.best),
        )


def _table(columns: str) -> tuple[str, str]:
    return f"| {columns} |", "|" + "---|" * (columns.count("|") + 1)


def _row(*cells: object) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def _cell(share: Share) -> str:
    if share.rate is None or share.interval is None:
        return _NONE
    return f"{share.rate:.3f} ({share.interval[0]:.3f} .. {share.interval[1]:.3f})"


def _speedup(one: Expected) -> str:
    if one.speedup is None or one.between is None:
        return _NONE
    if not one.draft_tokens:
        return "1"
    return f"{one.speedup:.2f} ({one.between[0]:.2f} .. {one.between[1]:.2f})"


def _number(value: float | None, form: str = ".2f") -> str:
    return _NONE if value is None else f"{value:{form}}"


def _histogram(counts: dict[str, int]) -> str:
    cycles = sum(counts.values())
    return ", ".join(f"{length}: {count} ({count / cycles:.0%})" for length, count in counts.items()) or _NONE


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
