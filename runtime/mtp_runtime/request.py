"""One generation request: what may be asked for, and what is refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, ConfigDict, PlainValidator, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as validated
from pydantic_core import PydanticCustomError

from mtp_engines.errors import RequestError
from mtp_runtime.drafters.registry import DrafterName
from mtp_runtime.sampling.acceptors import COUPLED, AcceptorName
from mtp_runtime.sampling.options import SamplingOptions
from mtp_runtime.verification import VerifyMode

DEFAULT_NEW_TOKENS = 256
AUTO: Literal["auto"] = "auto"
"""K is chosen for every cycle."""


def _is_draft_tokens(value: object) -> object:
    if value == AUTO or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise PydanticCustomError("draft_tokens", "expected a whole number or 'auto'")


DraftTokens = Annotated[int | Literal["auto"], PlainValidator(_is_draft_tokens)]
DEFAULT_DRAFT_TOKENS: DraftTokens = 3


def _numbered(value: object) -> object:
    """Keys of a JSON object are texts."""
    if not isinstance(value, dict):
        return value
    try:
        return {int(key) if isinstance(key, str) else key: number for key, number in value.items()}
    except ValueError as error:
        raise PydanticCustomError("logit_bias", "expected token ids as keys") from error


LogitBias = Annotated[dict[int, float], BeforeValidator(_numbered)]


@validated(frozen=True, config=ConfigDict(extra="forbid", strict=True))
class Request:
    """Options of a request, under the names that the command line and JSON lines use.

    Attributes:
        prompt: text, encoded by the bundle's tokenizer under its own rules for special tokens.
        prompt_ids: token ids, used as they are.
        messages: a conversation, rendered by the bundle's chat template.
        id: echoed in results.
        chat: render `prompt` as one user message.
        tools: functions that the chat template may tell the model of, in the form that it expects.
        chat_template_kwargs: further variables of the chat template, such as `enable_thinking`.
        max_new_tokens: most tokens to emit; fewer fit if the context ends first.
        draft_tokens: K; None takes 3, or the bundle's limit if that is smaller; 0 is plain decoding; `auto` chooses for
            every cycle what should bring the most tokens a second, 0 included.
        draft_confidence: a draft ends before the product of its head's best probabilities falls below this; None never
            ends it early.
        draft_branches: 1 verifies a second draft beside the first, with the second best token at place 0; 2 verifies a
            third one, with that of place 1.
        drafter: what proposes the draft: the bundle's own head by its kind (`mtp`, `eagle`, `eagle3`), `draft-model`
            (a second bundle, loaded with the first), `ngram` (prompt lookup), one of these with `+ngram` (the lookup
            where it finds something, the other otherwise) or `none`; None takes the draft model if one was loaded,
            else the head if there is one.
        ngram_min: shortest ending of the text that a lookup looks for; None takes 2.
        ngram_max: longest one; None takes 4, at most 16.
        ignore_eos: end tokens do not end the generation.
        stop: texts that end the generation; the result ends before them.
        temperature, top_k, top_p, min_p, repetition_penalty, frequency_penalty, presence_penalty, logit_bias,
            min_new_tokens, seed: see `SamplingOptions`.
        bad_words: texts, or lists of token ids, that the answer must not contain. A text is taken as it is and with a
            space before it.
        n: how many answers to draw, each with a seed of its own.
        logprobs: tell of each emitted token the log-probability, and of so many most probable tokens beside it.
        prompt_logprobs: the same for the tokens of the prompt.
        verify: `rows` verifies a draft in one run of the target; `step` runs it row by row, which is slower than plain
            decoding and gives its tokens on every backend.
        acceptor: which draft tokens are kept: `coupled` or `rejection`; `relaxed` and `typical` are lossy.
        relaxed_top_k, relaxed_delta, typical_epsilon, typical_delta: of the lossy acceptors, see `AcceptRule`.
        json_schema: the answer is JSON of this schema.
        json_object: the answer is a JSON object.
        regex: the whole answer matches this expression, in the syntax of Rust's regex.
        grammar: the answer follows this grammar, in llguidance's dialect of Lark.
        choice: the answer is one of these texts.
        constraint_after: the one of these five that was given begins behind this text of the answer; None begins at
            once.
        skip_special_tokens: special tokens are left out of the text, as stop texts see it too.
    """

    prompt: str | None = None
    prompt_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    id: str | int | None = None
    chat: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    max_new_tokens: int = DEFAULT_NEW_TOKENS
    draft_tokens: DraftTokens | None = None
    draft_confidence: float | None = None
    draft_branches: int = 0
    drafter: DrafterName | None = None
    ngram_min: int | None = None
    ngram_max: int | None = None
    ignore_eos: bool = False
    stop: list[str] | str | None = None
    temperature: float = SamplingOptions.temperature
    top_k: int | None = SamplingOptions.top_k
    top_p: float = SamplingOptions.top_p
    min_p: float = SamplingOptions.min_p
    repetition_penalty: float = SamplingOptions.repetition_penalty
    frequency_penalty: float = SamplingOptions.frequency_penalty
    presence_penalty: float = SamplingOptions.presence_penalty
    logit_bias: LogitBias | None = None
    min_new_tokens: int = SamplingOptions.min_new_tokens
    bad_words: list[str | list[int]] | None = None
    seed: int | None = SamplingOptions.seed
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    acceptor: AcceptorName = COUPLED
    verify: VerifyMode = "rows"
    relaxed_top_k: int | None = None
    relaxed_delta: float | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    json_schema: dict[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None
    constraint_after: str | None = None
    skip_special_tokens: bool = True

    @property
    def stops(self) -> tuple[str, ...]:
        """The stop texts as a tuple."""
        if self.stop is None:
            return ()
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)


def object_from_json(line: str, where: str) -> dict[str, Any]:
    """The object of one JSON line.

    Raises:
        RequestError: it is none.
    """
    try:
        return TypeAdapter(dict[str, Any]).validate_json(line)
    except ValidationError as error:
        raise RequestError(
            f"{where} is not a JSON object: {error.errors()[0]['msg']}. Write one object a line."
        ) from error


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
    if isinstance(values, list | tuple) and all(type(value) is int for value in values):
        return list(values)  # Of any size, where NumPy would make objects or floats of large ones.
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
