"""Bodies of requests: what is understood, what is taken without effect, and what is refused by name."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from mtp_runtime.drafters.registry import DrafterName
from mtp_runtime.request import DraftTokens, LogitBias
from mtp_runtime.sampling.acceptors import COUPLED, AcceptorName

DEFAULT_COMPLETION_TOKENS = 16
"""OpenAI's for completions."""
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's, where the command line is greedy."""

_STRICT = ConfigDict(extra="forbid", strict=True)
# What clients send by default, and what changes no answer here.
_IGNORED = ("user", "metadata", "parallel_tool_calls", "service_tier", "safety_identifier", "prompt_cache_key")
# Known fields that this server cannot serve, with the values that ask for nothing.
REFUSED: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "echo": (False,),
    "best_of": (1,),
    "suffix": ("",),
    "audio": (),
    "modalities": (["text"],),
    "prediction": (),
    "web_search_options": (),
    "functions": ([],),
    "function_call": ("none",),
    "reasoning_effort": (),
    "verbosity": (),
    "use_beam_search": (False,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
}


def _none_as_missing(value: Any) -> Any:
    """A field that is null is one that was left out, and what is refused is named."""
    if not isinstance(value, dict):
        raise PydanticCustomError("object", "expected a JSON object")
    kept = {name: given for name, given in value.items() if given is not None and name not in _IGNORED}
    for name, neutral in REFUSED.items():
        if name in kept and kept.pop(name) not in neutral:
            raise PydanticCustomError("unsupported", "{name} is not supported; leave it out", {"name": name})
    return kept


class StreamOptions(BaseModel):
    """What a stream says besides the answer."""

    model_config = _STRICT
    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class JsonSchemaFormat(BaseModel):
    """A schema by name."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    name: str = ""
    description: str | None = None
    body: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """The form of an answer."""

    model_config = _STRICT
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_its_schema(self) -> ResponseFormat:
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise PydanticCustomError("schema", "json_schema goes with the type json_schema, and only with that")
        return self


class StructuredOutputs(BaseModel):
    """Further forms of an answer; one of them."""

    model_config = _STRICT
    json_schema: Annotated[dict[str, Any] | bool | None, Field(alias="json")] = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: list[str] | None = None


class CommonBody(BaseModel):
    """What both interfaces know."""

    model_config = _STRICT
    model: str
    max_tokens: int | None = None
    temperature: float = DEFAULT_TEMPERATURE
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    n: int = 1
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: LogitBias | None = None
    min_tokens: int = 0
    ignore_eos: bool = False
    bad_words: list[str | list[int]] | None = None
    skip_special_tokens: bool | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    constraint_after: str | None = None
    draft_tokens: DraftTokens | None = None
    draft_confidence: float | None = None
    drafter: DrafterName | None = None
    acceptor: AcceptorName = COUPLED
    relaxed_top_k: int | None = None
    relaxed_delta: float | None = None
    typical_epsilon: float | None = None
    typical_delta: float | None = None
    priority: int = 0
    timeout: float | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculative_stats: bool = False
    return_token_ids: bool = False

    @model_validator(mode="before")
    @classmethod
    def _asks_for_what_there_is(cls, value: Any) -> Any:
        return _none_as_missing(value)

    @model_validator(mode="after")
    def _stream_options_of_a_stream(self) -> CommonBody:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options goes with stream; leave it out")
        return self


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None


class FunctionSpec(BaseModel):
    """A function that the model may call."""

    model_config = _STRICT
    name: Annotated[str, Field(min_length=1, max_length=128)]
    description: str | None = None
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})
    strict: bool | None = None


class Tool(BaseModel):
    """A tool, which is a function."""

    model_config = _STRICT
    type: Literal["function"]
    function: FunctionSpec


class NamedFunction(BaseModel):
    """The name of one."""

    model_config = _STRICT
    name: str


class NamedTool(BaseModel):
    """The tool that must be called."""

    model_config = _STRICT
    type: Literal["function"]
    function: NamedFunction


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: list[dict[str, Any]]
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0)] = 0
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @model_validator(mode="before")
    @classmethod
    def _one_limit(cls, value: Any) -> Any:
        """Two names of one limit."""
        if not isinstance(value, dict) or value.get("max_completion_tokens") is None:
            return value
        limit = value["max_completion_tokens"]
        if value.get("max_tokens") not in (None, limit):
            raise PydanticCustomError("max_tokens", "max_tokens and max_completion_tokens differ; leave one out")
        return {name: given for name, given in value.items() if name != "max_completion_tokens"} | {"max_tokens": limit}

    @model_validator(mode="after")
    def _goes_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs goes with logprobs; set it to true")
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) != len(names):
            raise PydanticCustomError("tools", "two tools have one name; give each its own")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise PydanticCustomError("tool_choice", "tool_choice names a function that tools does not have")
        if self.tool_choice not in (None, "none") and not names:
            raise PydanticCustomError("tool_choice", "tool_choice is given, but there are no tools; leave it out")
        return self
