"""Tools: what the chat template is told, and what the answer must look like where a call is required."""

from __future__ import annotations

from typing import Any

from mtp_serving.openai.bodies import ChatBody, FunctionSpec, NamedTool


def offered(body: ChatBody) -> list[dict[str, Any]]:
    """Tools for the chat template; none where none may be called, so that the model does not try."""
    if body.tool_choice == "none":
        return []
    return [tool.model_dump(exclude_none=True) for tool in body.tools]


def is_forced(body: ChatBody) -> bool:
    """Whether the answer must be a call."""
    return body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)


def schema_of_a_call(body: ChatBody) -> dict[str, Any]:
    """JSON schema of the one call that a forced answer is: an object of its name and its arguments."""
    functions = [tool.function for tool in body.tools]
    if isinstance(body.tool_choice, NamedTool):
        functions = [function for function in functions if function.name == body.tool_choice.function.name]
    if len(functions) == 1:
        return _call(functions[0], "#")
    return {"anyOf": [_call(function, f"#/anyOf/{number}") for number, function in enumerate(functions)]}


def _call(function: FunctionSpec, place: str) -> dict[str, Any]:
    arguments = _moved(function.parameters, f"{place}/properties/arguments")
    return {
        "type": "object",
        "properties": {"name": {"const": function.name}, "arguments": {"type": "object"} | arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _moved(schema: Any, place: str) -> Any:
    """A schema whose references to its own parts hold where it is a part of another one."""
    if isinstance(schema, list):
        return [_moved(part, place) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {}
    for name, part in schema.items():
        own = name == "$ref" and isinstance(part, str) and part.startswith("#")
        moved[name] = place + part[1:] if own else _moved(part, place)
    moved.pop("$schema", None)
    return moved
