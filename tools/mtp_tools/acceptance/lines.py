"""The prompts of a study: requests with a domain and, if there is one, a reference answer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.cli import objects_from_file
from mtp_runtime.prepare import Prepared
from mtp_runtime.prompts import Prompts
from mtp_runtime.request import Request, ids_from, request_from

UNTAGGED = "untagged"
"""The domain of lines that name none."""
_OF_THE_STUDY = {
    "draft_tokens": "use --draft-tokens",
    "drafter": "use --drafter",
    "draft_confidence": "every draft has its whole length here",
    "draft_branches": "the chain is what is studied",
    "verify": "it changes no acceptance",
}
"""Options that are the same for all lines -> what to do instead."""
_REFERENCES: tuple[str, ...] = ("continuation", "continuation_ids")


@dataclass(frozen=True)
class Task:
    """One prompt.

    Attributes:
        domain: what its figures are counted under.
        request: as `generate` would take it.
        prepared: the same, checked and encoded.
        reference: ids of the reference answer; None: the target's own answer is the teacher.
    """

    domain: str
    request: Request
    prepared: Prepared
    reference: list[int] | None


def tasks_from(
    path: Path, defaults: dict[str, Any], prompts: Prompts, manifest: Manifest, *, has_draft_model: bool
) -> list[Task]:
    """Read and check a file of prompts; needs no engine.

    Args:
        defaults: options that a line may override.

    Raises:
        RequestError: the file cannot be read or is empty, or a line cannot be served; names the line.
    """
    tasks = []
    for where, given in objects_from_file(path):
        for name, instead in _OF_THE_STUDY.items():
            if name in given:
                raise RequestError(f"{where} has {name}, which a study sets for all lines; leave it out, {instead}.")
        domain = _domain(given.pop("domain", UNTAGGED), where)
        reference = {name: given.pop(name) for name in _REFERENCES if name in given}
        request = request_from(defaults | given, where)
        with _named(where):
            prepared = prompts.prepare(request, manifest, has_draft_model)
            tasks.append(Task(domain, request, prepared, _reference(reference, prepared, prompts, manifest)))
    return tasks


def _domain(found: object, where: str) -> str:
    if not isinstance(found, str) or not found.strip():
        raise RequestError(
            f"{where} has domain = {found!r}, expected a text such as 'code'. Correct it or leave it out."
        )
    return found


def _reference(given: dict[str, Any], prepared: Prepared, prompts: Prompts, manifest: Manifest) -> list[int] | None:
    """Ids of a reference answer.

    Raises:
        RequestError: given twice, of the wrong kind, empty, outside the vocabulary, or too long for the context.
    """
    if not given:
        return None
    if len(given) > 1:
        raise RequestError("continuation and continuation_ids are both given; give one of them.")
    ((name, value),) = given.items()
    ids = ids_from(value) if name == "continuation_ids" else _encoded(value, prompts)
    vocab_size, room = manifest.model.vocab_size, manifest.limits.max_model_len - len(prepared.prompt)
    if not ids:
        raise RequestError(f"{name} has no tokens; leave it out, and the target's own answer takes its place.")
    outside = [token for token in ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(f"{name} has the token id {outside[0]}, the model knows 0 to {vocab_size - 1}. Correct it.")
    if len(ids) > room:
        raise RequestError(
            f"{name} has {len(ids)} tokens behind a prompt of {len(prepared.prompt)}, and both together may have "
            f"{manifest.limits.max_model_len}. Shorten one of them, or build the bundle with a larger --max-model-len."
        )
    return ids


def _encoded(text: object, prompts: Prompts) -> list[int]:
    """Apart from the prompt, so that a word across the border is two."""
    if not isinstance(text, str):
        raise RequestError(f"continuation is {text!r}, expected a text; token ids go into continuation_ids.")
    if prompts.tokenizer is None:
        raise RequestError("continuation is text, but this bundle has no tokenizer; give continuation_ids.")
    ids: list[int] = prompts.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@contextmanager
def _named(where: str) -> Iterator[None]:
    try:
        yield
    except RequestError as error:
        raise RequestError(f"{where}: {error}") from error
