"""What a response says besides its text: log-probabilities, usage, statistics, forms, and why it ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mtp_runtime import Model
from mtp_runtime.batching.options import BatchOptions
from mtp_runtime.request import Request
from tests.fixtures.checkpoints import markov_checkpoint
from tests.serving.conftest import Speaker
from tests.serving.server import NAME, Running, serving
from tests.support import build_bundle, load_model

PROMPT = "The function returns"
MESSAGES = [{"role": "user", "content": "What is a view?"}]
SCHEMA = {
    "type": "object",
    "properties": {"level": {"enum": [1, 2]}, "log": {"type": "boolean"}},
    "required": ["level", "log"],
    "additionalProperties": False,
}


def chunks_of(server: Running, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The objects of a stream, as they are sent; the last line says that it is over."""
    response = server.post(path, {**body, "stream": True})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_logprobs_of_completions(server: Running, carried: Model) -> None:
    expected = carried.complete(prompt=PROMPT, max_new_tokens=12, temperature=0.7, seed=3, logprobs=2)
    client = server.openai()
    request = {"model": NAME, "prompt": PROMPT, "max_tokens": 12, "temperature": 0.7, "seed": 3, "logprobs": 2}
    (choice,) = client.completions.create(**request).choices
    scores = choice.logprobs
    assert scores is not None
    assert expected.logprobs is not None
    assert scores.token_logprobs == [one.logprob for one in expected.logprobs]
    assert [list(top.values()) for top in scores.top_logprobs or []] == [
        [value for _, value in one.top] for one in expected.logprobs
    ]
    assert "".join(scores.tokens or []) == choice.text
    for token, offset in zip(scores.tokens or [], scores.text_offset or [], strict=True):
        assert choice.text[offset:].startswith(token)
    together: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
    for chunk in chunks_of(server, "/v1/completions", request):
        for name, values in (chunk["choices"][0]["logprobs"] or {}).items():
            together[name] += values
    assert together == scores.model_dump()


def test_logprobs_of_chats(server: Running, carried: Model) -> None:
    expected = carried.complete(messages=MESSAGES, max_new_tokens=12, logprobs=3)
    client = server.openai()
    request = {
        "model": NAME,
        "messages": MESSAGES,
        "max_tokens": 12,
        "temperature": 0,
        "logprobs": True,
        "top_logprobs": 3,
    }
    (choice,) = client.chat.completions.create(**request).choices
    assert choice.logprobs is not None
    content = choice.logprobs.content or []
    assert expected.logprobs is not None
    assert [one.logprob for one in content] == [one.logprob for one in expected.logprobs]
    assert b"".join(bytes(one.bytes or []) for one in content).decode() == choice.message.content
    assert [[top.logprob for top in one.top_logprobs] for one in content] == [
        [value for _, value in one.top] for one in expected.logprobs
    ]
    streamed = [
        entry
        for chunk in chunks_of(server, "/v1/chat/completions", request)
        for entry in (chunk["choices"][0]["logprobs"] or {}).get("content", [])
    ]
    assert streamed == [one.model_dump() for one in content]


