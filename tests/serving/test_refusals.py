"""What is refused, how, and that others are not harmed by it."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from mtp_runtime import Model
from mtp_runtime.batching.options import BatchOptions
from mtp_runtime.batching.scheduler import Scheduler
from mtp_runtime.loop import Generation
from mtp_serving.openai.service import Service
from tests.serving.server import NAME, Running, serving, wait_until

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "y"}]
LONG = {"prompt": "A", "max_tokens": 240, "ignore_eos": True, "temperature": 0, "draft_tokens": 0}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of a response; its shape is OpenAI's and its message ends as a sentence."""
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"].endswith("."), body["error"]["message"]
    assert "\n" not in body["error"]["message"]
    return dict(body["error"])


@pytest.mark.parametrize(
    ("path", "body", "parts"),
    [
        (TEXT, {"prompt": "a", "foo": 1, "bar": 2}, ["foo", "bar"]),
        (TEXT, {}, ["prompt is missing"]),
        (TEXT, {"prompt": 5}, ["prompt is 5", "string"]),
        (TEXT, {"prompt": []}, ["prompt is an empty list"]),
        (TEXT, {"prompt": [[]]}, ["no tokens"]),
        (TEXT, {"prompt": ["a", "a" * 3000]}, ["prompt 1", "256"]),
        (TEXT, {"prompt": "a", "max_tokens": "6"}, ["max_tokens is '6'", "integer"]),
        (TEXT, {"prompt": "a", "max_tokens": -1}, ["max_new_tokens is -1"]),
        (TEXT, {"prompt": "a", "temperature": -1}, ["temperature is -1"]),
        (TEXT, {"prompt": "a", "top_k": -5}, ["top_k is -5"]),
        (TEXT, {"prompt": "a", "n": 0}, ["n is 0"]),
        (TEXT, {"prompt": "a", "n": 2, "temperature": 0}, ["n is 2", "temperature"]),
        (TEXT, {"prompt": "a", "n": 10**6}, ["1000000 answers", "at most"]),
        (TEXT, {"prompt": ["a"] * 300}, ["300 answers", "at most 260"]),
        (TEXT, {"prompt": "a", "logprobs": 21}, ["logprobs is 21"]),
        (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, ["99999"]),
        (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, ["logit_bias"]),
        (TEXT, {"prompt": "a", "stop": [""]}, ["stop has an empty text"]),
        (TEXT, {"prompt": "a", "draft_tokens": 99}, ["draft_tokens is 99"]),
        (TEXT, {"prompt": "a", "draft_tokens": 2.5}, ["draft_tokens is 2.5", "auto"]),
        (TEXT, {"prompt": "a", "drafter": "oracle"}, ["drafter is 'oracle'"]),
        (TEXT, {"prompt": "a", "acceptor": "any"}, ["acceptor is 'any'"]),
        (TEXT, {"prompt": "a", "timeout": 0}, ["0", "time limit"]),
        (TEXT, {"prompt": "a", "stream_options": {"include_all": True}}, ["stream_options.include_all"]),
        (TEXT, {"prompt": "a", "response_format": {"type": "json_schema"}}, ["json_schema goes with the type"]),
        (TEXT, {"prompt": "a", "response_format": {"type": "xml"}}, ["response_format"]),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "("}}, ["regex was refused"]),
        (TEXT, {"prompt": "a", "structured_outputs": {"regex": "a", "choice": ["b"]}}, ["regex and choice"]),
        (
            TEXT,
            {"prompt": "a", "structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}},
            ["response_format and structured_outputs"],
        ),
        (TEXT, {"prompt": "a", "echo": True}, ["echo is not supported"]),
        (TEXT, {"prompt": "a", "best_of": 3}, ["best_of is not supported"]),
        (TEXT, {"prompt": "a", "suffix": "z"}, ["suffix is not supported"]),
        (TEXT, {"prompt": "a", "store": True}, ["store is not supported"]),
        (TEXT, {"prompt": "\ud800"}, ["UTF-8"]),
        (CHAT, {"messages": MESSAGES, "audio": {"voice": "x"}}, ["audio is not supported"]),
        (CHAT, {"messages": MESSAGES, "modalities": ["audio"]}, ["modalities is not supported"]),
        (CHAT, {"messages": MESSAGES, "functions": [{"name": "f"}]}, ["functions is not supported"]),
        (CHAT, {"messages": MESSAGES, "top_logprobs": 2}, ["top_logprobs goes with logprobs"]),
        (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 21}, ["top_logprobs is 21"]),
        (CHAT, {"messages": MESSAGES, "max_tokens": 3, "max_completion_tokens": 4}, ["max_completion_tokens differ"]),
        (CHAT, {"messages": []}, ["messages is empty"]),
        (CHAT, {"messages": [{"role": "user"}]}, ["messages[0]", "content"]),
        (CHAT, {"messages": [{"content": "a"}]}, ["messages[0]", "role"]),
        (CHAT, {"messages": [{"role": "user", "content": "a", "mood": 1}]}, ["messages[0]", "'mood'"]),
        (
            CHAT,
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            ["messages[0]", "'image_url'"],
        ),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            ["messages[0]", "not valid JSON"],
        ),
        (CHAT, {"messages": "hi"}, ["messages is 'hi'", "list"]),
        (TEXT, [1], ["no JSON object"]),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_cannot_be_served_is_refused_by_name(
    server: Running, path: str, body: Any, parts: list[str], stream: bool
) -> None:
    if stream and isinstance(body, dict):
        body = {**body, "stream": True}
    content = json.dumps({"model": NAME, **body} if isinstance(body, dict) else body)
    error = error_of(
        server.http.post(server.url + path, content=content, headers={"content-type": "application/json"}), 400
    )
    for part in parts:
        assert part in error["message"]


