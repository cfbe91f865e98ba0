"""Answers are taken apart in the same way wherever their text is cut, and no half delimiter is ever shown."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from mtp_serving.openai import parsing
from mtp_serving.openai.bodies import FunctionSpec
from mtp_serving.openai.calls import Fragment
from mtp_serving.openai.parsing import AnswerReader, Piece, Reading

WEATHER = FunctionSpec(
    name="weather",
    parameters={
        "type": "object",
        "properties": {
            "city": {"type": "string"},
            "days": {"type": "integer"},
            "metric": {"type": "boolean"},
            "code": {"type": ["string", "null"]},
            "where": {"type": "object"},
        },
    },
)
TOOLS = Reading(has_calls=True, functions=(WEATHER,))
HERMES = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome \\"}\\"", "days": 2}}\n</tool_call>'
TAGGED = (
    "<tool_call>\n<function=weather>\n<parameter=city>\nRome\nItaly\n</parameter>\n<parameter=days>\n2\n</parameter>\n"
    "<parameter=metric>\nTrue\n</parameter>\n<parameter=code>null</parameter>\n"
    '<parameter=where>{"at": [1, 2]}</parameter>\n</function>\n</tool_call>'
)

Calls = list[tuple[str, str]]


def read(reading: Reading, parts: Sequence[str]) -> tuple[str, str, Calls]:
    """Content, reasoning, and the calls with their arguments, of a text that comes in parts."""
    reader = AnswerReader(reading)
    pieces = [piece for part in parts for piece in reader.push(part)] + reader.finish()
    texts = {"content": "", "reasoning": ""}
    calls: Calls = []
    for piece in pieces:
        if isinstance(piece, Piece):
            assert piece.text, "an empty piece says nothing"
            texts[piece.kind] += piece.text
        elif piece.kind == "name":
            assert piece.index == len(calls), "calls are numbered in their order"
            calls.append((piece.text, ""))
        else:
            name, before = calls[piece.index]
            calls[piece.index] = (name, before + piece.text)
    assert reader.calls == len(calls)
    return texts["content"], texts["reasoning"], calls


def cut(text: str, seed: int) -> list[str]:
    """The text in random parts."""
    draw, parts = random.Random(seed), []
    while text:
        size = draw.choice((1, 1, 2, 3, 5, 9))
        parts.append(text[:size])
        text = text[size:]
    return parts


CASES: dict[str, tuple[Reading, str, tuple[str, str, Calls]]] = {
    "plain": (Reading(), "a <b> <tool_call> c", ("a <b> <tool_call> c", "", [])),
    "blanks only": (Reading(), " \n", (" \n", "", [])),
    "reasoning": (Reading(), "\n<think>\nhm < th\n</think>\n\n Yes", ("Yes", "\nhm < th\n", [])),
    "reasoning that the prompt began": (Reading(thinks=True), "hm</think>\n\nYes", ("Yes", "hm", [])),
    "reasoning without an end": (Reading(thinks=True), "hm </thin", ("", "hm </thin", [])),
    "the delimiter in the middle is content": (Reading(), "Say <think> twice", ("Say <think> twice", "", [])),
    "a delimiter that never ends": (Reading(), "a <think", ("a <think", "", [])),
    "call": (TOOLS, HERMES, ("", "", [("weather", '{"city": "Rome \\"}\\"", "days": 2}')])),
    "content, then calls": (
        TOOLS,
        f"Let me see.\n{HERMES}\n{HERMES}",
        ("Let me see.\n", "", [("weather", '{"city": "Rome \\"}\\"", "days": 2}')] * 2),
    ),
    "reasoning, then a call": (
        replace(TOOLS, thinks=True),
        f"what is <tool_call>?</think>\n{HERMES}",
        ("", "what is <tool_call>?", [("weather", '{"city": "Rome \\"}\\"", "days": 2}')]),
    ),
    "arguments before the name": (
        TOOLS,
        '<tool_call>{"arguments": {"city": "é"}, "name": "weather"}</tool_call>',
        ("", "", [("weather", '{"city": "é"}')]),
    ),
    "arguments as a text": (
        TOOLS,
        '<tool_call>{"name": "weather", "arguments": "{\\"days\\": 1}"}</tool_call>',
        ("", "", [("weather", '{"days": 1}')]),
    ),
    "no arguments": (TOOLS, '<tool_call>{"name": "now"}</tool_call>', ("", "", [("now", "{}")])),
    "cut in its arguments": (
        TOOLS,
        '<tool_call>{"name": "weather", "arguments": {"ci',
        ("", "", [("weather", '{"ci')]),
    ),
    "cut in its name": (TOOLS, '<tool_call>{"name": "wea', ('<tool_call>{"name": "wea', "", [])),
    "no call at all": (TOOLS, "<tool_call>what?</tool_call>!", ("<tool_call>what?</tool_call>!", "", [])),
    "tags": (
        TOOLS,
        TAGGED,
        (
            "",
            "",
            [
                (
                    "weather",
                    '{"city": "Rome\\nItaly", "days": 2, "metric": true, "code": null, "where": {"at": [1, 2]}}',
                )
            ],
        ),
    ),
    "tags without parameters": (
        TOOLS,
        "<tool_call><function=now></function></tool_call>",
        ("", "", [("now", "{}")]),
    ),
    "tags that were not closed": (
        TOOLS,
        "<tool_call><function=weather><parameter=city>Rome</tool_call>",
        ("", "", [("weather", '{"city": "Rome"}')]),
    ),
    "tags with a value of another type": (
        TOOLS,
        "<tool_call><function=weather><parameter=days>two</parameter><parameter=other>3</parameter></function>",
        ("", "", [("weather", '{"days": "two", "other": 3}')]),
    ),
    "all of it is a call": (
        Reading(is_call=True),
        ' {"name": "weather", "arguments": {"a": "</tool_call>"}}',
        ("", "", [("weather", '{"a": "</tool_call>"}')]),
    ),
    "special tokens": (
        replace(TOOLS, markers=("<|end|>", "<tool_call>", "</tool_call>", "<think>", "</think>")),
        f"<think>a<|end|></think>b<|end|>{HERMES}<|end|>",
        ("b", "a", [("weather", '{"city": "Rome \\"}\\"", "days": 2}')]),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_text_is_read_in_the_same_way_wherever_it_is_cut(name: str) -> None:
    reading, text, expected = CASES[name]
    assert read(reading, [text]) == expected
    assert read(reading, list(text)) == expected
    for seed in range(30):
        assert read(reading, cut(text, seed)) == expected


def test_control_a_reader_that_holds_nothing_back_shows_half_a_delimiter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parsing, "_beginning_of", lambda delimiters, text: 0)
    reading, text, expected = CASES["content, then calls"]
    assert read(reading, [text]) == expected, "the whole text needs nothing to be held back"
    assert read(reading, list(text)) != expected


def test_parts_of_a_call_come_before_its_end() -> None:
    reader = AnswerReader(TOOLS)
    told = reader.push('<tool_call>\n{"name": "weather", "arguments": {"city": "Ro')
    assert told == [Fragment(0, "name", "weather"), Fragment(0, "arguments", '{"city": "Ro')]
    assert reader.push("me") == [Fragment(0, "arguments", "me")]
    tags = AnswerReader(TOOLS)
    assert tags.push("<tool_call><function=weather><par") == [Fragment(0, "name", "weather")]
    assert tags.push("ameter=days>3</parameter>") == [Fragment(0, "arguments", '{"days": 3')]


@pytest.mark.parametrize("value", ["1e999", "NaN", "[1, Infinity]", "'x'", ""])
def test_a_value_that_is_no_json_stays_a_text(value: str) -> None:
    text = f"<tool_call><function=f><parameter=a>{value}</parameter></function></tool_call>"
    ((_, arguments),) = read(TOOLS, [text])[2]

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is no JSON")

    assert json.loads(arguments, parse_constant=refuse) == {"a": value}
