"""The figures of one domain, and of a whole study."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mtp_engines.costs import CycleCosts
from mtp_tools.acceptance.figures import (
    Expected,
    Share,
    best,
    conditional,
    conditional_of,
    coverage_of,
    drafting_share,
    expectations,
    of_proposed,
)
from mtp_tools.acceptance.study import Domain, is_taught, total

_ENOUGH_DRAFTED = 16
"""Drafted tokens of which a working head gets one right."""


@dataclass(frozen=True)
class Setting:
    """What all domains have in common.

    Attributes:
        missing_coverage: why there is no coverage; None if there is.
    """

    bundle: str
    drafter: str
    widths: Sequence[int]
    new_tokens: int
    costs: CycleCosts
    missing_coverage: str | None


@dataclass(frozen=True)
class Taught:
    """Teacher-forced figures; without coverage where `coverage` is empty."""

    conditional: list[Share]
    coverage: dict[int, list[Share]]


@dataclass(frozen=True)
class Result:
    """Figures of a domain."""

    domain: Domain
    conditional: list[Share]
    of_proposed: list[Share]
    taught: dict[str, Taught]
    expected: list[Expected]

    @property
    def best(self) -> Expected:
        """The K to take."""
        return best(self.expected)


def results_of(domains: Sequence[Domain], setting: Setting) -> list[Result]:
    """One for each domain; behind several, one for all of them."""
    every = [*domains, total(domains)] if len(domains) > 1 else domains
    return [_result(domain, setting) for domain in every]


def _result(domain: Domain, setting: Setting) -> Result:
    shares = conditional(domain.stats)
    expected = expectations(shares, setting.costs, setting.widths, drafting_share(domain.stats))
    taught = {
        name: Taught(conditional_of(counts), {} if setting.missing_coverage else coverage_of(counts))
        for name, counts in domain.teachers.items()
    }
    return Result(domain, shares, of_proposed(domain.stats), taught, expected)


def warnings_of(result: Result, setting: Setting) -> list[str]:
    """What its user should look into; `result` is that of all domains."""
    stats = result.domain.stats
    if stats.accepted or stats.drafted < _ENOUGH_DRAFTED or not is_taught(setting.drafter):
        return []
    return [
        f"WARNING: none of {stats.drafted} drafted tokens was accepted; what drafts here ({setting.drafter}) looks "
        "broken or untrained. Output stays right, but speculation only costs time."
    ]


def record_of(results: Sequence[Result], setting: Setting) -> dict[str, Any]:
    """Everything for JSON; what was never tried is null."""
    return {
        "bundle": setting.bundle,
        "drafter": setting.drafter,
        "draft_tokens": list(setting.widths),
        "new_tokens": setting.new_tokens,
        "cycle_costs_s": asdict(setting.costs),
        "missing_coverage": setting.missing_coverage,
        "domains": [_domain_dict(result) for result in results],
        "warnings": warnings_of(results[-1], setting),
    }


def _domain_dict(result: Result) -> dict[str, Any]:
    stats = result.domain.stats.as_dict()
    names = ("cycles", "drafted", "accepted", "acceptance_rate", "emitted_per_cycle", "emitted_histogram")
    return {
        "domain": result.domain.name,
        "prompts": result.domain.prompts,
        "free_running": {name: stats[name] for name in names}
        | {"conditional": _share_dicts(result.conditional), "of_proposed": _share_dicts(result.of_proposed)},
        "teacher_forced": [
            {"teacher": name, "conditional": _share_dicts(taught.conditional)}
            | {f"top_{top}": _share_dicts(shares) for top, shares in taught.coverage.items()}
            for name, taught in result.taught.items()
        ],
        "expected": [
            {
                "draft_tokens": one.draft_tokens,
                "tokens_per_cycle": one.tokens,
                "cycle_s": one.seconds,
                "speedup": one.speedup,
                "speedup_between": one.between,
            }
            for one in result.expected
        ],
        "best_draft_tokens": result.best.draft_tokens,
    }


def _share_dicts(shares: Sequence[Share]) -> list[dict[str, Any]]:
    return [
        {"kept": share.kept, "trials": share.trials, "rate": share.rate, "interval": share.interval} for share in shares
    ]