def test_options_of_a_stream_need_one(server: Running) -> None:
    error = error_of(server.post(TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}), 400)
    assert "stream_options goes with stream" in error["message"]


def test_neutral_values_that_clients_send_are_taken(server: Running) -> None:
    common = {
        "user": "u",
        "store": False,
        "metadata": {"a": "b"},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "logit_bias": None,
        "stop": None,
        "n": 1,
        "frequency_penalty": 0,
        "top_k": -1,
        "max_tokens": 2,
    }
    completion = {**common, "prompt": "a", "echo": False, "best_of": 1, "suffix": None, "logprobs": None}
    assert server.post(TEXT, completion).status_code == 200
    chat = {**common, "messages": MESSAGES, "modalities": ["text"], "audio": None, "tools": None, "tool_choice": None}
    assert server.post(CHAT, chat).status_code == 200


def test_bodies_that_are_no_requests(server: Running) -> None:
    def sent(content: bytes, kind: str = "application/json") -> httpx.Response:
        return server.http.post(server.url + TEXT, content=content, headers={"content-type": kind})

    assert "not valid JSON" in error_of(sent(b'{"model": "tiny"'), 400)["message"]
    error_of(sent(b"\xff\xfe"), 400)
    error_of(sent(b"[" * 100_000), 400)
    error_of(sent(b""), 400)
    assert "Content-Type" in error_of(sent(b'{"model": "tiny"}', "text/plain"), 400)["message"]
    assert "not found" in error_of(server.http.get(f"{server.url}/v1/nothing"), 404)["message"]
    error_of(server.http.get(server.url + TEXT), 405)
    surrogate = sent(b'{"model": "\\ud800", "prompt": "a"}')
    assert "does not exist" in error_of(surrogate, 404)["message"]
    assert server.post(TEXT, {"prompt": "a", "max_tokens": 2}).status_code == 200, "and the server goes on"


