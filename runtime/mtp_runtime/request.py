"""One generation request: what may be asked for, and what is refused by name."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import ConfigDict, PlainValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import PydanticCustomError

from mtp_engines.contracts.manifest import Manifest
from mtp_engines.errors import RequestError
from mtp_runtime.drafters.choice import choose_drafter, choose_ngram
from mtp_runtime.drafters.registry import DrafterName

DEFAULT_NEW_TOKENS = 256
AUTO: Literal["auto"] = "auto"
"""K is chosen for every cycle."""


def _is_draft_tokens(value: object) -> object:
    if value == AUTO or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise PydanticCustomError("draft_tokens", "expected a whole number or 'auto'")


DraftTokens = Annotated[int | Literal["auto"], PlainValidator(_is_draft_tokens)]
DEFAULT_DRAFT_TOKENS: DraftTokens = 3


@validated(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Request:
    """Options of a request, under the names that the command line and JSON lines use.

    Attributes:
        prompt: text, encoded by the bundle's tokenizer under its own rules for special tokens.
        prompt_ids: token ids, used as they are.
        messages: a conversation, rendered by the bundle's chat template.
        id: echoed in results.
        chat: render `prompt` as one user message.
        max_new_tokens: most tokens to emit; fewer fit if the context ends first.
        draft_tokens: K; None takes 3, or the bundle's limit if that is smaller; 0 is plain decoding; `auto` chooses for
            every cycle what should bring the most tokens a second, 0 included.
        drafter: what proposes the draft: the bundle's own head by its kind (`mtp`, `eagle`, `eagle3`), `draft-model`
            (a second bundle, loaded with the first), `ngram` (prompt lookup), one of these with `+ngram` (the lookup
            where it finds something, the other otherwise) or `none`; None takes the draft model if one was loaded,
            else the head if there is one.
        ngram_min: shortest ending of the text that a lookup looks for; None takes 2.
        ngram_max: longest one; None takes 4, at most 16.
        ignore_eos: end tokens do not end the generation.
        stop: texts that end the generation; the result ends before them.
        temperature: 0 only, greedy decoding.
        seed: accepted and without effect, since greedy decoding draws nothing.
    """

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    id: str | int | None = None
    chat: bool = False
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    draft_tokens: DraftTokens | None = None
    drafter: DrafterName | None = None
    ngram_min: int | None = None
    ngram_max: int | None = None
    ignore_eos: bool = False
    stop: list[str] | str | None = None
    temperature: float = 0.0
    seed: int | None = None

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def request_from_json(line: str, defaults: dict[str, Any], where: str) -> Request:
    """A request from one JSON line; its fields override the defaults.

    Raises:
        RequestError: not a JSON object, an unknown field, or a value of the wrong kind.
    """
    try:
        given = TypeAdapter(dict[str, Any]).validate_json(line)
    except ValidationError as error:
        raise RequestError(
            f"{where} is not a JSON object: {error.errors()[0]['msg']}. Write one object a line."
        ) from error
    return request_from(defaults | given, where)


def request_from(values: dict[str, Any], where: str) -> Request:
    """A request from named values.

    Raises:
        RequestError: an unknown name, or a value of the wrong kind.
    """
    names = [field.name for field in fields(Request)]
    for name in values:
        if name not in names:
            raise RequestError(
                f"{where} has the option {name!r}, which this release does not have. Known: {', '.join(names)}."
            )
    try:
        request = Request(**values)
    except ValidationError as error:
        first = error.errors()[0]
        raise RequestError(
            f"{where} has {first['loc'][0]} = {first['input']!r}: {first['msg'].lower()}. Correct the value."
        ) from error
    require_one_prompt(request, where)
    return request


def require_one_prompt(request: Request, where: str) -> None:
    """Refuse a request without a prompt, or with several.

    Raises:
        RequestError: none or several of prompt, prompt_ids and messages.
    """
    given = [name for name in ("prompt", "prompt_ids", "messages") if getattr(request, name) is not None]
    if len(given) != 1:
        found = " and ".join(given) if given else "none of them"
        raise RequestError(f"{where} needs exactly one of prompt, prompt_ids and messages, found {found}.")


def ids_from(values: Any) -> list[int]:
    """Token ids from a sequence or array of integers of any width.

    Raises:
        RequestError: anything but whole numbers in one dimension.
    """
    try:
        array = np.asarray(values)
    except ValueError as error:  # Lists of different lengths.
        raise RequestError(f"token ids must be integers in one dimension, found {values!r}.") from error
    if array.size == 0:
        return []
    if array.dtype.kind not in "iu" or array.ndim != 1:
        raise RequestError(
            f"token ids must be integers in one dimension, found {array.dtype} with shape {list(array.shape)}. Convert "
            "them first."
        )
    ids: list[int] = array.tolist()
    return ids


@dataclass(frozen=True)
class Prepared:
    """A request that the bundle can serve: all that was left open is settled.

    Attributes:
        prompt: its token ids.
        drafter: the name of what drafts; `none` if K is 0.
        draft_tokens: K, or `auto`.
        ngram: shortest and longest match of a lookup.
        limit: most tokens to emit.
    """

    prompt: list[int]
    drafter: str
    draft_tokens: DraftTokens
    ngram: tuple[int, int]
    limit: int


def check(request: Request, prompt: list[int], manifest: Manifest, has_draft_model: bool = False) -> Prepared:
    """Refuse what the bundle, and a draft model if one was loaded, cannot do; the decision never depends on K.

    Raises:
        RequestError: names the option, its value and the limit.
    """
    limits, vocab_size = manifest.limits, manifest.model.vocab_size
    if request.temperature != 0:
        raise RequestError(f"temperature is {request.temperature}; this release decodes greedily, use 0.")
    if request.max_new_tokens < 0:
        raise RequestError(f"max_new_tokens is {request.max_new_tokens}, expected at least 0.")
    if any(not stop for stop in request.stops):
        raise RequestError("stop has an empty text, which would end every generation at once; leave it out.")
    if not prompt:
        raise RequestError("the prompt has no tokens; give at least one.")
    outside = [token for token in prompt if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            f"the prompt has the token id {outside[0]}, the model knows 0 to {vocab_size - 1}. Use this bundle's "
            "tokenizer."
        )
    room = limits.max_model_len - len(prompt)
    if room < 1:
        longer = limits.max_model_len < manifest.model.max_position
        remedy = ", or build the bundle with a larger --max-model-len" if longer else ""
        raise RequestError(
            f"the prompt has {len(prompt)} tokens, and prompt and answer together may have {limits.max_model_len}. "
            f"Shorten the prompt{remedy}."
        )
    drafter = choose_drafter(request.drafter, manifest.model, has_draft_model)
    ngram = choose_ngram(request.ngram_min, request.ngram_max, drafter)
    draft_tokens = _draft_tokens(request, drafter, manifest)
    return Prepared(prompt, drafter if draft_tokens else "none", draft_tokens, ngram, min(room, request.max_new_tokens))


def _draft_tokens(request: Request, drafter: str, manifest: Manifest) -> DraftTokens:
    asked, limit = request.draft_tokens, manifest.limits.max_draft_tokens
    wanted = DEFAULT_DRAFT_TOKENS if asked is None else asked
    if wanted == AUTO:
        # Where nothing can be drafted, the best K is 0.
        return AUTO if limit and drafter != "none" else 0
    if request.drafter == "none" and asked:
        raise RequestError(f"drafter is 'none', but draft_tokens is {wanted}; use 0, or another drafter.")
    if drafter == "none":
        if asked:
            raise RequestError(
                f"draft_tokens is {wanted}, but this bundle was built without an MTP head; use 0, the drafter "
                "'ngram', or a draft model."
            )
        return 0
    if asked is None:
        return min(wanted, limit)
    if not 0 <= wanted <= limit:
        raise RequestError(
            f"draft_tokens is {wanted}, this bundle was built for 0 to {limit}. Choose within, or build it again with "
            "--draft-tokens."
        )
    return wanted
