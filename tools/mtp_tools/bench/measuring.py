"""The rounds of a benchmark: every case in turn within one process, in another order each time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mtp_engines.errors import MtpError
from mtp_runtime.api import Model
from mtp_tools.bench.answers import Answer, Task, Wrap, answer
from mtp_tools.bench.cases import PLAIN, Case
from mtp_tools.bench.machine import peak_bytes

Round = dict[Case, list[Answer]]
"""Every case with one answer to each prompt."""


class WrongTokensError(MtpError):
    """Speculation changed the answer, so that its speed says nothing."""


@dataclass(frozen=True)
class Plan:
    """What is measured.

    Attributes:
        cases: plain decoding first.
        seed: of forced drafts; the same in every round, so that rounds differ in time alone.
        wrap: puts a fault between loop and engine, for controls; plain decoding has none.
        cpu_time: see `Task`.
    """

    prompts: list[list[int]]
    cases: list[Case]
    new_tokens: int
    repeats: int
    seed: int
    wrap: Wrap | None = None
    cpu_time: bool = False

    @property
    def host_loop(self) -> bool:
        """Whether the host runs the cycles: drafts are forced somewhere, and all cases have to be comparable."""
        return any(case.acceptance is not None for case in self.cases)


@dataclass(frozen=True)
class Measured:
    """Rounds that count, bandwidth of memory (bytes a second) in each, and the process's peak after the warm-up."""

    rounds: list[Round]
    bandwidths: list[float]
    peak_bytes: int


def measure(
    model: Model,
    plan: Plan,
    bandwidth: Callable[[], float],
    report: Callable[[str], None] = lambda line: None,
) -> Measured:
    """Warm up with every case once, then run the rounds; `report` is told of each.

    Args:
        bandwidth: measures how fast memory can be read now.

    Raises:
        WrongTokensError: an answer differs from that of plain decoding, in the warm-up too.
    """
    tasks = [_task(plan, prompt, ()) for prompt in plan.prompts]
    plain = [answer(model, task, PLAIN).token_ids for task in tasks]
    tasks = [_task(plan, prompt, ids) for prompt, ids in zip(plan.prompts, plain, strict=True)]
    run_round(model, tasks, plan, plan.cases)
    # Now: what the measurement of bandwidth allocates is not the model's.
    peak = peak_bytes()
    report("warm-up is done")
    rounds, bandwidths = [], []
    for number in range(plan.repeats):
        bandwidths.append(bandwidth())
        rounds.append(run_round(model, tasks, plan, rotated(plan.cases, number)))
        report(f"round {number + 1} of {plan.repeats} is done")
    return Measured(rounds, bandwidths, peak)


def run_round(model: Model, tasks: Sequence[Task], plan: Plan, order: Sequence[Case]) -> Round:
    """Every case in this order, each checked against plain decoding; the result is in the order of the plan.

    Raises:
        WrongTokensError: an answer differs.
    """
    found: Round = {}
    for case in order:
        found[case] = [answer(model, task, case) for task in tasks]
        for number, (task, ours) in enumerate(zip(tasks, found[case], strict=True), 1):
            _require_equal(model, case, number, task.continuation, ours.token_ids)
    return {case: found[case] for case in plan.cases}


def rotated(cases: Sequence[Case], number: int) -> list[Case]:
    """The cases from another one on in each round, so that none always follows the same."""
    start = number % len(cases)
    return [*cases[start:], *cases[:start]]


def _task(plan: Plan, prompt: list[int], continuation: Sequence[int]) -> Task:
    # The continuation that all are compared with comes from an engine without a fault.
    wrap = plan.wrap if continuation else None
    return Task(prompt, continuation, plan.new_tokens, plan.seed, plan.host_loop, wrap, plan.cpu_time)


def _require_equal(model: Model, case: Case, number: int, plain: Sequence[int], ours: Sequence[int]) -> None:
    if tuple(plain) == tuple(ours):
        return
    pairs = enumerate(zip(plain, ours, strict=False))
    first = next((index for index, (a, b) in pairs if a != b), min(len(plain), len(ours)))
    raise WrongTokensError(
        f"The answer to prompt {number} with K = {case.draft_tokens} differs from plain decoding at token {first}, so "
        f"its speed says nothing (the engine promises {model.engine.numerics!r}); run `mtp-run verify` on the bundle."
    )