def test_another_model_is_not_there(server: Running) -> None:
    client = server.openai()
    with pytest.raises(openai.NotFoundError, match="'other' does not exist here; this server has 'tiny'"):
        client.completions.create(model="other", prompt="a")
    assert [model.id for model in client.models.list()] == [NAME]
    assert client.models.retrieve(NAME).id == NAME
    with pytest.raises(openai.NotFoundError, match="'other' does not exist"):
        client.models.retrieve("other")


def test_a_key_is_asked_for(carried: Model) -> None:
    with serving(carried, api_key="secret") as server:
        for path in (TEXT, CHAT):
            error = error_of(server.post(path, {"prompt": "a"}), 401)
            assert error["code"] == "invalid_api_key"
            assert "secret" not in error["message"]
        with pytest.raises(openai.AuthenticationError):
            server.openai(api_key="wrong").models.list()
        for raw in ("Bearer sécret".encode(), b"secret", b""):
            error_of(server.http.get(f"{server.url}/v1/models", headers={b"authorization": raw}), 401)
        assert [model.id for model in server.openai(api_key="secret").models.list()] == [NAME]
        for path in ("/health", "/health/ready", "/metrics"):
            assert server.http.get(server.url + path).status_code == 200


def test_a_large_body_is_refused_with_and_without_its_length(carried: Model) -> None:
    body = json.dumps({"model": NAME, "prompt": "a" * 2000, "max_tokens": 1}).encode()
    kind = {"content-type": "application/json"}

    def parts() -> Iterator[bytes]:
        for start in range(0, len(body), 100):
            yield body[start : start + 100]

    for limit, status in ((1000, 413), (len(body) - 1, 413), (len(body), 400)):
        # As large as may be it is read, and refused for its length in tokens.
        with serving(carried, max_body_bytes=limit) as server:
            for content in (body, parts()):
                error = error_of(server.http.post(server.url + TEXT, content=content, headers=kind), status)
                assert (str(limit) in error["message"]) == (status == 413)


def test_more_tokens_than_the_server_gives(carried: Model) -> None:
    with serving(carried, max_new_tokens=5) as server:
        error = error_of(server.post(TEXT, {"prompt": "a", "max_tokens": 6}), 400)
        assert "at most 5" in error["message"]
        for body in ({"max_tokens": 5}, {}):
            response = server.post(TEXT, {"prompt": "a", "ignore_eos": True, **body})
            assert response.json()["usage"]["completion_tokens"] == 5
        chat = server.post(CHAT, {"messages": MESSAGES, "ignore_eos": True})
        assert chat.json()["usage"]["completion_tokens"] == 5


