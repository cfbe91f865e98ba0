"""What a sender is told: data, one final flag, errors; whatever ends the answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime import Model
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.loop import Generation
from mtp_serving.triton.backend import Backend
from mtp_serving.triton.metrics import Metrics
from mtp_serving.triton.reply import Reply
from tests.serving.triton.fake import Response, Sender, TritonRequest, Utils, arguments, ask, loaded

FINAL = Utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
ENDS: dict[str, tuple[dict[str, Any], str]] = {
    "end token": ({"ids": [5], "max_new_tokens": 30}, "eos"),
    "stop text": ({"text": "567", "stop": ["9:"], "max_new_tokens": 30}, "stop"),
    "limit": ({"ids": [13], "max_new_tokens": 9}, "length"),
    "full context": ({"ids": [*range(13, 30), *range(13, 50)], "max_new_tokens": 90}, "length"),
    "nothing to emit": ({"ids": [5], "max_new_tokens": 0}, "length"),
    "limit and stop text in one block": ({"text": "5", "stop": ["9:"], "max_new_tokens": 5}, "stop"),
}


def request_options(options: dict[str, Any]) -> dict[str, Any]:
    """The same for `Model.complete`."""
    names = {"ids": "prompt_ids", "text": "prompt"}
    return {names.get(name, name): value for name, value in options.items()}


def require_well_formed(sent: Sequence[tuple[Response, int]]) -> None:
    """One final flag, on the last response; the reason and the statistics in that one only."""
    flags = [flag for _, flag in sent]
    assert flags == [0] * (len(flags) - 1) + [FINAL]
    reasons = [response.word("finish_reason") for response, _ in sent if response.error is None]
    assert not any(reasons[:-1])
    last = sent[-1][0]
    if last.error is None:
        assert reasons[-1]
        assert last.statistics["usage"]["completion_tokens"] >= 0
    assert all(response.error is None for response, _ in sent[:-1])


@pytest.mark.parametrize("draft_tokens", range(5))
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", ENDS)
def test_every_end_has_one_final_flag_and_its_reason(
    served: Backend, alone: Model, kind: str, stream: bool, draft_tokens: int
) -> None:
    """SV-03 and SV-07: the same text, ids and reason as without a server, streamed or not, for every K."""
    options, reason = ENDS[kind]
    expected = alone.complete(**request_options(options), draft_tokens=draft_tokens)
    assert expected.finish_reason == reason, "control: the case ends as it says"
    request = TritonRequest(**options, draft_tokens=draft_tokens, stream=stream)
    (responses,) = ask(served, request)
    require_well_formed(request.sender.sent)
    assert "".join(response.word("text_output") for response in responses) == expected.text
    assert request.sender.tokens == list(expected.token_ids)
    assert responses[-1].word("finish_reason") == reason
    statistics = responses[-1].statistics
    assert statistics["usage"]["completion_tokens"] == len(expected.token_ids)
    assert statistics["stats"]["accepted"] == expected.stats.accepted
    assert len(responses) == 1 or stream
    if stream and len(expected.token_ids) > 5:
        assert len(responses) > 1, "control: this one is streamed in parts"


def test_control_a_flag_apart_from_the_data_and_a_second_flag_are_seen() -> None:
    """SV-03: the faults of the case."""
    apart = [(_response("a", ""), 0), (_response("b", "length"), 0), (Response(), FINAL)]
    twice = [(_response("a", ""), FINAL), (_response("b", "length"), FINAL)]
    early = [(_response("a", "length"), 0), (_response("b", "length"), FINAL)]
    for sent in (apart, twice, early):
        with pytest.raises((AssertionError, KeyError)):
            require_well_formed(sent)
    require_well_formed([(_response("a", ""), 0), (_response("b", "length"), FINAL)])


def _response(text: str, reason: str) -> Response:
    utils = Utils()
    reply = Reply(utils, None)
    response: Response = reply._response(0, type("Piece", (), {"text": text, "token_ids": [1], "finished": None})())
    statistics = json.dumps({"usage": {"completion_tokens": 1}})
    for name, value in (("finish_reason", reason), ("statistics", statistics)):
        response._values[name][0] = value.encode()
    return response


@pytest.mark.parametrize("draft_tokens", range(5))
@pytest.mark.parametrize("stream", [True, False])
def test_a_cancelled_request_ends_within_a_round_and_the_next_one_is_right(
    served: Backend, alone: Model, stream: bool, draft_tokens: int
) -> None:
    """SV-01: cancelled once 5 tokens were sent, or seen to be cancelled at the fifth look without a stream."""
    looks = iter(range(1000))

    def cancelled(sender: Sender) -> bool:
        return len(sender.tokens) >= 5 if stream else next(looks) >= 5

    request = TritonRequest(ids=[13], max_new_tokens=45, draft_tokens=draft_tokens, stream=stream, cancelled=cancelled)
    (responses,) = ask(served, request)
    require_well_formed(request.sender.sent)
    assert responses[-1].word("finish_reason") == "cancelled"
    most = 5 + draft_tokens + 1 if stream else 5 * (draft_tokens + 1)
    assert responses[-1].statistics["usage"]["completion_tokens"] <= most < 45
    following = TritonRequest(ids=[14], max_new_tokens=7, draft_tokens=draft_tokens)
    ask(served, following)
    assert following.sender.tokens == list(alone.complete(prompt_ids=[14], max_new_tokens=7).token_ids)


def test_control_without_a_look_at_cancellations_the_answer_runs_to_its_end(
    served: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SV-01: the fault of the case."""
    monkeypatch.setattr(Reply, "poll", lambda self: None)
    request = TritonRequest(ids=[13], max_new_tokens=45, cancelled=lambda sender: len(sender.tokens) >= 5)
    (responses,) = ask(served, request)
    assert responses[-1].word("finish_reason") == "length"
    assert responses[-1].statistics["usage"]["completion_tokens"] == 45


