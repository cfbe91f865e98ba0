"""The configuration of a model in Triton: what we write, and what we check when the server hands it back."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mtp_engines.backends import BACKENDS
from mtp_engines.contracts.manifest import Manifest
from mtp_runtime.batching.scheduler import BatchOptions

DEVICES = ("cpu", "cuda")
_KINDS = {"cpu": "KIND_CPU", "cuda": "KIND_GPU"}


@dataclass(frozen=True)
class Tensor:
    """An input or output."""

    name: str
    data_type: str
    dims: tuple[int, ...]
    optional: bool = False


INPUTS = (
    Tensor("text_input", "TYPE_STRING", (1,), optional=True),
    Tensor("input_ids", "TYPE_INT64", (-1,), optional=True),
    Tensor("options", "TYPE_STRING", (1,), optional=True),
)
OUTPUTS = (
    Tensor("text_output", "TYPE_STRING", (1,)),
    Tensor("output_ids", "TYPE_INT64", (-1,)),
    Tensor("index", "TYPE_INT64", (1,)),
    Tensor("finish_reason", "TYPE_STRING", (1,)),
    Tensor("statistics", "TYPE_STRING", (1,)),
)


@dataclass(frozen=True)
class Settings:
    """How instances of the model open and run the bundle.

    Attributes:
        slots: answers at once in one instance; None takes what the bundle was built for.
        max_queue: requests that may wait in one instance.
        prefix_cache_bytes: memory of one instance for texts that were read before.
        threads: of one instance on a CPU; 0 chooses.
        backend, device: None takes what the bundle was built for.
        instances: on a CPU, or on each GPU.
        gpus: numbers of the GPUs that get instances; empty for all.
        cache_rows: rows of the caches that the answers of an instance share; None has room for every whole context.
    """

    slots: int | None = None
    max_queue: int = BatchOptions.max_queue
    prefix_cache_bytes: int = BatchOptions.prefix_bytes
    threads: int = 0
    backend: str | None = None
    device: str | None = None
    instances: int = 1
    gpus: tuple[int, ...] = ()
    cache_rows: int | None = None

    def place(self, manifest: Manifest) -> str:
        """`cpu` or `cuda`."""
        return self.device or (manifest.device if self.backend in (None, manifest.backend) else "cuda")


_NUMBERS = ("slots", "max_queue", "prefix_cache_bytes", "cache_rows", "threads")
_WORDS = {"backend": BACKENDS, "device": DEVICES}


def config_of(settings: Settings, manifest: Manifest) -> dict[str, Any]:
    """The configuration in the JSON form that Triton hands to a model, as far as we set it."""
    place = settings.place(manifest)
    group: dict[str, Any] = {"kind": _KINDS[place], "count": settings.instances}
    if settings.gpus:
        group["gpus"] = list(settings.gpus)
    named = {name: getattr(settings, name) for name in (*_NUMBERS, *_WORDS)}
    return {
        "backend": "python",
        # Requests are batched inside an instance, answer by answer; Triton hands them over one by one.
        "max_batch_size": 0,
        "model_transaction_policy": {"decoupled": True},
        "input": [_fields(tensor) for tensor in INPUTS],
        "output": [_fields(tensor) for tensor in OUTPUTS],
        "instance_group": [group],
        "parameters": {name: {"string_value": str(value)} for name, value in named.items() if value is not None},
    }


def text_of(settings: Settings, manifest: Manifest) -> str:
    """config.pbtxt. The model has the name of its directory."""
    fields = config_of(settings, manifest)
    # A map is written as a list of pairs.
    fields["parameters"] = [{"key": name, "value": value} for name, value in fields["parameters"].items()]
    return "\n".join(["# Written by `mtp-export triton`; see docs/triton.md.", *_lines(fields)]) + "\n"


def settings_from(config: dict[str, Any]) -> Settings:
    """What a configuration without problems says; see `problems`."""
    given = _parameters(config)
    numbers = {name: int(given[name]) for name in _NUMBERS if name in given}
    words = {name: given[name] for name in _WORDS if name in given}
    return Settings(**numbers, **words)  # type: ignore[arg-type]  # Both have the fields' types.


def problems(config: dict[str, Any], manifest: Manifest) -> list[str]:
    """What in a configuration, in Triton's JSON form, is not as the bundle and this release need it.

    Returns:
        One sentence for each wrong field.
    """
    found = [
        *_of_batching(config),
        *_of_tensors("input", config.get("input", []), INPUTS),
        *_of_tensors("output", config.get("output", []), OUTPUTS),
    ]
    wrong = list(_of_parameters(_parameters(config), manifest))
    found += wrong
    if not wrong:
        found += _of_instances(config.get("instance_group", []), settings_from(config).place(manifest))
    return found


def _of_batching(config: dict[str, Any]) -> Iterator[str]:
    if size := config.get("max_batch_size", 0):
        yield (
            f"max_batch_size is {size}, expected 0: an instance batches requests itself, in as many slots as the "
            "parameter slots says."
        )
    if not config.get("model_transaction_policy", {}).get("decoupled", False):
        yield "model_transaction_policy.decoupled is false, expected true: an answer takes several responses."
    for name in ("dynamic_batching", "sequence_batching", "ensemble_scheduling"):
        if name in config:
            yield f"{name} is set, expected nothing: an instance batches requests itself."


def _of_tensors(kind: str, given: Iterable[dict[str, Any]], expected: Iterable[Tensor]) -> Iterator[str]:
    found = {tensor["name"]: tensor for tensor in given}
    for tensor in expected:
        other = found.pop(tensor.name, None)
        if other is None:
            yield f"{kind} {tensor.name} is missing, expected {tensor.data_type} with dims {list(tensor.dims)}."
            continue
        if other["data_type"] != tensor.data_type:
            yield f"{kind} {tensor.name} has data_type {other['data_type']}, expected {tensor.data_type}."
        if [int(size) for size in other["dims"]] != list(tensor.dims):
            yield f"{kind} {tensor.name} has dims {other['dims']}, expected {list(tensor.dims)}."
        if kind == "input" and bool(other.get("optional", False)) != tensor.optional:
            yield f"{kind} {tensor.name} has optional false, expected true: a request has one prompt, in any form."
    for name in found:
        yield f"{kind} {name} is not known, expected {', '.join(tensor.name for tensor in expected)}."


def _of_parameters(given: dict[str, str], manifest: Manifest) -> Iterator[str]:
    for name, value in given.items():
        if name in _NUMBERS:
            least = 1 if name in ("slots", "cache_rows") else 0
            if not value.isdecimal() or int(value) < least:
                yield f"parameter {name} is {value!r}, expected a whole number of at least {least}."
            elif name == "slots" and int(value) > manifest.limits.max_batch_size:
                yield (
                    f"parameter slots is {value}, and the bundle was built for a max_batch_size of "
                    f"{manifest.limits.max_batch_size}."
                )
        elif name in _WORDS:
            if value not in _WORDS[name]:
                yield f"parameter {name} is {value!r}, expected one of {', '.join(_WORDS[name])}."
        elif not name.isupper():  # Names in capitals, such as EXECUTION_ENV_PATH, are for Triton's Python backend.
            yield f"parameter {name} is not known, expected one of {', '.join((*_NUMBERS, *_WORDS))}."


def _of_instances(groups: Iterable[dict[str, Any]], place: str) -> Iterator[str]:
    for group in groups:
        # Triton settles KIND_AUTO before a model sees it.
        if group.get("kind") != _KINDS[place]:
            yield f"instance_group has kind {group.get('kind')}, expected {_KINDS[place]}: the device is {place}."


def _parameters(config: dict[str, Any]) -> dict[str, str]:
    return {name: str(value.get("string_value", "")) for name, value in config.get("parameters", {}).items()}


def _fields(tensor: Tensor) -> dict[str, Any]:
    fields: dict[str, Any] = {"name": tensor.name, "data_type": tensor.data_type, "dims": list(tensor.dims)}
    return fields | {"optional": True} if tensor.optional else fields


def _lines(fields: dict[str, Any], indent: str = "") -> Iterator[str]:
    """Protocol-buffer text of nested fields."""
    for name, value in fields.items():
        if isinstance(value, list) and all(isinstance(one, dict) for one in value):
            for one in value:
                yield from _block(name, one, indent)
        elif isinstance(value, dict):
            yield from _block(name, value, indent)
        else:
            # A value of an enumeration has no quotes.
            yield f"{indent}{name}: {value if name in ('kind', 'data_type') else json.dumps(value)}"


def _block(name: str, fields: dict[str, Any], indent: str) -> Iterator[str]:
    yield f"{indent}{name} {{"
    yield from _lines(fields, indent + "  ")
    yield f"{indent}}}"