def test_usage_counts_cached_tokens_and_the_stream_tells_it_last(carried: Model) -> None:
    ids = carried.prompts.encode(Request(messages=MESSAGES))
    options = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    with serving(carried, BatchOptions(prefix_bytes=1 << 24)) as server:
        first = server.post("/v1/completions", {"prompt": ids, **options}).json()
        # The conversation goes on: what was said, and two tokens more.
        turn = {"prompt": [*ids, *first["choices"][0]["token_ids"], 5, 6], **options}
        again = server.post("/v1/completions", turn).json()
        several = server.post("/v1/completions", {**turn, "temperature": 1.0, "n": 2}).json()
        chunks = chunks_of(server, "/v1/completions", {**turn, "stream_options": {"include_usage": True}})
        assert server.metrics()["mtp:prefix_cache_hits_total"] > 0
    with serving(carried, BatchOptions(prefix_bytes=0)) as server:
        cold = server.post("/v1/completions", turn).json()
    assert first["usage"] == {
        "prompt_tokens": len(ids),
        "completion_tokens": 8,
        "total_tokens": len(ids) + 8,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    assert len(ids) <= again["usage"]["prompt_tokens_details"]["cached_tokens"] < len(turn["prompt"])  # type: ignore[arg-type]
    assert again["choices"] == cold["choices"], "what was read before changes no token"
    assert cold["usage"]["prompt_tokens_details"]["cached_tokens"] == 0, "control: without a budget nothing is kept"
    assert several["usage"]["prompt_tokens"] == len(turn["prompt"]), "a prompt counts once"  # type: ignore[arg-type]
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= len(ids)
    assert chunks[-1]["choices"] == []
    assert [chunk["usage"] for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)


def test_speculative_statistics_on_request(server: Running, carried: Model) -> None:
    body = {"prompt": [PROMPT, "import "], "max_tokens": 24, "temperature": 0, "speculative_stats": True}
    response = server.post("/v1/completions", body).json()
    chunks = chunks_of(server, "/v1/completions", body)
    finished = [carried.complete(prompt=prompt, max_new_tokens=24) for prompt in body["prompt"]]  # type: ignore[attr-defined]
    for stats in (response["speculative_stats"], chunks[-1]["speculative_stats"]):
        assert stats["drafted"] == sum(one.stats.drafted for one in finished) > 0
        assert stats["accepted"] == sum(one.stats.accepted for one in finished) > 0
    plain = server.post("/v1/completions", {**body, "speculative_stats": False}).json()
    assert "speculative_stats" not in plain
    assert "choices" in chunks[-1], "clients look there"


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_a_form_is_kept(server: Running, stream: bool, draft_tokens: int) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "settings", "schema": SCHEMA, "strict": True}}
    for asked, check in (
        ({"response_format": schema}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
        ({"structured_outputs": {"json": SCHEMA}}, lambda text: jsonschema.validate(json.loads(text), SCHEMA)),
        ({"structured_outputs": {"choice": ["yes", "no"]}}, lambda text: {"yes": 1, "no": 1}[text]),
        ({"structured_outputs": {"regex": "[0-9]{3}"}}, lambda text: int(text)),
        ({"structured_outputs": {"grammar": 'start: "a" "b"'}}, lambda text: {"ab": 1}[text]),
    ):
        for seed in range(3):
            body = {"messages": MESSAGES, "max_tokens": 60, "seed": seed, "draft_tokens": draft_tokens, **asked}
            if stream:
                choices = [chunk["choices"][0] for chunk in chunks_of(server, "/v1/chat/completions", body)]
                text = "".join(choice["delta"].get("content", "") for choice in choices)
                ending = choices[-1]
            else:
                (ending,) = server.post("/v1/chat/completions", body).json()["choices"]
                text = ending["message"]["content"]
            check(text)
            assert (ending["finish_reason"], ending["constraint"]) == ("stop", "complete")
    free = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 60}).json()["choices"][0]
    with pytest.raises(ValueError):  # noqa: PT011
        json.loads(free["message"]["content"])


def test_a_json_object_that_is_cut_says_so(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 1, "response_format": {"type": "json_object"}}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["finish_reason"], choice["constraint"]) == ("length", "incomplete")
    text = server.post("/v1/completions", {**body, "response_format": {"type": "text"}}).json()["choices"][0]
    assert "constraint" not in text


