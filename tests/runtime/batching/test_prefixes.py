"""Texts that were read before: reused or not, an answer is the one that reads everything anew."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from mtp_engines.backends.onnxruntime_cpu.sequences import CpuSequences
from mtp_engines.engine import Saved
from mtp_runtime import Emitted, Finished, Model
from mtp_runtime.batching.prefixes import Place, PrefixCache
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.drafters.ngram import NgramDrafter
from mtp_runtime.request import Request
from tests.runtime.batching.conftest import Families
from tests.runtime.batching.parts import CHUNK, EOS, FAMILIES, Heard, alone, drive, is_exact, request, said, scheduler

PLENTY = 1 << 26
A = [
    5,
    6,
    20,
    41,
    7,
    7,
    8,
    50,
    2,
    61,
    9,
    30,
    31,
    12,
    3,
    3,
    40,
    22,
    18,
    11,
    1,
    60,
    54,
    2,
    17,
    8,
    9,
    10,
    4,
    4,
    6,
    13,
    25,
    26,
]
B = [9, 40, 33, 12, *A[:20]]


def asked(prompt: list[int], draft_tokens: int = 3, most: int = 12, **options: Any) -> Request:
    return request(prompt_ids=prompt, max_new_tokens=most, draft_tokens=draft_tokens, **{"ignore_eos": True, **options})


def answer(one: Scheduler, request: Request) -> Finished:
    """Run one request by itself."""
    ticket = one.submit(request)
    drive(one)
    (finished,) = ticket.results()
    return finished


def places(cache: PrefixCache) -> list[Place]:
    return list(cache._places())


def held(cache: PrefixCache) -> int:
    """Bytes of every array in the tree, counted anew."""
    total = 0
    for place in places(cache):
        assert place.saved is not None
        assert place.hidden is not None
        total += place.hidden.nbytes + sum(array.nbytes for array in place.saved.arrays.values())
    return total


@pytest.mark.parametrize(
    ("name", "budget"),
    [*((name, size) for name in FAMILIES for size in ("plenty", "one text", "half a text")), ("torch", "plenty")],
)
def test_a_text_between_two_others_changes_nothing(name: str, budget: str, families: Families) -> None:
    """A, B, A, with K from 0 to 4, and with budgets that keep all, one, or a beginning of one."""
    model = families(name)
    one = scheduler(model, prefix_bytes=PLENTY)
    answer(one, asked(A, 0))
    whole = one.prefixes.nbytes
    size = {"plenty": PLENTY, "one text": whole + 8, "half a text": whole // 2}[budget]
    cached = []
    for depth in range(min(4, model.manifest.limits.max_draft_tokens) + 1):
        one = scheduler(model, prefix_bytes=size)
        truth: dict[int, Any] = {}
        for prompt in (A, B, A):
            scores = [None, 0][depth % 2] if is_exact(model) else None
            wanted = asked(prompt, depth, 12 if is_exact(model) else 5, logprobs=scores)
            finished = answer(one, wanted)
            truth[len(prompt)] = truth.get(len(prompt)) or alone(model, wanted)
            assert [said(finished)] == truth[len(prompt)]
            assert finished.cached_tokens <= len(prompt) - 1
            assert held(one.prefixes) == one.prefixes.nbytes <= size
            cached.append(finished.cached_tokens)
    if budget == "plenty":
        assert cached[2::3] == [2 * CHUNK] * len(cached[2::3])
    assert not any(cached[0::3] + cached[1::3])


@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_texts_that_share_a_beginning(hybrid: Model, draft_tokens: int) -> None:
    changed = [*A[:9], 0, *A[10:]]
    prompts = [A, [*A, 55], [*A, 2, 3], A[:-1], changed, A[:CHUNK], A[: CHUNK + 1]]
    one = scheduler(hybrid, prefix_bytes=PLENTY)
    known: list[list[int]] = []
    for _ in range(2):
        for prompt in prompts:
            wanted = asked(prompt, draft_tokens)
            finished = answer(one, wanted)
            assert [said(finished)] == alone(hybrid, wanted)
            # What may be known: the common beginning with some text before, and one token has to be run.
            most = max((_common(prompt, other) for other in known), default=0)
            assert finished.cached_tokens <= min(most, len(prompt) - 1)
            known.append([*prompt, *finished.token_ids[:-1]])
    assert answer(one, asked([*A, 55], draft_tokens)).cached_tokens >= 2 * CHUNK
    # Its first difference is inside the first chunk, so nothing but its own earlier run can be there.
    assert answer(scheduler_with(hybrid, A), asked(changed, draft_tokens)).cached_tokens == 0


def scheduler_with(model: Model, prompt: list[int]) -> Scheduler:
    one = scheduler(model, prefix_bytes=PLENTY)
    answer(one, asked(prompt))
    return one


def _common(first: list[int], second: list[int]) -> int:
    same = 0
    while same < min(len(first), len(second)) and first[same] == second[same]:
        same += 1
    return same


# Turns of a conversation


def knowing(monkeypatch: pytest.MonkeyPatch, text: list[int]) -> None:
    """Let lookups propose what comes next in a text, so that every block is accepted whole."""

    def propose(self: NgramDrafter, draft_tokens: int) -> list[int]:
        return text[len(self._tokens) : len(self._tokens) + draft_tokens]

    monkeypatch.setattr(NgramDrafter, "propose", propose)


def behind(model: Model, first: Request, draft_tokens: int) -> tuple[Finished, int]:
    """Ask, check a turn behind the answer; the answer, and how many tokens its last block had."""
    one, heard = scheduler(model, prefix_bytes=PLENTY), Heard()
    one.submit(first, listener=heard)
    drive(one)
    assert first.prompt_ids is not None
    following = asked([*first.prompt_ids, *heard.finished.token_ids, 1, 2, 3, 4, 5], draft_tokens)
    after = answer(one, following)
    assert [said(after)] == alone(model, following)
    # All but the newest token was run.
    assert after.cached_tokens == len(first.prompt_ids) + len(heard.finished.token_ids) - 1
    return heard.finished, [len(event.token_ids) for event in heard.all if isinstance(event, Emitted)][-1]


@pytest.mark.parametrize("draft_tokens", range(5))
def test_a_turn_behind_an_answer_that_its_limit_ended(hybrid: Model, draft_tokens: int) -> None:
    """The limit cuts blocks at every position."""
    for limit in range(1, 12):
        before, _ = behind(hybrid, asked(A[:9], draft_tokens, limit), draft_tokens)
        assert before.finish_reason == "length"


@pytest.mark.parametrize("draft_tokens", range(5))
def test_a_turn_behind_an_answer_that_a_stop_text_ended(
    hybrid: Model, draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At each position of a block."""
    long, places = hybrid.complete(asked(A[:9], 0, 24)), set()
    knowing(monkeypatch, [*A[:9], *long.token_ids])
    stops = [(index, piece) for index, piece in enumerate(long.text) if long.text.index(piece) == index]
    for index, piece in stops[:12]:
        first = asked(A[:9], draft_tokens, 24, stop=piece, drafter="ngram" if draft_tokens else "none")
        before, place = behind(hybrid, first, draft_tokens)
        assert (before.finish_reason, before.text) == ("stop", long.text[:index])
        places.add(place)
    assert places == set(range(1, draft_tokens + 2))


