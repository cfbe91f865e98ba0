"""Several answers to one prompt, and the same prompt twice at once: it is read once where its states are kept."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_runtime import Model
from mtp_runtime.batching.prefixes import PrefixCache
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.request import Request
from tests.runtime.batching.conftest import Families
from tests.runtime.batching.parts import CHUNK, FAMILIES, alone, drive, request, scheduler, told_in

PLENTY = 1 << 26
PROMPT = [(7 * number) % 60 for number in range(2 * CHUNK + 3)]
COUNT = 4


def asked(**options: Any) -> Request:
    values = {"prompt_ids": PROMPT, "max_new_tokens": 9, "temperature": 1.0, "seed": 5, "n": COUNT, "ignore_eos": True}
    return request(**{**values, **options})


def cached(one: Scheduler, wanted: Request, model: Model) -> list[int]:
    """Tokens of the prompt that each answer did not have to read; the answers are those that read everything."""
    ticket = one.submit(wanted)
    drive(one)
    assert told_in(ticket) == alone(model, wanted)
    assert not one.prefixes._read
    return [finished.cached_tokens for finished in ticket.results()]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("draft_tokens", [0, 2])
def test_answers_to_one_prompt_read_it_once(name: str, draft_tokens: int, families: Families) -> None:
    model = families(name)
    one = scheduler(model, prefix_bytes=PLENTY)
    assert cached(one, asked(draft_tokens=draft_tokens), model) == [0, *[2 * CHUNK] * (COUNT - 1)]


def test_control_without_waiting_each_reads_it(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PrefixCache, "is_read", lambda self, tokens: False)
    assert cached(scheduler(hybrid, prefix_bytes=PLENTY), asked(), hybrid) == [0] * COUNT


@pytest.mark.parametrize(
    ("budget", "options"),
    [(0, {}), (1000, {}), (PLENTY, {"prompt_logprobs": 0}), (PLENTY, {"prompt_ids": PROMPT[:CHUNK]})],
    ids=["nothing kept", "too little kept", "scored", "short"],
)
def test_where_nothing_can_be_reused_each_reads_it(hybrid: Model, budget: int, options: dict[str, Any]) -> None:
    assert cached(scheduler(hybrid, prefix_bytes=budget), asked(**options), hybrid) == [0] * COUNT


def test_the_same_prompt_of_two_requests_is_read_once(hybrid: Model) -> None:
    one = scheduler(hybrid, prefix_bytes=PLENTY)
    wanted = [asked(n=1, seed=seed) for seed in (1, 2)]
    tickets = [one.submit(each) for each in wanted]
    drive(one)
    assert [told_in(ticket) for ticket in tickets] == [alone(hybrid, each) for each in wanted]
    assert [ticket.results()[0].cached_tokens for ticket in tickets] == [0, 2 * CHUNK]


def test_who_waits_goes_on_from_where_a_reader_was_given_up(hybrid: Model) -> None:
    one = scheduler(hybrid, prefix_bytes=PLENTY)
    reader, others = one.submit(asked(n=1)), one.submit(asked(n=2))
    one.step()
    reader.cancel()
    drive(one)
    assert told_in(others) == alone(hybrid, asked(n=2))
    assert [finished.cached_tokens for finished in others.results()] == [CHUNK, 2 * CHUNK]
    assert reader.results()[0].finish_reason == "cancelled"


def test_who_waits_reads_it_where_a_reader_fails(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    one = scheduler(hybrid, prefix_bytes=PLENTY)
    reader, other = one.submit(asked(n=1, seed=1)), one.submit(asked(n=1))

    def broken(*given: Any) -> Any:
        raise ZeroDivisionError("no")

    one.step()
    (run,) = (run for lane, run in one._running.values() if lane.ticket is reader)
    monkeypatch.setattr(run, "keep", broken)
    drive(one)
    with pytest.raises(RuntimeError, match="no"):
        reader.results()
    assert told_in(other) == alone(hybrid, asked(n=1))
