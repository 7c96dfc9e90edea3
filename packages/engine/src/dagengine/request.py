"""What goes into the engine and what comes out: requests, events, results; and what a request alone can get wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .errors import DagError
from .sampling import SamplingParams

Mode = Literal["inherit", "digest", "artifact"]
SpanName = Literal["prompt", "output", "turn", "all"]


@dataclass(frozen=True, slots=True)
class ContextRef:
    """One reference of a request's context, in the caller's terms.

    Exactly one of `state` (a state id, `st_...`) and `request` (the id of another request of the same
    submission, whose seal is waited for) is given. `span` None is the definition's default for `artifact`.
    """

    state: str | None = None
    request: str | None = None
    mode: Mode = "inherit"
    span: SpanName | tuple[int, int] | None = None
    at: int | None = None
    start: int | None = None


@dataclass(frozen=True, slots=True)
class Keep:
    """Keep the result as a state. With `ttl_s` it is held for so long, without it until it is released."""

    ttl_s: float | None = None
    pin: bool = False
    name: str | None = None


@dataclass(frozen=True)
class Request:
    """One node to compute: its own input tokens under the references it reads.

    Attributes:
        id: unique among the requests that run.
        input_ids: the node's own input tokens; at least one.
        sampling: None computes the input and samples nothing.
        context: references, in order.
        position, position_options: the position policy and its options (`explicit` takes `own_start`).
        backend: the attention backend for this request; None is the engine's.
        keep: None drops the node when nothing reads it any more.
        salt: the tenant; states and pages are never shared across salts.
        priority: lower is scheduled earlier; arrival order within one priority.
        turn_start: own offset at which a chat's generation prompt begins, if there is one.
    """

    id: str
    input_ids: tuple[int, ...]
    sampling: SamplingParams | None
    context: tuple[ContextRef, ...] = ()
    position: str = "linear"
    position_options: Mapping[str, object] = field(default_factory=dict)
    backend: str | None = None
    keep: Keep | None = None
    salt: str = ""
    priority: int = 0
    turn_start: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's log-probability (natural log) and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: compile references, lay out, prepare KV (lease, restore), submission to first token."""

    compile: float
    layout: float
    kv_prepare: float
    first_token: float


@dataclass(frozen=True)
class DagInfo:
    """What was done for one answer: the state it became, what was read, and how.

    `visible`, `input`, `reused`, `computed`, `reloaded` count tokens; `spans` are half-open, in the node's own
    tokens. `state` is None when the node was not kept.
    """

    state: str | None
    spans: Mapping[str, tuple[int, int]]
    visible: int
    input: int
    reused: int
    computed: int
    reloaded: int
    policy: str
    own_start: int
    record: Mapping[str, object]
    timing: Timing


@dataclass(frozen=True)
class Choice:
    """One finished answer. `finish_reason` is `stop`, `length`, or `prefill` for a node that samples nothing."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    stop_reason: int | str | None
    logprobs: tuple[TokenLogprob, ...] | None
    num_sampled: int
    dag: DagInfo


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """New text of one answer. Joined over a request these give exactly the finished text and ids."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None


@dataclass(frozen=True)
class FinishedEvent:
    """The one terminal event of a request: its answers, or the error that ended it."""

    request_id: str
    choices: tuple[Choice, ...]
    error: DagError | None = None


Event = TokenEvent | FinishedEvent


def check_request(request: Request, vocab_size: int, *, has_text: bool) -> None:
    """Refuse what can be refused by looking at a request alone.

    Args:
        has_text: whether the model has a tokenizer.

    Raises:
        DagError: `invalid_request` or `unsupported`, naming the field.
    """
    if not request.input_ids:
        raise DagError("invalid_request", "the input holds no token; send at least one", "input")
    for position, token in enumerate(request.input_ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            rule = f"token ids are integers from 0 to {vocab_size - 1}, not {token!r}"
            raise DagError("invalid_request", rule, f"input[{position}]")
    params = request.sampling
    if params is None:
        return
    for token in (*params.stop_token_ids, *params.logit_bias):
        if token >= vocab_size:
            name = "logit_bias" if token in params.logit_bias else "stop_token_ids"
            raise DagError("invalid_request", f"the vocabulary has no token {token}", name)
    if params.stop and not has_text:
        raise DagError("unsupported", "stop strings need a tokenizer; this model has none", "stop")


def check_parent(parent_id: str, earlier: Mapping[str, Request], field_name: str) -> None:
    """Refuse a reference to a request that does not come earlier in its submission, or that has several answers."""
    if parent_id not in earlier:
        raise DagError("cycle", f"{parent_id!r} is no earlier request", field_name)
    sampling = earlier[parent_id].sampling
    if sampling is not None and sampling.n > 1:
        raise DagError("invalid_request", "a request with n > 1 cannot be read", field_name)
