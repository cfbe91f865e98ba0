"""From the body of a request to requests of the runtime."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from mtp_engines.errors import RequestError
from mtp_runtime.api import Model
from mtp_runtime.constraints.options import FORMS
from mtp_runtime.request import Request, request_from
from mtp_serving.openai.bodies import DEFAULT_COMPLETION_TOKENS, ChatBody, CommonBody, CompletionBody
from mtp_serving.openai.errors import ApiError
from mtp_serving.openai.messages import messages_for_template
from mtp_serving.openai.options import ServeOptions
from mtp_serving.openai.parsing import THINK_END, THINK_START, Reading, special_markers
from mtp_serving.openai.tools import is_forced, offered, schema_of_a_call

_SAME = (
    "temperature",
    "top_p",
    "min_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "ignore_eos",
    "bad_words",
    "constraint_after",
    "draft_confidence",
    "drafter",
    "acceptor",
    "relaxed_top_k",
    "relaxed_delta",
    "typical_epsilon",
    "typical_delta",
)
"""Fields that a request of the runtime has under the same name."""
_MOST_TOP_LOGPROBS = 20


@dataclass(frozen=True)
class Plan:
    """What a body asks for.

    Attributes:
        requests: one for each prompt.
        reading: how text of the answers is taken apart; None leaves it as it is.
    """

    requests: list[Request]
    reading: Reading | None = None


def plan_completion(body: CompletionBody, identity: str, model: Model, options: ServeOptions) -> Plan:
    """One request for each prompt.

    Raises:
        ApiError, RequestError: what cannot be served.
    """
    del model
    fields = _common(body, options) | {"id": identity, "logprobs": _few(body.logprobs, "logprobs")}
    fields["max_new_tokens"] = _limit(body, DEFAULT_COMPLETION_TOKENS, options)
    prompts = body.prompt if isinstance(body.prompt, list) and not _is_ids(body.prompt) else [body.prompt]
    if not prompts:
        raise ApiError("prompt is an empty list; give at least one.", "prompt")
    named: list[dict[str, Any]] = [
        {"prompt": prompt} if isinstance(prompt, str) else {"prompt_ids": prompt} for prompt in prompts
    ]
    return Plan([request_from(fields | given, "the request") for given in named])


def plan_chat(body: ChatBody, identity: str, model: Model, options: ServeOptions) -> Plan:
    """One request, whose messages are rendered already.

    Raises:
        ApiError, RequestError: what cannot be served.
    """
    tools = offered(body)
    if tools and not model.prompts.reads("tools"):
        raise ApiError(
            "tools are given, but the chat template of this bundle has no place for them; leave them out.", "tools"
        )
    rendered = Request(
        messages=messages_for_template(body.messages),
        tools=tools or None,
        chat_template_kwargs=body.chat_template_kwargs,
    )
    prompt_ids = model.prompts.encode(rendered)
    tokenizer = model.prompts.tokenizer
    assert tokenizer is not None, "messages were encoded"
    thinks = tokenizer.decode(prompt_ids[-16:], skip_special_tokens=False).rstrip().endswith(THINK_START)
    forced = is_forced(body)
    markers = special_markers(tokenizer)
    reading = Reading(thinks, bool(tools) and not forced, forced, tuple(tool.function for tool in body.tools), markers)
    fields = _common(body, options) | {"id": identity, "prompt_ids": prompt_ids}
    fields["max_new_tokens"] = _limit(body, model.manifest.limits.max_model_len, options)
    if body.logprobs:
        fields["logprobs"] = _few(body.top_logprobs, "top_logprobs")
    if markers and body.skip_special_tokens is None:
        fields["skip_special_tokens"] = False
    asked = [name for name in FORMS if fields.get(name) is not None and (name != "json_object" or fields[name])]
    if asked and tools:
        raise ApiError(f"{asked[0]} and tools are both given, but an answer has one form; leave one of them out.")
    if forced:
        fields["json_schema"] = schema_of_a_call(body)
    if thinks and (asked or forced) and body.constraint_after is None:
        fields["constraint_after"] = THINK_END
    return Plan([request_from(fields, "the request")], reading)


def seconds_of(body: CommonBody, options: ServeOptions) -> float | None:
    """After how long an answer is given up: what the request or the server says, whichever is shorter."""
    given = [value for value in (body.timeout, options.timeout) if value is not None]
    return min(given, default=None)


def require_model(body: CommonBody, options: ServeOptions) -> None:
    """Refuse another model's name.

    Raises:
        ApiError: it is.
    """
    if body.model != options.name:
        raise ApiError(
            f"the model {body.model!r} does not exist here; this server has {options.name!r}.",
            "model",
            status=404,
            code="model_not_found",
        )


def _common(body: CommonBody, options: ServeOptions) -> dict[str, Any]:
    fields: dict[str, Any] = {name: getattr(body, name) for name in _SAME}
    fields["draft_tokens"] = _draft_tokens(body, options)
    fields["top_k"] = None if body.top_k in (0, -1) else body.top_k
    fields["min_new_tokens"] = body.min_tokens
    if body.skip_special_tokens is not None:
        fields["skip_special_tokens"] = body.skip_special_tokens
    return fields | _form(body)


def _draft_tokens(body: CommonBody, options: ServeOptions) -> Any:
    """The server's own choice is no more than a default, which gives way to what a request asks for."""
    if body.draft_tokens is not None or body.drafter == "none":
        return body.draft_tokens
    return options.draft_tokens


def _form(body: CommonBody) -> dict[str, Any]:
    form: dict[str, Any] = {}
    if body.structured_outputs is not None:
        given = body.structured_outputs.model_dump(by_alias=False)
        form = {name: value for name, value in given.items() if value is not None}
    if body.response_format is not None and body.response_format.type != "text":
        if form:
            raise ApiError("response_format and structured_outputs are both given; leave one of them out.")
        schema = body.response_format.json_schema
        form = {"json_object": True} if schema is None else {"json_schema": schema.body}
    return form


def _limit(body: CommonBody, default: int, options: ServeOptions) -> int:
    most = options.max_new_tokens
    if body.max_tokens is None:
        return default if most is None else min(default, most)
    if most is not None and body.max_tokens > most:
        raise ApiError(
            f"max_tokens is {body.max_tokens}, this server gives at most {most}. Ask for less.", "max_tokens"
        )
    return body.max_tokens


def _few(count: int | None, name: str) -> int | None:
    if count is not None and count > _MOST_TOP_LOGPROBS:
        raise ApiError(f"{name} is {count}, expected at most {_MOST_TOP_LOGPROBS}.", name)
    return count


def _is_ids(prompt: list[Any]) -> bool:
    return bool(prompt) and isinstance(prompt[0], int)


def refused_by_bundle(plan: Plan, model: Model) -> None:
    """Check every request of a plan before any of them runs.

    Raises:
        RequestError: the bundle cannot serve one of several; says which.
    """
    if len(plan.requests) < 2:
        return
    for number, request in enumerate(plan.requests):
        try:
            model.prompts.prepare(replace(request), model.manifest, model.draft is not None)
        except RequestError as error:
            raise RequestError(f"prompt {number}: {error}") from error