def held(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Steps of schedulers wait while the list has an entry."""
    step, closed = Scheduler.step, [True]

    def waiting(self: Scheduler) -> bool:
        wait_until(lambda: not closed, "the scheduler may go on")
        return step(self)

    monkeypatch.setattr(Scheduler, "step", waiting)
    return closed


@pytest.mark.parametrize("stream", [False, True])
def test_a_full_queue_is_refused_with_the_time_to_come_again(
    carried: Model, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    closed = held(monkeypatch)
    with serving(carried, BatchOptions(slots=1, max_queue=1)) as server:
        client = server.openai()
        begun = [client.completions.create(model=NAME, prompt="a", max_tokens=2, stream=True) for _ in range(2)]
        response = server.post(TEXT, {"prompt": "a", "stream": stream})
        assert error_of(response, 429)["type"] == "rate_limit_error"
        assert int(response.headers["retry-after"]) > 0
        assert server.metrics()["mtp:num_requests_waiting"] == 2
        closed.clear()
        assert all(list(one)[-1].choices[0].finish_reason == "length" for one in begun)
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


def test_answers_that_nobody_fetches_count_as_under_way(carried: Model) -> None:
    with serving(carried, max_open=1) as server:
        body = {"model": NAME, "stream": True, **LONG}
        with server.http.stream("POST", server.url + TEXT, json=body) as open_stream:
            assert open_stream.status_code == 200
            assert "under way" in error_of(server.post(TEXT, {"prompt": "a"}), 429)["message"]
        wait_until(lambda: server.service.under_way == 0, "the stream that was left is over")
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_failing_answer_fails_its_own_request_alone(
    server: Running, carried: Model, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    cycle = Generation.cycle

    def broken(self: Generation) -> Any:
        if self.prompt == tuple(poison):
            raise ZeroDivisionError("a secret of the engine")
        return cycle(self)

    poison = [9, 8, 7]
    monkeypatch.setattr(Generation, "cycle", broken)
    before = server.metrics().get("mtp:request_success_total{finished_reason=error}", 0)
    body = {"prompt": poison, "max_tokens": 8, "stream": stream}
    if stream:
        response = server.post(TEXT, body)
        lines = [line.removeprefix("data: ") for line in response.text.split("\n\n") if line]
        error = json.loads(lines[-2])["error"]
        assert lines[-1] == "[DONE]"
        with pytest.raises(openai.APIError, match="the answer failed"):
            list(server.openai().completions.create(model=NAME, prompt=poison, max_tokens=8, stream=True))
    else:
        error = error_of(server.post(TEXT, body), 500)
    assert error["type"] == "server_error"
    assert "secret" not in error["message"]
    assert server.metrics()["mtp:request_success_total{finished_reason=error}"] > before
    good = server.post(TEXT, {"prompt": "import ", "max_tokens": 8, "temperature": 0}).json()
    assert good["choices"][0]["text"] == carried.complete(prompt="import ", max_new_tokens=8).text


def test_a_scheduler_that_fails_is_not_ready_and_nobody_waits_for_it(
    carried: Model, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(self: Scheduler) -> bool:
        raise MemoryError("no room")

    with serving(carried) as server:
        assert server.http.get(f"{server.url}/health/ready").json() == {"status": "ready"}
        monkeypatch.setattr(Scheduler, "step", broken)
        error_of(server.post(TEXT, {"prompt": "a"}), 500)
        ready = server.http.get(f"{server.url}/health/ready")
        assert (ready.status_code, ready.json()) == (503, {"status": "failed"})
        assert server.http.get(f"{server.url}/health").status_code == 200
        error_of(server.post(TEXT, {"prompt": "a"}), 503)
    assert "the scheduler failed" in caplog.text


def test_each_request_has_one_line_in_the_log(carried: Model, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mtp_serving.access")
    with serving(carried, BatchOptions(prefix_bytes=0)) as server:
        for stream in (False, True):
            body = {"prompt": ["A", "B"], "max_tokens": 6, "temperature": 0, "ignore_eos": True, "stream": stream}
            server.post(TEXT, body)
        server.post(TEXT, {"prompt": "a", "max_tokens": -1})
        server.http.get(f"{server.url}/v1/a%0Ab")
    lines = [record.getMessage() for record in caplog.records if record.name == "mtp_serving.access"]
    assert len(lines) == 4, lines
    for line in lines[:2]:
        assert re.fullmatch(
            r"cmpl-[0-9a-f]{24} ended=length prompt=2 cached=0 generated=12 drafted=\d+ accepted=\d+ "
            r"acceptance=0\.\d{3} first_s=\d+\.\d{3} total_s=\d+\.\d{3}",
            line,
        )
    assert lines[2].startswith("refused status=400 POST /v1/completions: max_new_tokens is -1")
    assert "\n" not in lines[3]
    assert lines[3].startswith("refused status=404 GET /v1/a")


def test_a_bug_is_told_as_no_more_than_that(carried: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Service, *given: Any) -> None:
        raise ZeroDivisionError("a secret of the server")

    with serving(carried) as server:
        monkeypatch.setattr(Service, "_plan", broken)
        for stream in (False, True):
            error = error_of(server.post(TEXT, {"prompt": "a", "stream": stream}), 500)
            assert "secret" not in error["message"]
            assert "ZeroDivisionError" in error["message"]
        monkeypatch.undo()
        assert server.post(TEXT, {"prompt": "a", "max_tokens": 1}).status_code == 200
        assert server.service.under_way == 0
