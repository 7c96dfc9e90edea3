"""The bodies that clients send. An unknown field, a wrong type, an option that would be ignored are errors.

Null means absent everywhere. Ranges of sampling options are the engine's to judge.
"""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

TEXT = {"type": "string"}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}}
MESSAGES = {"type": "array", "items": {"$ref": "#/components/schemas/Message"}}

Prompt = Annotated[
    Any,
    WithJsonSchema({"oneOf": [TEXT, IDS, {"type": "array", "items": TEXT}, {"type": "array", "items": IDS}]}),
]
Input = Annotated[Any, WithJsonSchema({"oneOf": [TEXT, IDS, MESSAGES]})]
Stop = Annotated[Any, WithJsonSchema({"oneOf": [TEXT, {"type": "array", "items": TEXT}]})]
PAIR = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 2, "maxItems": 2}
SpanField = Annotated[Any, WithJsonSchema({"oneOf": [{"enum": ["prompt", "output", "turn", "all"]}, PAIR]})]
Messages = Annotated[list[Any], WithJsonSchema(MESSAGES)]


class Strict(BaseModel):
    """Base: unknown fields are errors with a suggestion; those in `neutral` may hold what changes nothing."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())
    neutral: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _known(cls, data: Any) -> Any:
        if not isinstance(data, Mapping):
            return data
        kept = {}
        for name, value in data.items():
            if name in cls.model_fields:
                if value is not None:
                    kept[name] = value
            elif name in cls.neutral:
                if value is not None and not _is_one_of(value, cls.neutral[name]):
                    raise PydanticCustomError(
                        "unsupported_field", "{name} is not supported; leave it out", {"name": name}
                    )
            else:
                near = get_close_matches(name[:64], cls.model_fields, 1)
                hint = (
                    f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(cls.model_fields)}"
                )
                raise PydanticCustomError(
                    "unknown_field", "unknown field{hint}", {"name": name, "hint": hint}
                )
        return kept


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    return any(type(value) is type(known) and value == known for known in allowed)


class Message(Strict):
    """One message of a chat."""

    neutral = {
        "refusal": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "audio": (),
        "annotations": ([],),
        "reasoning_content": (),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[
        Any,
        WithJsonSchema({"oneOf": [TEXT, {"type": "array", "items": {"type": "object"}}]}),
        Field(description='Text, or a list of parts `{"type": "text", "text": ...}`.'),
    ]
    name: str | None = Field(default=None, description="Refused unless the model's chat template uses it.")


class ContextItem(Strict):
    """One reference to a state."""

    state: str = Field(max_length=256)
    mode: Literal["inherit", "digest", "artifact"] = "inherit"
    span: SpanField = Field(
        default=None, description="Of an artifact, in the state's own tokens; default `output`."
    )
    at: int | None = Field(default=None, ge=0, description="Read only the state's first `at` tokens.")
    start: int | None = Field(
        default=None, ge=0, description="View position of the first token, for policy `explicit`."
    )


class DagOptions(Strict):
    """What the request reads of earlier states, how it is laid out, and whether its result is kept."""

    context: list[ContextItem] = Field(default_factory=list)
    position: dict[str, Any] | None = Field(
        default=None, description='`{"policy": name}` and the policy\'s options.'
    )
    backend: str | None = Field(default=None, description="Attention backend for this request.")
    keep: dict[str, Any] | None = Field(
        default=None, description='`{"ttl_s", "pin", "name"}`: keep the result as a state.'
    )


class StreamOptions(Strict):
    neutral = {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
    include_usage: bool = False


class Tenanted(Strict):
    model: str | None = None
    cache_salt: str | None = Field(
        default=None,
        min_length=1,
        max_length=256,
        description="States and reuse are shared only within one salt.",
    )


UNSUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "tools": ([],),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "verbosity": (),
    "store": (False,),
    "metadata": ({},),
    "service_tier": ("auto", "default"),
    "web_search_options": (),
    "prompt_cache_key": (),
    "prompt_cache_retention": (),
    "safety_identifier": (),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "prompt_logprobs": (),
    "truncate_prompt_tokens": (),
}


class Generation(Tenanted):
    """What both OpenAI endpoints share."""

    neutral = UNSUPPORTED
    max_tokens: int | None = None
    min_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: Stop = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
    n: int | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: int = Field(default=0, ge=-(2**31), le=2**31, description="Lower is scheduled earlier.")
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh"] | None = Field(
        default=None,
        description="Changes nothing where the model's chat template has no such setting; refused where it has one.",
    )
    user: str | None = Field(default=None, max_length=1024, description="Informational; changes nothing.")
    return_token_ids: bool = Field(default=False, description="Each choice also has its `token_ids`.")
    dag: DagOptions = DagOptions()


class ChatBody(Generation):
    """`POST /v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: int | None = Field(default=None, description="As `max_tokens`.")
    logprobs: bool = False
    top_logprobs: int | None = None


class CompletionBody(Generation):
    """`POST /v1/completions`."""

    prompt: Prompt
    logprobs: int | None = Field(
        default=None, description="How many alternatives to report beside each token."
    )
    add_special_tokens: bool | None = Field(
        default=None, description="Default: iff the prompt is text and there is no context."
    )


class StateBody(Tenanted):
    """`POST /v1/states`: compute an input and keep it. `dag.keep` defaults to "until released"."""

    input: Input
    add_special_tokens: bool | None = None
    priority: int = Field(default=0, ge=-(2**31), le=2**31)
    dag: DagOptions = DagOptions()


class ForkBody(Strict):
    """`POST /v1/states/{id}/fork`."""

    at: int = Field(ge=0, description="The new handle shows the first `at` tokens.")
    keep: dict[str, Any] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


class RetainBody(Strict):
    """`POST /v1/states/{id}/retain`: without `ttl_s` the state lasts until it is released."""

    ttl_s: float | None = None
    pin: bool | None = Field(
        default=None, description="Never evict (true) or evict when needed (false); absent: as it is."
    )
    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


class MoveBody(Strict):
    """`POST /v1/states/{id}/offload` and `/prefetch`."""

    cache_salt: str | None = Field(default=None, min_length=1, max_length=256)


class TokenizeBody(Strict):
    """`POST /tokenize`: either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Any] | None, WithJsonSchema(MESSAGES)] = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    return_token_strs: bool = False


class DetokenizeBody(Strict):
    """`POST /detokenize`."""

    model: str | None = None
    tokens: list[int]


BODIES: tuple[type[BaseModel], ...] = (
    ChatBody, CompletionBody, StateBody, ForkBody, RetainBody, MoveBody, TokenizeBody, DetokenizeBody, Message,
)  # fmt: skip
