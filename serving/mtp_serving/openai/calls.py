"""Reads one call of a tool from the text of a model, as it comes.

Two forms are known: a JSON object, `{"name": "f", "arguments": {…}}`, and tags,
`<function=f><parameter=key>value</parameter></function>`, whose values have the types of the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from mtp_serving.openai.bodies import FunctionSpec

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{)', re.DOTALL)
_FUNCTION = re.compile(r"\s*<function=([^>\n]+)>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
_LAST_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)(?:</function>|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Fragment:
    """A part of a call: its name, which comes first, or the next part of its arguments, which are JSON."""

    index: int
    kind: Literal["name", "arguments"]
    text: str


class _Form(Protocol):
    told: bool

    def push(self, text: str) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        """Text that came."""

    def close(self, closed: bool) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        """Its end, or that of the whole answer."""


class CallReader:
    """One call.

    Attributes:
        raw: all text of it.
    """

    def __init__(self, index: int, functions: Sequence[FunctionSpec]) -> None:
        """It is call number `index` of its answer."""
        self._index, self._functions = index, functions
        self._form: _Form | None = None
        self.raw = ""

    @property
    def told(self) -> bool:
        """Whether it is a call: its name was told of."""
        return self._form is not None and self._form.told

    def push(self, text: str) -> Iterator[Fragment]:
        """Text that came; what can be told of it."""
        unread = text if self._form is not None else self.raw + text
        self.raw += text
        if self._form is None and (begun := self.raw.lstrip()):
            self._form = _TagForm(self._functions) if begun.startswith("<") else _JsonForm()
        if self._form is not None:
            yield from (Fragment(self._index, kind, part) for kind, part in self._form.push(unread))

    def close(self, *, closed: bool) -> Iterator[Fragment]:
        """The call has ended, or the answer did before it."""
        if self._form is not None:
            yield from (Fragment(self._index, kind, part) for kind, part in self._form.close(closed))


class _JsonForm:
    """Arguments go on as they are, once the name is known."""

    def __init__(self) -> None:
        self.told = False
        self._waiting = ""
        self._depth, self._in_string, self._escaped, self._ended = 0, False, False, False

    def push(self, text: str) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        if self.told:
            yield from self._value(text)
            return
        self._waiting += text
        head = _HEAD.match(self._waiting)
        name = None if head is None else _text_from(head.group(1))
        if head is not None and name is not None:
            self.told = True
            yield "name", name
            yield from self._value(self._waiting[head.end() :])

    def close(self, closed: bool) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        """In another order of its fields it has waited for its end."""
        if self.told:
            return
        try:
            call = json.loads(self._waiting)
            json.dumps(call, allow_nan=False)
        except (ValueError, RecursionError):
            return
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return
        arguments = call.get("arguments", call.get("parameters", {}))
        self.told = True
        yield "name", call["name"]
        yield "arguments", arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)

    def _value(self, text: str) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        """Up to the bracket that closes the object; what follows closes the call."""
        end = 0
        for character in text:
            if self._ended:
                break
            end += 1
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                self._ended = not self._depth
        if end:
            yield "arguments", text[:end]


class _TagForm:
    """Arguments come parameter by parameter."""

    def __init__(self, functions: Sequence[FunctionSpec]) -> None:
        self._schemas = {function.name: function.parameters for function in functions}
        self.told = self._ended = False
        self._waiting, self._name, self._count = "", "", 0

    def push(self, text: str) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        self._waiting += text
        if not self.told:
            begun = _FUNCTION.match(self._waiting)
            if begun is None:
                return
            self.told, self._name = True, begun.group(1).strip()
            self._waiting = self._waiting[begun.end() :]
            yield "name", self._name
        while parameter := _PARAMETER.match(self._waiting):
            self._waiting = self._waiting[parameter.end() :]
            yield "arguments", self._argument(*parameter.groups())
        if not self._ended and self._waiting.lstrip().startswith("</function>"):
            yield from self._end()

    def close(self, closed: bool) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        """A model that closes the call has closed what is in it, too."""
        if not self.told or self._ended or not closed:
            return
        if last := _LAST_PARAMETER.match(self._waiting):
            yield "arguments", self._argument(*last.groups())
        yield from self._end()

    def _end(self) -> Iterator[tuple[Literal["name", "arguments"], str]]:
        self._ended = True
        yield "arguments", "}" if self._count else "{}"

    def _argument(self, name: str, text: str) -> str:
        self._count += 1
        name = name.strip()
        properties = self._schemas.get(self._name, {}).get("properties")
        schema = properties.get(name) if isinstance(properties, dict) else None
        value = _value_of(text.removeprefix("\n").removesuffix("\n"), schema)
        before = "{" if self._count == 1 else ", "
        return f"{before}{json.dumps(name, ensure_ascii=False)}: {json.dumps(value, ensure_ascii=False)}"


def _value_of(text: str, schema: Any) -> Any:
    """A value by the type that its schema names; the text itself where it is none of that type."""
    named = schema.get("type") if isinstance(schema, dict) else None
    kinds = {named} if isinstance(named, str) else set(named) if isinstance(named, list) else set()
    if "string" in kinds and not ("null" in kinds and text.strip() == "null"):
        return text
    if "boolean" in kinds and text.strip().lower() in ("true", "false"):
        return text.strip().lower() == "true"
    try:
        value = json.loads(text)
        json.dumps(value, allow_nan=False)  # JSON as Python reads it has infinities.
    except (ValueError, RecursionError):
        return text
    return value


def _text_from(quoted: str) -> str | None:
    try:
        text = json.loads(quoted)
    except ValueError:
        return None
    return text if isinstance(text, str) else None
