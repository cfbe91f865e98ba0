"""What a request may ask for, and what the metrics tell of it."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from mtp_runtime.request import Request
from mtp_serving.triton.incoming import Delivery
from tests.serving.triton.fake import MetricFamily, TritonRequest, Utils, arguments, ask, loaded

REFUSED: list[tuple[dict[str, Any], str]] = [
    ({}, "needs exactly one of prompt"),
    ({"text": "5", "ids": [5]}, "needs exactly one of prompt"),
    ({"text": b"\xff\xfe"}, "text_input is not UTF-8 text"),
    ({"ids": [64]}, "token id 64"),
    ({"ids": []}, "the prompt has no tokens"),
    ({"ids": [5], "temprature": 1.0}, "'temprature'"),
    ({"ids": [5], "temperature": "warm"}, "temperature = 'warm'"),
    ({"ids": [5], "max_new_tokens": -1}, "max_new_tokens is -1"),
    ({"ids": [5], "draft_tokens": 9}, "draft_tokens is 9"),
    ({"ids": [5], "stream": "yes"}, "stream = 'yes'"),
    ({"ids": [5], "timeout": 0}, "time limit is 0"),
    ({"ids": [5], "priority": 1.5}, "priority = 1.5"),
    ({"ids": [5], "n": 2, "temperature": 1, "stream": False}, "with stream false there is one response"),
    ({"ids": [5], "prompt_ids": [5]}, "has prompt_ids twice, here and in input_ids"),
    ({"ids": [5], "max_new_tokens": 3, "parameters": {"max_new_tokens": 4}}, "has max_new_tokens twice"),
    ({"ids": [5], "parameters": {"sequence": 4}}, "'sequence'"),
    ({"ids": [5], "draft_branches": 1}, "draft_branches is 1"),
]


@pytest.mark.parametrize(("options", "part"), REFUSED, ids=[part for _, part in REFUSED])
def test_a_wrong_request_is_refused_by_name_and_the_others_complete(
    chain: Path, tmp_path: Path, options: dict[str, Any], part: str
) -> None:
    """SV-04: three requests in one execute(), the second of them wrong."""
    good = [TritonRequest(ids=[13], max_new_tokens=5) for _ in range(2)]
    with loaded(arguments(chain, tmp_path / "m")) as model:
        _, (response,), _ = ask(model, good[0], TritonRequest(**options), good[1])
    assert response.error is not None
    assert part in response.error.text
    assert response.error.code == Utils.TritonError.INVALID_ARG
    assert [request.sender.tokens for request in good] == [[14, 15, 16, 17, 18]] * 2


def test_options_may_come_as_parameters_too(chain: Path, tmp_path: Path) -> None:
    request = TritonRequest(ids=[13], temperature=0.0, parameters={"max_new_tokens": 3, "draft_tokens": 2})
    with loaded(arguments(chain, tmp_path / "m")) as model:
        ask(model, request)
    assert request.sender.tokens == [14, 15, 16]


def test_no_option_of_a_request_is_taken_by_the_delivery() -> None:
    assert not {field.name for field in fields(Request)} & {field.name for field in fields(Delivery)}


def test_several_answers_come_under_their_index(chain: Path, tmp_path: Path) -> None:
    request = TritonRequest(ids=[13], n=2, temperature=1.0, seed=4, max_new_tokens=6)
    with loaded(arguments(chain, tmp_path / "m")) as model:
        (responses,) = ask(model, request)
    ended = [response._values["index"].item() for response in responses if response.word("finish_reason")]
    assert sorted(ended) == [0, 1]


def test_a_full_queue_and_a_time_limit_are_told(chain: Path, tmp_path: Path) -> None:
    requests = [TritonRequest(ids=[13], max_new_tokens=40, draft_tokens=0) for _ in range(6)]
    late = TritonRequest(ids=[13], max_new_tokens=40, draft_tokens=0, microseconds=1)
    with loaded(arguments(chain, tmp_path / "m", max_queue=1)) as model:
        answers = ask(model, *requests)
        (last,) = ask(model, late)
    errors = [responses[-1].error for responses in answers]
    assert [error is None for error in errors] == [True] * 4 + [False] * 2
    assert {error.code for error in errors if error is not None} == {Utils.TritonError.UNAVAILABLE}
    assert last[-1].word("finish_reason") == "timeout"


def test_metrics_count_what_was_sent(chain: Path, tmp_path: Path) -> None:
    utils = Utils()
    requests = [TritonRequest(ids=[13 + number], max_new_tokens=9, draft_tokens=3) for number in range(5)]
    with loaded(arguments(chain, tmp_path / "m"), utils) as model:
        answers = ask(model, *requests)
        ask(model, TritonRequest(ids=[5], max_new_tokens=20, draft_tokens=0))
    values = {name: sum(family.values()) for name, family in utils.MetricFamily.values.items()}
    statistics = [responses[-1].statistics["stats"] for responses in answers]
    assert values["mtp:prompt_tokens_total"] == 6
    assert values["mtp:generation_tokens_total"] == 5 * 9 + 7
    prefix = "mtp:spec_decode_num_"
    assert values[f"{prefix}draft_tokens_total"] == sum(one["drafted"] for one in statistics) > 0
    assert values[f"{prefix}accepted_tokens_total"] == sum(one["accepted"] for one in statistics) > 0
    assert values[f"{prefix}accepted_tokens_per_pos_total"] == values[f"{prefix}accepted_tokens_total"]
    assert values[f"{prefix}drafts_total"] == sum(one["proposed_by_position"][0] for one in statistics)
    assert values["mtp:num_requests_running"] == values["mtp:num_requests_waiting"] == 0
    assert values["mtp:time_to_first_token_seconds"] == 6
    # One for each delivery behind the first; a row is one where nothing is drafted.
    cycles = sum(one["cycles"] for one in statistics)
    assert values["mtp:inter_token_latency_seconds"] == cycles + 7 - 1
    reasons = {
        dict(key)["finished_reason"]: value for key, value in _family(utils, "mtp:request_success_total").items()
    }
    assert reasons == {"length": 5, "eos": 1}
    assert all(dict(key)["instance"] == "m_0_0" for key in _family(utils, "mtp:prompt_tokens_total"))


def _family(utils: Utils, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    return utils.MetricFamily.values[name]


def test_a_server_without_histograms_has_everything_else(chain: Path, tmp_path: Path) -> None:
    utils = Utils()
    utils.MetricFamily = type("MetricFamily", (_Older,), {"values": {}})  # type: ignore[assignment]
    with loaded(arguments(chain, tmp_path / "m"), utils) as model:
        ask(model, TritonRequest(ids=[13], max_new_tokens=4))
    assert set(utils.MetricFamily.values) >= {"mtp:generation_tokens_total", "mtp:num_requests_running"}
    assert not [name for name in utils.MetricFamily.values if name.endswith("_seconds")]


class _Older(MetricFamily):
    """As before there were histograms."""

    HISTOGRAM = None  # type: ignore[assignment]


def test_a_server_without_metrics_serves(chain: Path, tmp_path: Path) -> None:
    class Refuses:
        COUNTER, GAUGE = 0, 1

        def __init__(self, **options: Any) -> None:
            raise Utils.TritonModelException("metrics are off")

    utils = Utils()
    utils.MetricFamily = Refuses  # type: ignore[assignment]
    request = TritonRequest(ids=[13], max_new_tokens=4)
    with loaded(arguments(chain, tmp_path / "m"), utils) as model:
        ask(model, request)
    assert request.sender.tokens == [14, 15, 16, 17]
