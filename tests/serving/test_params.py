"""`param` of an error: the field that is at fault, where it is one."""

from __future__ import annotations

from typing import Any

import pytest

from mtp_serving.openai import service
from mtp_serving.openai.bodies import ChatBody, CompletionBody
from mtp_serving.openai.errors import ApiError
from mtp_serving.openai.params import param_of
from tests.serving.server import Running

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PROMPT: dict[str, Any] = {"prompt": "a"}
MESSAGES: dict[str, Any] = {"messages": [{"role": "user", "content": "y"}]}
AT_FAULT: list[tuple[str, dict[str, Any], str | None]] = [
    (TEXT, {"temperature": -1}, "temperature"),
    (TEXT, {"temperature": 1e300}, "temperature"),
    (TEXT, {"max_tokens": -1}, "max_tokens"),
    (TEXT, {"min_tokens": -1}, "min_tokens"),
    (TEXT, {"n": 0}, "n"),
    (TEXT, {"n": 10**6}, "n"),
    (TEXT, {"prompt": ["a"] * 300}, "prompt"),
    (TEXT, {"prompt": [99999]}, "prompt"),
    (TEXT, {"prompt": ["a", "a" * 3000]}, "prompt"),
    (CHAT, {"messages": [{"role": "user", "content": "y" * 3000}]}, "messages"),
    (CHAT, {"messages": []}, "messages"),
    (TEXT, {"stop": [""]}, "stop"),
    (TEXT, {"stop": ["x"] * 65}, "stop"),
    (TEXT, {"logit_bias": {"99999": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"-1": 1}}, "logit_bias"),
    (TEXT, {"logit_bias": {"1": 1e308}}, "logit_bias"),
    (TEXT, {"bad_words": [" "]}, "bad_words"),
    (TEXT, {"draft_tokens": 99}, "draft_tokens"),
    (TEXT, {"drafter": "draft-model"}, "drafter"),
    (TEXT, {"draft_confidence": 2.0}, "draft_confidence"),
    (TEXT, {"relaxed_top_k": 0, "acceptor": "relaxed"}, "relaxed_top_k"),
    (TEXT, {"timeout": 0}, "timeout"),
    (TEXT, {"constraint_after": "x"}, "constraint_after"),
    (TEXT, {"structured_outputs": {"regex": "("}}, "structured_outputs"),
    (TEXT, {"structured_outputs": {"choice": []}}, "structured_outputs"),
    (CHAT, {"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "response_format"),
    (CHAT, {"chat_template_kwargs": {"messages": 1}}, "chat_template_kwargs"),
    (CHAT, {"tool_choice": "required"}, "tool_choice"),
    (TEXT, {"echo": True}, "echo"),
    # Two contradict each other, and either may go.
    (TEXT, {"n": 2, "temperature": 0}, None),
    (TEXT, {"min_tokens": 9, "max_tokens": 8}, None),
    (TEXT, {"min_tokens": 2, "ignore_eos": True}, None),
    (TEXT, {"min_tokens": 2, "structured_outputs": {"regex": "a"}}, None),
    (TEXT, {"relaxed_top_k": 3}, None),
    (TEXT, {"drafter": "none", "draft_tokens": 3}, None),
]


@pytest.mark.parametrize(("path", "body", "param"), AT_FAULT, ids=lambda value: ascii(value)[:60])
def test_one_field_at_fault_is_named(server: Running, path: str, body: dict[str, Any], param: str | None) -> None:
    given = (MESSAGES if path == CHAT else PROMPT) | body
    for stream in (False, True):
        response = server.post(path, {**given, "stream": stream})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == param, response.text


def test_a_failure_of_the_server_names_no_field(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*given: Any) -> None:
        raise ZeroDivisionError("temperature is 3")

    monkeypatch.setattr(service, "refused_by_bundle", broken)
    response = server.post(TEXT, PROMPT)
    assert (response.status_code, response.json()["error"]["param"]) == (500, None)


def test_words_that_are_fields_elsewhere_name_none() -> None:
    text = CompletionBody(model="m", prompt="a")
    assert (
        param_of("every token is masked; loosen logit_bias, bad_words, min_new_tokens or the constraint.", text) is None
    )
    assert param_of("drafter is 'draft-model', but no draft model was loaded; give its bundle.", text) == "drafter"
    said = "the prompt has 300 tokens, and prompt and answer together may have 256."
    assert param_of(said, text) == "prompt"
    assert param_of(said, ChatBody(model="m", messages=[])) == "messages"
    assert param_of("regex was refused: unclosed group.") is None, "without the body nobody knows where it stood"


def test_a_message_does_not_say_again_all_that_was_sent() -> None:
    told = ApiError(f"the model {'x' * 100_000} is not here; ask for another.").body["error"]["message"]
    assert len(told) < 1_100
    assert told.startswith("the model xxx")
    assert told.endswith("is not here; ask for another.")
    short = "n is 0, expected 1 or more."
    assert ApiError(short).body["error"]["message"] == short
