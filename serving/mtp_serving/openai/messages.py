"""Messages of a chat as the chat template expects them."""

from __future__ import annotations

import json
from typing import Any

from mtp_serving.openai.errors import ApiError

_KNOWN = ("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content")
_ROLES = {"developer": "system"}
"""Templates know the older name."""


def messages_for_template(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Text parts become one text, arguments of earlier calls an object, and a content that is null an empty text.

    Raises:
        ApiError: anything that a template could not be told of; names it.
    """
    return [_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _message(message: dict[str, Any], where: str) -> dict[str, Any]:
    given = {name: value for name, value in message.items() if value is not None and value != []}
    unknown = [name for name in given if name not in _KNOWN]
    if unknown:
        raise ApiError(f"{where} has the field {unknown[0]!r}, which is not supported; leave it out.", where)
    role = given.get("role")
    if not isinstance(role, str):
        raise ApiError(f"{where} has the role {role!r}, expected a text such as 'user'.", where)
    made: dict[str, Any] = {**given, "role": _ROLES.get(role, role)}
    calls = given.get("tool_calls")
    if calls is not None:
        made["tool_calls"] = _calls(calls, where)
    if "content" not in given and message.get("content", "") != [] and calls is None:
        raise ApiError(f"{where} has no content; give a text.", where)
    made["content"] = _text(given.get("content", ""), where)
    return made


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise ApiError(f"the content of {where} is no text and no list of parts; give a text.", where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ApiError(
                f"the content of {where} has a part of the type {kind!r}, and this model reads text alone; send parts "
                "of the type 'text'.",
                where,
            )
        texts.append(part["text"])
    return "".join(texts)


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    made = []
    for call in calls if isinstance(calls, list) else [None]:
        call = call if isinstance(call, dict) else {}
        function = call.get("function")
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"tool_calls of {where} has no function with a name in one of its calls; add it.", where)
        made.append({**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}})
    return made


def _arguments(given: Any, where: str) -> Any:
    """As an object, which some templates go through by name; a text that is none stays one."""
    if given is None or given == "":
        return {}
    if isinstance(given, dict):
        return given
    try:
        return json.loads(given)
    except (TypeError, ValueError, RecursionError) as error:
        raise ApiError(
            f"the arguments of a call in tool_calls of {where} are not valid JSON; send them as the model gave them.",
            where,
        ) from error