@pytest.mark.parametrize("draft_tokens", [0, 2, 4])
def test_a_turn_behind_an_answer_that_its_end_token_ended(
    hybrid: Model, draft_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, places, found = np.random.default_rng(0), set(), 0
    while found < 12:
        prompt = rng.integers(0, 64, 9).tolist()
        truth = hybrid.complete(prompt_ids=prompt, max_new_tokens=24, draft_tokens=0)
        if truth.finish_reason != "eos" or len(truth.token_ids) < 2:
            continue
        found += 1
        knowing(monkeypatch, [*prompt, *truth.token_ids])
        drafter = "ngram" if draft_tokens else "none"
        before, place = behind(hybrid, asked(prompt, draft_tokens, 24, ignore_eos=False, drafter=drafter), draft_tokens)
        assert (before.finish_reason, before.token_ids) == ("eos", truth.token_ids)
        assert before.token_ids[-1] == EOS
        places.add(place)
    assert len(places) >= min(3, draft_tokens + 1)


@pytest.mark.parametrize("verify", ["rows", "step"])
@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_a_turn_behind_an_answer_that_was_given_up(
    hybrid: Model, draft_tokens: int, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By its listener after each token of a block, and between rounds, in the middle of a block too."""
    knowing(monkeypatch, [*A[:9], *hybrid.complete(asked(A[:9], 0, 70)).token_ids])
    drafter = "ngram" if draft_tokens else "none"
    for rounds in range(1, 13):
        for by_listener in (False, True):
            one, heard = scheduler(hybrid, prefix_bytes=PLENTY), Heard()
            ticket = one.submit(asked(A[:9], draft_tokens, 70, drafter=drafter, verify=verify), listener=heard)
            if by_listener:
                heard.then = lambda told, t=ticket, h=heard, most=rounds: t.cancel() if len(h.ids) >= most else None
            else:
                for _ in range(rounds):
                    one.step()
                ticket.cancel()
            drive(one)
            assert heard.finished.finish_reason == "cancelled"
            assert heard.finished.token_ids == tuple(heard.ids)
            following = asked([*A[:9], *heard.ids, 1, 2, 3], draft_tokens)
            after = answer(one, following)
            assert [said(after)] == alone(hybrid, following)
            assert after.cached_tokens <= 9 + len(heard.ids)


# What is kept


def test_a_prompt_that_is_scored_is_read_anew(hybrid: Model) -> None:
    one = scheduler_with(hybrid, A)
    wanted = asked(A, 2, prompt_logprobs=1)
    finished = answer(one, wanted)
    assert finished.cached_tokens == 0
    assert [said(finished)] == alone(hybrid, wanted)
    assert answer(one, asked(A, 2)).cached_tokens == 2 * CHUNK


def test_nothing_is_restored_for_an_answer_without_tokens(hybrid: Model) -> None:
    one = scheduler_with(hybrid, A)
    assert answer(one, asked(A, 2, most=0)).cached_tokens == 0
    assert answer(one, asked(A, 2, most=1)).cached_tokens == 2 * CHUNK


@pytest.mark.parametrize("share", [0.4, 1.1, 2.7])
def test_the_budget_holds_at_every_moment(hybrid: Model, share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted anew whenever something is kept: what the tree holds, and what answers hold that stand in it."""
    budget = int(share * scheduler_with(hybrid, A).prefixes.nbytes)
    one, kept, most = scheduler(hybrid, prefix_bytes=budget), 0, 0
    alive: list[Place] = []
    right = PrefixCache.keep

    def keep(self: PrefixCache, *parts: Any) -> Place:
        nonlocal kept, most
        place = right(self, *parts)
        alive.append(place)
        assert held(self) == self.nbytes <= budget
        # Places that were dropped hold nothing, though an answer may still know them.
        assert sum(one.nbytes for one in {id(one): one for one in alive}.values()) <= budget
        kept, most = kept + 1, max(most, self.nbytes)
        return place

    monkeypatch.setattr(PrefixCache, "keep", keep)
    rng = np.random.default_rng(1)
    requests = [asked(A[: int(rng.integers(3, 34))] + rng.integers(0, 64, 4).tolist(), 2, 9) for _ in range(25)]
    tickets = [one.submit(wanted) for wanted in requests]
    drive(one)
    for ticket, wanted in zip(tickets, requests, strict=True):
        assert [said(end) for end in ticket.results()] == alone(hybrid, wanted)
    assert kept > 25
    assert most > budget / 2


def test_a_text_that_cannot_fit_drives_no_other_out() -> None:
    cache = PrefixCache(100)
    root = cache.find([])

    def part(length: int, size: int, since: int = 0) -> Saved:
        return Saved(since, length, {"rows": np.zeros(size, np.int8)})

    none = np.zeros((0, 0), np.float32)
    other = cache.keep(root, (9,), part(1, 30), none)
    first = cache.keep(root, (1, 2), part(2, 60), none)
    assert cache.keep(first, (3,), part(3, 50, 2), none) is first
    assert cache.nbytes == 90
    assert cache.find([9, 1]) is other
    second = cache.keep(root, (4,), part(1, 40), none)
    assert cache.find([4, 4]) is second
    assert cache.find([9, 1]) is other
    assert cache.find([1, 2, 5]).length == 0, "the one that was not used for the longest time went"
    assert not first.kept
    assert first.nbytes == 0
    assert cache.keep(first, (3,), part(3, 1, 2), none) is first, "behind what is gone nothing is kept"
    assert cache.nbytes == 70


# Controls


def differs(model: Model) -> bool:
    one = scheduler(model, prefix_bytes=PLENTY)
    for prompt in (A, B, A):
        wanted = asked(prompt, logprobs=0)
        try:
            if [said(answer(one, wanted))] != alone(model, wanted):
                return True
        except (RuntimeError, ValueError):
            return True
    return False


def _without_states(self: CpuSequences, sequence: int, parts: Iterable[Saved], right: Any) -> None:
    """Caches only."""
    states = {name: array * 0 for name, array in self._state.recurrent_of(sequence).items()}
    right(self, sequence, [Saved(part.since, part.length, part.arrays | states) for part in parts])


def _a_row_too_many(self: CpuSequences, sequence: int, parts: Iterable[Saved], right: Any) -> None:
    right(self, sequence, parts)
    self.lengths[sequence] += 1


@pytest.mark.parametrize("fault", [_without_states, _a_row_too_many])
def test_control_a_state_that_is_not_the_texts_is_seen(
    hybrid: Model, fault: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not differs(hybrid)
    right = CpuSequences.restore
    monkeypatch.setattr(CpuSequences, "restore", lambda self, sequence, parts: fault(self, sequence, parts, right))
    assert differs(hybrid)


def test_control_a_head_that_is_not_fed_again_drafts_otherwise(hybrid: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the tokens alone the comparison would not see it."""
    right = Place.rows
    monkeypatch.setattr(Place, "rows", lambda self: right(self) * 0)
    assert differs(hybrid)


def test_the_same_text_again_is_read_but_for_its_last_token(partial: Model) -> None:
    """Though the prompt is shorter than a chunk; control: short ones are read anew."""
    one = scheduler(partial, slots=2, prefix_bytes=PLENTY)
    for draft_tokens in (3, 0):
        for prompt, cached in ((A, len(A) - 1), (A[:8], 0)):
            wanted = alone(partial, asked(prompt, draft_tokens))
            first, again = (answer(one, asked(prompt, draft_tokens)) for _ in range(2))
            assert [said(first)] == [said(again)] == wanted
            assert again.cached_tokens == cached
            assert first.cached_tokens == (cached if draft_tokens == 0 else 0)
            assert again.stats.accepted == first.stats.accepted