def test_a_request_that_waits_for_a_slot_can_be_cancelled(served: Backend) -> None:
    """Three slots are taken; the fourth request is given up before it has one."""
    running = [TritonRequest(ids=[13 + number], max_new_tokens=40, draft_tokens=0) for number in range(3)]
    waiting = TritonRequest(ids=[30], max_new_tokens=5, cancelled=lambda sender: True)
    *others, (last,) = ask(served, *running, waiting)
    assert last.word("finish_reason") == "cancelled"
    assert last.ids == []
    assert [responses[-1].word("finish_reason") for responses in others] == ["length"] * 3


@pytest.mark.parametrize("draft_tokens", range(5))
@pytest.mark.parametrize("tokens", [0, 3])
@pytest.mark.parametrize("stream", [True, False])
def test_a_failure_of_the_model_is_one_error_and_harms_nobody_else(
    served: Backend, alone: Model, monkeypatch: pytest.MonkeyPatch, stream: bool, tokens: int, draft_tokens: int
) -> None:
    """SV-04: before the first token, and after the third."""
    for name in ("prefill", "cycle"):
        monkeypatch.setattr(Generation, name, _failing(getattr(Generation, name), [20], tokens))
    bad = TritonRequest(ids=[20], max_new_tokens=20, draft_tokens=draft_tokens, stream=stream)
    good = [TritonRequest(ids=[13], max_new_tokens=20, draft_tokens=draft_tokens) for _ in range(2)]
    _, responses, _ = ask(served, good[0], bad, good[1])
    require_well_formed(bad.sender.sent)
    assert responses[-1].error is not None
    assert "the card fell off" in responses[-1].error.text
    assert responses[-1].error.code == Utils.TritonError.INTERNAL
    assert (len(bad.sender.tokens) >= 3) == (stream and tokens == 3)
    expected = list(alone.complete(prompt_ids=[13], max_new_tokens=20).token_ids)
    assert [request.sender.tokens for request in good] == [expected] * 2


