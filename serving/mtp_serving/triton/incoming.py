"""From the tensors and parameters of a Triton request to a request of the runtime."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any

import numpy.typing as npt
from pydantic import ConfigDict, ValidationError
from pydantic.dataclasses import dataclass as validated

from mtp_engines.errors import RequestError
from mtp_runtime.request import Request, ids_from, object_from_json, request_from

_PROMPTS = {"text_input": "prompt", "input_ids": "prompt_ids"}


@validated(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Delivery:
    """Options that say how an answer is scheduled and sent; they stand among those of the request.

    Attributes:
        stream: a response for every step; otherwise one with the whole answer.
        priority: higher ones go first.
        timeout: seconds after which it is given up.
    """

    stream: bool = True
    priority: int = 0
    timeout: float | None = None


@dataclass(frozen=True)
class Incoming:
    """What was asked for."""

    request: Request
    delivery: Delivery


def read(triton_request: Any) -> Incoming:
    """Read a request of the Python backend.

    Raises:
        RequestError: an input or option is of the wrong kind, unknown, or given twice.
    """
    values: dict[str, Any] = {}
    for tensor in triton_request.inputs():
        name, array = tensor.name(), tensor.as_numpy()
        if name == "input_ids":
            values["prompt_ids"] = ids_from(array)
        elif name == "text_input":
            values["prompt"] = _text(name, array)
        elif name == "options":
            _add(values, object_from_json(_text(name, array), "the input options"))
    _add(values, json.loads(triton_request.parameters() or "{}"))
    microseconds = triton_request.timeout()
    if microseconds:
        _add(values, {"timeout": microseconds / 1e6})
    names = {field.name for field in fields(Delivery)}
    delivery = _delivery({name: values.pop(name) for name in names & values.keys()})
    request = request_from(values, "the request")
    if request.n > 1 and not delivery.stream:
        raise RequestError(
            f"n is {request.n}, but with stream false there is one response for one answer; leave stream out."
        )
    return Incoming(request, delivery)


def _add(values: dict[str, Any], more: dict[str, Any]) -> None:
    for name, value in more.items():
        if name in values:
            source = next((tensor for tensor, field in _PROMPTS.items() if field == name), "another place")
            raise RequestError(f"the request has {name} twice, here and in {source}; give it once.")
        values[name] = value


def _delivery(values: dict[str, Any]) -> Delivery:
    try:
        return Delivery(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(
            f"the request has {first['loc'][0]} = {first['input']!r}: {first['msg'].lower()}. Correct the value."
        ) from error


def _text(name: str, array: npt.NDArray[Any]) -> str:
    if array.size != 1:
        raise RequestError(f"{name} has {array.size} texts, expected one; send a request for each.")
    try:
        return bytes(array.reshape(-1)[0]).decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"{name} is not UTF-8 text: {error.reason} at byte {error.start}.") from error
