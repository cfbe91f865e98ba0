"""What a request may ask of the form of its answer, from outside: refusals by name, flags, JSON lines, records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mtp_engines.errors import RequestError
from mtp_runtime import Model, Request, load
from mtp_runtime.cli import requests_from_file
from mtp_runtime.constraints.flags import grammar_of, schema_of
from mtp_runtime.records import footer_of, record_of
from tests.runtime.decoding import PROMPT
from tests.support import command_refused, refused, run_command

REFUSED: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"regex": "a", "choice": ["a"]}, ("regex and choice", "one form")),
    ({"json_object": True, "json_schema": {}}, ("json_schema and json_object", "one form")),
    ({"constraint_after": "</think>"}, ("constraint_after is '</think>'", "add one of json_schema")),
    ({"constraint_after": "", "regex": "a"}, ("constraint_after is an empty text", "regex holds from the first")),
    ({"choice": []}, ("choice is an empty list", "at least one")),
    ({"regex": "a", "min_new_tokens": 2}, ("min_new_tokens is 2", "with regex", "leave one of the two out")),
    ({"regex": "(a"}, ("regex was refused", "unclosed group", "Correct it")),
    ({"regex": "a(?=b)"}, ("regex was refused", "look-around")),
    ({"regex": "a\\"}, ("regex was refused", "single backslash")),
    ({"regex": "[^\\s\\S]"}, ("regex allows no text",)),
    ({"regex": "\ud800"}, ("regex is not valid UTF-8",)),
    ({"choice": ["a", "\ud800"]}, ("choice is not valid UTF-8",)),
    ({"regex": "a", "constraint_after": "\ud800"}, ("not valid UTF-8",)),
    ({"grammar": "start: other"}, ("grammar was refused", 'unknown name: "other"')),
    ({"grammar": 'start: "a'}, ("grammar was refused", "lexer error")),
    ({"grammar": ""}, ("grammar was refused", "no start rule")),
    ({"json_schema": False}, ("json_schema was refused", "schema is false")),
    ({"json_schema": {"not": {}}}, ("json_schema was refused", 'Unimplemented keys: ["not"]')),
    ({"json_schema": {"type": "array", "uniqueItems": True}}, ("json_schema was refused", "uniqueItems")),
    ({"json_schema": {"type": "banana"}}, ("json_schema was refused", "Invalid type: banana")),
    ({"json_schema": {"enum": []}}, ("json_schema was refused", "Unsatisfiable")),
    ({"json_schema": {"minimum": float("nan")}}, ("json_schema was refused", "Out of range float")),
    ({"json_schema": {"const": object}}, ("json_schema was refused", "not JSON serializable")),
    ({"json_schema": {"x-guidance": 5}}, ("json_schema was refused", "JsonCompileOptions")),
    ({"json_schema": "{}"}, ("json_schema", "'{}'", "dictionary")),
    ({"choice": "yes"}, ("choice", "'yes'", "list")),
    ({"regex": 5}, ("regex", "5", "string")),
    ({"json_object": 1}, ("json_object", "boolean")),
    ({"skip_special_tokens": "no"}, ("skip_special_tokens", "boolean")),
]


@pytest.mark.parametrize(("options", "parts"), REFUSED, ids=[ascii(options) for options, _ in REFUSED])
def test_what_cannot_be_asked_is_refused_by_name_whatever_k_is(
    carried: Model, options: dict[str, Any], parts: tuple[str, ...]
) -> None:
    """At once, before anything is generated."""
    for draft_tokens in (0, 3):
        with refused(*parts, error=RequestError):
            carried.generate(prompt="a", draft_tokens=draft_tokens, **options)


def test_a_long_reason_is_cut(carried: Model) -> None:
    with pytest.raises(RequestError, match=r"^regex was refused: .{300}…\. Correct it\.$"):
        carried.generate(prompt="a", regex=f"(?{'y' * 5000}")


def test_a_bundle_without_a_tokenizer_takes_no_constraint(world: Model) -> None:
    for options in ({"regex": "a"}, {"json_object": True}, {"choice": ["a"]}):
        with refused(next(iter(options)), "no tokenizer", "leave it out", error=RequestError):
            world.generate(prompt_ids=PROMPT, **options)


def test_a_bad_constraint_is_refused_before_the_engine_is_opened(
    carried: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mtp_runtime.api.open_engine", lambda *_: pytest.fail("the engine was opened"))
    requests = [Request(prompt="a", json_object=True), Request(prompt="a", regex="(")]
    with refused("prompt 2 of 2: regex was refused", error=RequestError):
        load(carried.bundle.directory, requests=requests)


def test_what_is_left_out_asks_for_nothing(carried: Model) -> None:
    free = carried.complete(prompt="The", max_new_tokens=8)
    said = carried.complete(prompt="The", max_new_tokens=8, json_object=False, choice=None, regex=None)
    assert said.token_ids == free.token_ids
    assert said.constraint is None
    assert "constraint" not in record_of(Request(prompt="The"), said)
    assert "constraint" not in footer_of(said)


def test_every_output_says_whether_the_answer_is_complete(carried: Model) -> None:
    request = Request(prompt="The", regex="[a-z]{20}", max_new_tokens=64)
    whole = carried.complete(request)
    assert (record_of(request, whole)["constraint"], whole.finish_reason) == ("complete", "eos")
    assert "; constraint complete]" in footer_of(whole)
    cut = carried.complete(request, max_new_tokens=3)
    assert (record_of(request, cut)["constraint"], cut.finish_reason) == ("incomplete", "length")
    assert "; constraint incomplete]" in footer_of(cut)
    nothing = carried.complete(request, max_new_tokens=0)
    assert (nothing.constraint, nothing.finish_reason) == ("incomplete", "length")
    stopped = carried.complete(prompt="The", regex="[a-z]{20}", stop=[whole.text[5]])
    assert (stopped.constraint, stopped.finish_reason) == ("incomplete", "stop")


def test_json_lines_have_the_same_names(tmp_path: Path) -> None:
    lines = tmp_path / "lines.jsonl"
    asked: list[dict[str, Any]] = [
        {"json_schema": {"type": "integer"}},
        {"json_schema": True, "constraint_after": "</think>"},
        {"json_object": True},
        {"regex": "a"},
        {"grammar": 'start: "a"'},
        {"choice": ["ja", "nein"]},
        {"skip_special_tokens": False},
    ]
    lines.write_text("\n".join(json.dumps({"prompt": "a", **one}) for one in asked))
    for request, one in zip(requests_from_file(lines, {}), asked, strict=True):
        assert {name: getattr(request, name) for name in one} == one


def test_a_schema_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "schema.json"
    file.write_text('{"type": "null"}')
    assert schema_of(str(file)) == {"type": "null"}
    assert schema_of(' {"type": "null"}') == {"type": "null"}
    assert schema_of("true") is True
    with refused("--json-schema is not valid JSON", "Correct the schema", error=RequestError):
        schema_of('{"type": "null"')
    with refused("absent.json", "cannot be read", "No such file", error=RequestError):
        schema_of("absent.json")
    file.write_text("[1]")
    with refused("schema.json holds '[1]'", "expected a JSON object", error=RequestError):
        schema_of(str(file))
    file.write_bytes(b"\xff")
    with refused("not UTF-8", error=RequestError):
        schema_of(str(file))


def test_a_grammar_is_a_text_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "yes.lark"
    file.write_text('start: "yes"')
    assert grammar_of(str(file)) == 'start: "yes"'
    assert grammar_of('start: "no"') == 'start: "no"'
    with refused("no.lark", "cannot be read", error=RequestError):
        grammar_of("no.lark")


def test_the_command_takes_every_form(carried: Model, tmp_path: Path) -> None:
    """And a line of a file its own."""
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "a"}\n{"prompt": "b", "choice": ["no"], "json_schema": null}')
    schema = '{"type": "object", "properties": {}, "additionalProperties": false}'
    arguments = ["--prompts", lines, "--json-schema", schema, "--json", "--max-new-tokens", 40]
    done = run_command("mtp-run", "generate", carried.bundle.directory, *map(str, arguments))
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    assert (json.loads(first["text"]), first["constraint"]) == ({}, "complete")
    assert (second["text"], second["constraint"]) == ("no", "complete")
    wrong = run_command("mtp-run", "generate", carried.bundle.directory, "--prompt", "a", "--regex", "(")
    command_refused(wrong, "regex was refused", "unclosed group")
