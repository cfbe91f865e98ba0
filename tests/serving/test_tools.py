"""Tools and reasoning: what the template is told, what the client gets, and what a forced call looks like."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from mtp_runtime import Model
from mtp_serving.openai import parsing
from mtp_serving.openai.parsing import AnswerReader
from tests.fixtures.checkpoints import markov_checkpoint, tinytext_tokenizer, write_tokenizer
from tests.serving.conftest import CARRIED, TEMPLATE, Speaker
from tests.serving.server import NAME, Running, serving
from tests.support import build_bundle, copy_of, load_model

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"$ref": "#/$defs/days"}},
            "required": ["city", "days"],
            "additionalProperties": False,
            "$defs": {"days": {"enum": [1, 2, 3]}},
        },
    },
}
NOW = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
# Delimiters end in the middle of a token, and a cycle of four tokens holds several of them.
HERMES = (
    "<tool",
    '_call>\n{"na',
    'me": "weather", "argu',
    'ments": {"city"',
    ': "Rome", "days"',
    ": 2}",
    "}\n</too",
    "l_call>",
)
TAGGED = (
    "<tool_",
    "call><function=wea",
    "ther><parameter=ci",
    "ty>Rome</para",
    "meter><parameter=days>2<",
    "/parameter></func",
    "tion></tool_call>",
)
THINKING = ("<th", "ink>r", "ea", "son</thi", "nk>\nA", "ns", "wer")
CALL = ("weather", {"city": "Rome", "days": 2})
MESSAGES = [{"role": "user", "content": "y"}]


def asked(server: Running, stream: bool, **body: Any) -> dict[str, Any]:
    """What the official client gets of one answer: content, reasoning, calls, reason, and the parts that it came in."""
    client = server.openai()
    request = {"model": NAME, "messages": MESSAGES, "temperature": 0, **body}
    if not stream:
        (choice,) = client.chat.completions.create(**request).choices
        message = choice.message
        calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls or []]
        reasoning = getattr(message, "reasoning_content", None) or ""
        return {
            "content": message.content or "",
            "reasoning": reasoning,
            "calls": calls,
            "reason": choice.finish_reason,
            "parts": [],
        }
    got: dict[str, Any] = {"content": "", "reasoning": "", "reason": None, "parts": []}
    found: dict[int, list[str]] = {}
    for chunk in client.chat.completions.create(stream=True, **request):
        for choice in chunk.choices:
            delta = choice.delta
            got["content"] += delta.content or ""
            got["reasoning"] += getattr(delta, "reasoning_content", None) or ""
            got["parts"].append(delta.content or getattr(delta, "reasoning_content", None) or "")
            got["reason"] = choice.finish_reason or got["reason"]
            for call in delta.tool_calls or []:
                assert call.function is not None
                if call.id:
                    assert call.index not in found, "a call has one name"
                    found[call.index] = [call.function.name or "", ""]
                found[call.index][1] += call.function.arguments or ""
    return got | {"calls": [(name, json.loads(arguments)) for name, arguments in found.values()]}


def tear(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let text come in single characters: how much comes at once depends on who was faster."""
    push = AnswerReader.push
    monkeypatch.setattr(AnswerReader, "push", lambda self, text: [p for one in text for p in push(self, one)])


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("draft_tokens", [0, 3])
@pytest.mark.parametrize("pieces", [HERMES, TAGGED], ids=["json", "tags"])
def test_a_call_that_the_model_spells_reaches_the_client(
    speaker: Speaker, pieces: Sequence[str], draft_tokens: int, stream: bool
) -> None:
    with serving(speaker(pieces)) as server:
        extra = {"extra_body": {"draft_tokens": draft_tokens}}
        got = asked(server, stream, tools=[WEATHER, NOW], max_tokens=30, **extra)
        assert (got["calls"], got["content"], got["reason"]) == ([CALL], "", "tool_calls")
        assert not [part for part in got["parts"] if "<" in part], "half a delimiter was shown"
        text = "".join(pieces)
        for without in ({"tools": [WEATHER], "tool_choice": "none"}, {}):
            got = asked(server, stream, max_tokens=30, **without, **extra)
            assert (got["calls"], got["content"], got["reason"]) == ([], text, "stop")


def test_control_a_reader_that_holds_nothing_back_misses_the_call(
    speaker: Speaker, monkeypatch: pytest.MonkeyPatch
) -> None:
    tear(monkeypatch)
    with serving(speaker(HERMES)) as server:
        asking = {"tools": [WEATHER], "max_tokens": 30, "extra_body": {"draft_tokens": 0}}
        assert asked(server, True, **asking)["calls"] == [CALL], "held back, it is found in single characters too"
        monkeypatch.setattr(parsing, "_beginning_of", lambda delimiters, text: 0)
        got = asked(server, True, **asking)
    assert got["calls"] == []
    assert "<tool" in got["content"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_call_that_is_cut_says_so(speaker: Speaker, stream: bool) -> None:
    with serving(speaker(HERMES)) as server:
        body = {
            "model": NAME,
            "messages": MESSAGES,
            "temperature": 0,
            "tools": [WEATHER],
            "max_tokens": 5,
            "stream": stream,
        }
        response = server.post("/v1/chat/completions", body)
    assert '"finish_reason":"length"' in response.text
    assert '"name":"weather"' in response.text
    assert "Rome" in response.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_reasoning_is_told_apart(speaker: Speaker, draft_tokens: int, stream: bool) -> None:
    expected = {"content": "Answer", "reasoning": "reason", "calls": [], "reason": "stop"}
    extra = {"draft_tokens": draft_tokens}
    with serving(speaker(THINKING)) as server:
        got = asked(server, stream, max_tokens=30, extra_body=extra)
        assert {name: got[name] for name in expected} == expected
    opened = ("r", "ea", "son</thi", "nk>\nA", "ns", "wer")
    # The template ends with the delimiter, so that the answer begins within the reasoning.
    pieces = ["<think>", *opened]
    with serving(speaker(pieces)) as server:
        got = asked(server, stream, max_tokens=30, extra_body={**extra, "chat_template_kwargs": {"thinking": True}})
        assert {name: got[name] for name in expected} == expected


def test_the_template_is_told_of_tools_and_of_earlier_calls(speaker: Speaker) -> None:
    model = speaker(HERMES)
    with serving(model) as server:

        def prompt_of(**body: Any) -> int:
            response = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1, **body})
            assert response.status_code == 200, response.text
            return int(response.json()["usage"]["prompt_tokens"])

        assert prompt_of() == 3
        assert prompt_of(tools=[WEATHER, NOW]) == 5
        assert prompt_of(tools=[WEATHER, NOW], tool_choice="none") == 3
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"u": 1, "y": 2}'}}
        turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        # c, both names of its arguments, and u before its empty content.
        assert prompt_of(messages=[*MESSAGES, turn]) == 3 + 4