@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("asked", "reason", "own", "text"),
    [
        ({}, "stop", "eos", "zero one two three four five"),
        ({"stop": "three"}, "stop", "stop", "zero one two "),
        ({"stop": ["e four", "x"]}, "stop", "stop", "zero one two thre"),
        # The stop text and the limit, the end token and the limit, meet in one block.
        ({"stop": "three", "max_tokens": 4}, "stop", "stop", "zero one two "),
        ({"max_tokens": 7}, "stop", "eos", "zero one two three four five"),
        ({"max_tokens": 4}, "length", "length", "zero one two three"),
        ({"max_tokens": 1}, "length", "length", "zero"),
        ({"max_tokens": 0}, "length", "length", ""),
        ({"ignore_eos": True}, "length", "length", None),
    ],
)
def test_why_an_answer_ended(
    speaker: Speaker, asked: dict[str, Any], reason: str, own: str, text: str | None, stream: bool, draft_tokens: int
) -> None:
    model = speaker(("zero", " one", " two", " three", " four", " five"))
    # Without a limit of its own the last one ends with the context.
    body = {"messages": [{"role": "user", "content": "y"}], "temperature": 0, "draft_tokens": draft_tokens, **asked}
    with serving(model) as server:
        if stream:
            choices = [chunk["choices"][0] for chunk in chunks_of(server, "/v1/chat/completions", body)]
            said = "".join(choice["delta"].get("content", "") for choice in choices)
            assert [choice["finish_reason"] for choice in choices[:-1]] == [None] * (len(choices) - 1)
            ending = choices[-1]
        else:
            (ending,) = server.post("/v1/chat/completions", body).json()["choices"]
            said = ending["message"]["content"]
    assert (ending["finish_reason"], ending["stop_reason"]) == (reason, own)
    assert text is None or said == text


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_whose_time_is_over_ends_as_cut(server: Running, stream: bool) -> None:
    body = {"prompt": PROMPT, "max_tokens": 200, "ignore_eos": True, "timeout": 0.02, "temperature": 0}
    if stream:
        ending = chunks_of(server, "/v1/completions", body)[-1]["choices"][0]
    else:
        (ending,) = server.post("/v1/completions", body).json()["choices"]
    assert (ending["finish_reason"], ending["stop_reason"]) == ("length", "timeout")


def test_a_lossy_acceptor_is_named(server: Running) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "seed": 1, "acceptor": "typical"}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert (choice["lossy"], choice["acceptor"]) == (True, "typical")
    assert chunks_of(server, "/v1/completions", body)[-1]["choices"][0]["lossy"] is True
    (exact,) = server.post("/v1/completions", {**body, "acceptor": "coupled"}).json()["choices"]
    assert "lossy" not in exact
    assert exact["seed"] == 1


def test_the_default_temperature_is_that_of_the_interface(server: Running, carried: Model) -> None:
    body = {"prompt": PROMPT, "max_tokens": 12, "seed": 5}
    (choice,) = server.post("/v1/completions", body).json()["choices"]
    assert choice["text"] == carried.complete(prompt=PROMPT, max_new_tokens=12, temperature=1.0, seed=5).text
    assert choice["text"] != carried.complete(prompt=PROMPT, max_new_tokens=12).text, "control: not greedy"
    assert (
        len(
            server.post("/v1/completions", {"prompt": PROMPT, "return_token_ids": True}).json()["choices"][0][
                "token_ids"
            ]
        )
        <= 16
    )


def test_a_bundle_without_a_tokenizer_answers_in_ids(tmp_path: Path) -> None:
    markov_checkpoint(tmp_path / "checkpoint")
    model = load_model(build_bundle(tmp_path / "checkpoint", tmp_path / "bundle"))
    with serving(model) as server:
        body = {"prompt": [3, 4], "max_tokens": 3, "temperature": 0, "return_token_ids": True, "logprobs": 1}
        (choice,) = server.post("/v1/completions", body).json()["choices"]
        assert choice["token_ids"] == [5, 6, 7]
        assert choice["text"] == ""
        assert choice["logprobs"]["tokens"] == ["token_id:5", "token_id:6", "token_id:7"]
        for path, asked in (("/v1/completions", {"prompt": "a"}), ("/v1/chat/completions", {"messages": MESSAGES})):
            assert server.post(path, asked).status_code == 400


def test_several_answers_of_a_chat_come_apart(server: Running) -> None:
    body = {"messages": MESSAGES, "n": 3, "seed": 4, "max_tokens": 6}
    whole = server.post("/v1/chat/completions", body).json()["choices"]
    said: dict[int, list[Any]] = {}
    for chunk in chunks_of(server, "/v1/chat/completions", body):
        (choice,) = chunk["choices"]
        said.setdefault(choice["index"], []).append(choice)
    assert sorted(said) == [0, 1, 2]
    for number, choices in said.items():
        assert choices[0]["delta"]["role"] == "assistant"
        assert [choice["finish_reason"] for choice in choices][-1] == whole[number]["finish_reason"]
        assert "".join(choice["delta"].get("content", "") for choice in choices) == whole[number]["message"]["content"]