def _failing(method: Any, prompt: list[int], tokens: int) -> Any:
    def wrapped(self: Generation) -> Any:
        if list(self.prompt) == prompt and len(self.emitted) >= tokens:
            raise RuntimeError("the card fell off")
        return method(self)

    return wrapped


@pytest.mark.parametrize(("stream", "call"), [(True, 1), (True, 3), (False, 1)])
def test_a_send_that_fails_is_followed_by_one_error(served: Backend, stream: bool, call: int) -> None:
    """SV-04: inside send()."""
    bad = TritonRequest(
        ids=[13], max_new_tokens=20, draft_tokens=0, stream=stream, send_fails=lambda number: number == call
    )
    other = TritonRequest(ids=[14], max_new_tokens=4)
    responses, _ = ask(served, bad, other)
    require_well_formed(bad.sender.sent)
    assert "could not be sent" in responses[-1].error.text  # type: ignore[union-attr]
    assert bad.sender.calls == call + 1
    assert other.sender.tokens == [15, 16, 17, 18]


def test_a_sender_that_never_takes_anything_is_tried_twice_and_holds_no_slot(served: Backend) -> None:
    """SV-04: nothing is sent after an error that could not be sent either."""
    dead = [TritonRequest(ids=[13], max_new_tokens=40, send_fails=lambda number: True) for _ in range(6)]
    assert served.execute(dead) is None
    ask(served, *(TritonRequest(ids=[14], max_new_tokens=4) for _ in range(3)))
    assert [request.sender.calls for request in dead] == [2] * 6


def test_requests_of_one_call_share_rounds(served: Backend, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three slots, five requests: rounds of three; control: one request alone has rounds of one."""
    widths: list[int] = []
    plain = Metrics.round

    def recorded(self: Metrics, rows: Sequence[int], scheduler: Scheduler) -> None:
        widths.append(len(rows))
        plain(self, rows, scheduler)

    monkeypatch.setattr(Metrics, "round", recorded)
    ask(served, TritonRequest(ids=[13], max_new_tokens=9))
    assert max(widths) == 1
    ask(served, *(TritonRequest(ids=[13 + number], max_new_tokens=12) for number in range(5)))
    assert max(widths) == 3


def test_one_thread_makes_every_call(chain: Path, tmp_path: Path) -> None:
    """Calls from two threads crash a real server; here they are counted."""
    requests = [TritonRequest(ids=[13 + number], max_new_tokens=12) for number in range(8)]
    with loaded(arguments(chain, tmp_path / "m")) as model:
        ask(model, *requests[:4])
        ask(model, *requests[4:])
    threads = {thread for request in requests for thread in request.sender.threads}
    assert len(threads) == 1
    requests[0].sender.is_cancelled()
    assert len(requests[0].sender.threads) == 2, "control: another thread would be counted"


def test_unloading_ends_every_request_once(chain: Path, tmp_path: Path) -> None:
    requests = [TritonRequest(ids=[13 + number], max_new_tokens=40, draft_tokens=0) for number in range(6)]
    with loaded(arguments(chain, tmp_path / "m")) as model:
        model.execute(requests)
    for request in requests:
        require_well_formed(request.sender.sent)
        assert request.sender.responses[-1].word("finish_reason") in ("cancelled", "length")


def test_a_broken_engine_tells_everybody_and_refuses_who_comes_later(
    chain: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Scheduler) -> bool:
        raise RuntimeError("no such round")

    with loaded(arguments(chain, tmp_path / "m")) as model:
        monkeypatch.setattr(Scheduler, "step", broken)
        first, second = (TritonRequest(ids=[13], max_new_tokens=5) for _ in range(2))
        ((one,),) = ask(model, first)
        ((other,),) = ask(model, second)
        assert "no such round" in one.error.text  # type: ignore[union-attr]
        assert "takes no more requests" in other.error.text  # type: ignore[union-attr]
        assert other.error.code == Utils.TritonError.UNAVAILABLE  # type: ignore[union-attr]
