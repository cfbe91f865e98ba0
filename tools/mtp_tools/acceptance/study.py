"""The runs of a study: every prompt free-running and teacher-forced, counted by domain."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from mtp_engines.contracts.model import ModelSpec
from mtp_engines.costs import CycleCosts
from mtp_engines.engine import CycleSequences
from mtp_runtime.api import Model
from mtp_runtime.drafters.registry import base_of, head_kind, uses_lookup
from mtp_runtime.stats import Stats, merge
from mtp_tools.acceptance.lines import Task
from mtp_tools.acceptance.teacher import Counts, follow

REFERENCE, OWN = "reference text", "own answer"
"""Teachers: a given answer, or the one that the target gives by itself, greedily."""
ALL = "all domains"


@dataclass
class Domain:
    """What was counted in one domain.

    Attributes:
        stats: of the free-running answers.
        teachers: teacher -> its counts; none where the drafter cannot be taught.
    """

    name: str
    prompts: int = 0
    stats: Stats = field(default_factory=Stats)
    teachers: dict[str, Counts] = field(default_factory=dict)

    def add(self, other: Domain) -> None:
        """Count what another one counted."""
        self.prompts += other.prompts
        self.stats = merge([self.stats, other.stats])
        for name, counts in other.teachers.items():
            self.teachers.setdefault(name, Counts()).merge(counts)


def study(model: Model, tasks: Iterable[Task], draft_tokens: int) -> list[Domain]:
    """Run every task; domains in the order in which they come.

    Args:
        draft_tokens: K of the requests, and of teacher-forced drafts.
    """
    domains: dict[str, Domain] = {}
    for task in tasks:
        found = run_task(model, task, draft_tokens)
        if task.domain in domains:
            domains[task.domain].add(found)
        else:
            domains[task.domain] = found
    return list(domains.values())


def run_task(model: Model, task: Task, draft_tokens: int) -> Domain:
    """One prompt, as a domain of its own."""
    stats = merge([finished.stats for finished in model.complete_all(task.request)])
    domain = Domain(task.domain, 1, stats)
    if is_taught(task.prepared.drafter):
        name, answer = (OWN, own_answer(model, task)) if task.reference is None else (REFERENCE, task.reference)
        domain.teachers[name] = follow(model, task.prepared, answer, draft_tokens)
    return domain


def own_answer(model: Model, task: Task) -> list[int]:
    """The plain answer under the options of the request, but greedy."""
    changed = replace(task.request, draft_tokens=0, temperature=0.0, n=1, logprobs=None, prompt_logprobs=None)
    return list(model.complete(changed).token_ids)


def total(domains: Sequence[Domain]) -> Domain:
    """All domains as one."""
    found = Domain(ALL, stats=Stats(drafter=domains[0].stats.drafter))
    for domain in domains:
        found.add(domain)
    return found


def is_taught(drafter: str) -> bool:
    """Whether a drafter proposes from the state of a model; a lookup copies from the text."""
    return not uses_lookup(drafter)


def missing_coverage(drafter: str, spec: ModelSpec) -> str | None:
    """Why there is no coverage; None if there is."""
    if not is_taught(drafter):
        return "a lookup copies from the text and scores nothing, so there are free-running figures only"
    own = drafter == head_kind(spec)
    if own and spec.mtp is not None and spec.mtp.has_table:
        return "this head looks its ids up in a table, so only its best token is known"
    return None


def costs_of(model: Model, tasks: Sequence[Task]) -> CycleCosts:
    """Costs of the cycles that these tasks run; measured now if the bundle has none for this machine."""
    drafter = tasks[0].prepared.drafter
    greedy = not any(task.prepared.decoding.needs_logits for task in tasks)
    own = greedy and base_of(drafter) == drafter == head_kind(model.engine.spec)
    return model.auto.costs(drafter, whole=own and isinstance(model.engine.sequences(), CycleSequences))
