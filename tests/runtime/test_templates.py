"""What a chat template is told besides the messages, and the bytes that a token stands for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mtp_engines.errors import RequestError
from mtp_runtime import Model
from mtp_runtime.constraints import grammars
from mtp_runtime.prompts import Prompts
from mtp_runtime.request import Request
from tests.fixtures.checkpoints import tinytext_tokenizer, write_tokenizer
from tests.support import refused

TEMPLATE = (
    "{% for tool in tools %}{{ tool.name }}{% endfor %}{% for message in messages %}{{ message.content }}{% endfor %}"
    "{% if loud %}!{% endif %}"
)
MESSAGES = [{"role": "user", "content": "m"}]
TOOLS = [{"name": "t"}, {"name": "u"}]


def prompts_of(directory: Path, template: str = TEMPLATE) -> Prompts:
    """A tokenizer of single characters, and one of two bytes that are parts of a character."""
    write_tokenizer(directory, tinytext_tokenizer([*"mtu!", b"\xc3", b"\xa9"]), chat_template=template)
    return Prompts(directory)


@pytest.mark.parametrize(
    ("told", "text"),
    [
        ({}, "m"),
        ({"tools": TOOLS}, "tum"),
        ({"tools": []}, "m"),
        ({"chat_template_kwargs": {"loud": True}}, "m!"),
        ({"chat_template_kwargs": {"loud": False}}, "m"),
        ({"tools": TOOLS, "chat_template_kwargs": {"loud": True, "unused": [1]}}, "tum!"),
    ],
)
def test_a_template_sees_tools_and_further_variables(tmp_path: Path, told: dict[str, Any], text: str) -> None:
    prompts = prompts_of(tmp_path)
    assert prompts.encode(Request(messages=MESSAGES, **told)) == ["mtu!".index(character) for character in text]
    assert prompts.encode(Request(prompt="m", chat=True, **told)) == ["mtu!".index(character) for character in text]


def test_what_no_template_can_be_told_of_is_refused(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path)
    for given in ({"prompt": "m"}, {"prompt_ids": [0]}):
        for name, value in (("tools", TOOLS), ("chat_template_kwargs", {"loud": True})):
            with refused(name, "give messages, or chat"):
                prompts.encode(Request(**given, **{name: value}))  # type: ignore[arg-type]
    for name in ("messages", "tools", "add_generation_prompt", "bos_token"):
        with refused(repr(name), "leave it out there"):
            prompts.encode(Request(messages=MESSAGES, chat_template_kwargs={name: 1}))


def test_whether_a_template_looks_at_a_variable(tmp_path: Path) -> None:
    prompts = prompts_of(tmp_path / "one")
    assert prompts.reads("tools")
    assert not prompts.reads("documents")
    with refused("not valid"):
        prompts_of(tmp_path / "two", "{% if %}").reads("tools")


def test_bytes_of_a_token_are_its_own(tmp_path: Path, carried: Model) -> None:
    prompts = prompts_of(tmp_path)
    assert [prompts.bytes_of(token) for token in range(7)] == [b"m", b"t", b"u", b"!", b"\xc3", b"\xa9", b""]
    text = "Straße: 5 €"
    tokenizer = carried.prompts.tokenizer
    assert tokenizer is not None
    assert b"".join(map(carried.prompts.bytes_of, tokenizer.encode(text).ids)).decode() == text
    assert carried.prompts.bytes_of(0) == b"<|endoftext|>"


def test_a_tokenizer_that_the_grammar_engine_cannot_read_still_has_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def refuse(tokenizer: object) -> None:
        tries.append(tokenizer)
        raise RequestError("it has gaps.")

    monkeypatch.setattr(grammars, "Vocabulary", refuse)
    prompts = prompts_of(tmp_path)
    assert [prompts.bytes_of(token) for token in (0, 1)] == [b"m", b"t"]
    assert len(tries) == 1, "it is read once"
