"""The options of `mtp-run generate` that say what an answer must look like."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from mtp_engines.errors import RequestError


def constraint_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command, which takes those that were given in `sampling`, under their names in JSON."""

    @functools.wraps(command)
    def with_constraint(
        *args: Any,
        sampling: dict[str, Any],
        json_schema: str | None,
        json_object: bool,
        regex: str | None,
        grammar: str | None,
        choice: tuple[str, ...],
        constraint_after: str | None,
        keep_special_tokens: bool,
        **others: Any,
    ) -> Any:
        given = {
            "json_schema": None if json_schema is None else schema_of(json_schema),
            "json_object": json_object or None,
            "regex": regex,
            "grammar": None if grammar is None else grammar_of(grammar),
            "choice": list(choice) or None,
            "constraint_after": constraint_after,
            "skip_special_tokens": False if keep_special_tokens else None,
        }
        asked = {name: value for name, value in given.items() if value is not None}
        return command(*args, sampling=sampling | asked, **others)

    for option in reversed(
        [
            click.option("--json-schema", metavar="FILE|JSON", help="The answer is JSON of this schema."),
            click.option("--json-object", is_flag=True, help="The answer is a JSON object."),
            click.option("--regex", help="The answer matches this expression."),
            click.option("--grammar", metavar="FILE|TEXT", help="The answer follows this Lark grammar."),
            click.option("--choice", multiple=True, help="The answer is one of these texts; may repeat."),
            click.option("--constraint-after", help="Text of the answer that the form begins behind."),
            click.option("--keep-special-tokens", is_flag=True, help="Show special tokens in the text."),
        ]
    ):
        with_constraint = option(with_constraint)
    return with_constraint


def schema_of(given: str) -> Any:
    """A JSON schema from a text that begins like one, or from the file that the text names.

    Raises:
        RequestError: the file cannot be read, or holds no JSON object, true or false.
    """
    inline = given.lstrip().startswith("{") or given.strip() in ("true", "false")
    text = given if inline else _read("json-schema", given, "a JSON object")
    where = "--json-schema" if inline else given
    try:
        schema = json.loads(text)
    except ValueError as error:
        raise RequestError(f"{where} is not valid JSON: {error}. Correct the schema.") from error
    if not isinstance(schema, dict | bool):
        raise RequestError(f"{where} holds {text.strip()[:40]!r}, expected a JSON object, true or false as a schema.")
    return schema


def grammar_of(given: str) -> str:
    """A grammar from a text with a rule in it, or from the file that the text names.

    Raises:
        RequestError: the file cannot be read.
    """
    inline = ":" in given and not Path(given).is_file()
    return given if inline else _read("grammar", given, 'a grammar, such as start: "yes" | "no"')


def _read(option: str, file: str, other: str) -> str:
    if not file.strip():
        raise RequestError(f"--{option} is empty; give a file, or {other}.")
    try:
        return Path(file).read_text(encoding="utf-8")
    except OSError as error:
        raise RequestError(
            f"--{option} names the file {file!r}, which cannot be read: {error.strerror}. Give a file, or {other}."
        ) from error
    except UnicodeDecodeError as error:
        raise RequestError(f"--{option} names the file {file!r}, which is not UTF-8 text. Save it as UTF-8.") from error