@pytest.fixture(scope="module")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """The carried checkpoint with a template that knows tools and can open a reasoning."""
    place = tmp_path_factory.mktemp("caller")
    checkpoint = copy_of(CARRIED, place / "checkpoint")
    (checkpoint / "chat_template.jinja").write_text(TEMPLATE)
    return load_model(build_bundle(checkpoint, place / "bundle", max_model_len=256, max_batch_size=2))


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("draft_tokens", [0, 3])
def test_a_forced_call_fits_the_schema_of_its_tool(caller: Model, draft_tokens: int, stream: bool) -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    names = set()
    with serving(caller) as server:
        for choice in ("required", named, {"type": "function", "function": {"name": "now"}}):
            for seed in range(3):
                options = {"temperature": 1.0, "seed": seed, "extra_body": {"draft_tokens": draft_tokens}}
                got = asked(server, stream, tools=[WEATHER, NOW], tool_choice=choice, max_tokens=100, **options)
                ((name, arguments),) = got["calls"]
                names.add(name)
                assert (got["content"], got["reason"]) == ("", "tool_calls")
                tool = {"weather": WEATHER, "now": NOW}[name]
                jsonschema.validate(arguments, tool["function"]["parameters"])  # type: ignore[index]
                assert choice == "required" or choice["function"]["name"] == name  # type: ignore[index]
        free = asked(server, stream, tools=[WEATHER, NOW], max_tokens=30)
    assert names == {"weather", "now"}
    assert free["calls"] == [], "control: unforced, this model calls nothing"


def test_a_form_begins_behind_the_reasoning(caller: Model) -> None:
    body = {
        "messages": MESSAGES,
        "max_tokens": 60,
        "temperature": 0,
        "chat_template_kwargs": {"thinking": True},
        "response_format": {"type": "json_object"},
    }
    with serving(caller) as server:
        response = server.post("/v1/chat/completions", body)
        (choice,) = response.json()["choices"]
        # This model never ends its reasoning, and nothing keeps it from that.
        assert choice["message"]["reasoning_content"]
        assert choice["constraint"] == "incomplete"
        (plain,) = server.post("/v1/chat/completions", {**body, "chat_template_kwargs": {}}).json()["choices"]
        assert plain["message"]["content"].startswith("{"), "control: without one it begins at once"


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"tools": [WEATHER], "response_format": {"type": "json_object"}}, "json_object and tools"),
        ({"tools": [WEATHER, WEATHER]}, "two tools have one name"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "x"}}}, "does not have"),
        ({"tool_choice": "required"}, "there are no tools"),
        ({"tools": [{"type": "retrieval"}]}, "tools"),
        ({"chat_template_kwargs": {"messages": []}}, "'messages'"),
    ],
)
def test_what_contradicts_itself_is_refused(caller: Model, body: dict[str, Any], said: str) -> None:
    with serving(caller) as server:
        response = server.post("/v1/chat/completions", {"messages": MESSAGES, **body})
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def test_tools_are_refused_where_the_template_has_no_place_for_them(server: Running) -> None:
    response = server.post("/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER]})
    assert response.status_code == 400
    assert "no place" in response.json()["error"]["message"]
    assert response.json()["error"]["param"] == "tools"
    none = server.post(
        "/v1/chat/completions", {"messages": MESSAGES, "tools": [WEATHER], "tool_choice": "none", "max_tokens": 1}
    )
    assert none.status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_delimiter_that_is_a_special_token_is_seen_and_others_are_left_out(tmp_path: Path, stream: bool) -> None:
    vocabulary = ["a", "Well", "<tool_call>", '{"name": "now", "arguments": {}}', "</tool_call>", "<eos>", *"ctuy"]
    markov_checkpoint(tmp_path / "checkpoint", eos=5)
    tokenizer = tinytext_tokenizer(vocabulary)
    # One of the two delimiters is a special token, as is the end.
    write_tokenizer(tmp_path / "checkpoint", tokenizer, eos=5, bos=2, chat_template=TEMPLATE)
    model = load_model(build_bundle(tmp_path / "checkpoint", tmp_path / "bundle"))
    assert set(parsing.special_markers(model.prompts.tokenizer)) == {"<tool_call>", "<eos>"}  # type: ignore[arg-type]
    with serving(model) as server:
        got = asked(server, stream, tools=[NOW], max_tokens=20)
    assert (got["calls"], got["content"], got["reason"]) == ([("now", {})], "Well", "tool_calls")
