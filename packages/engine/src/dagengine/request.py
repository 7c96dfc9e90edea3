"""What goes into the engine and what comes out: requests, events, results; and what a request alone can get wrong."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Literal, NamedTuple

from .errors import DagError, shown
from .sampling import SamplingParams

Mode = Literal["inherit", "digest", "artifact"]
MODES: tuple[Mode, ...] = ("inherit", "digest", "artifact")
SpanName = Literal["prompt", "output", "turn", "all"]
MAX_TTL_S = 10**9
MAX_NAME = 128


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
    """Keep the result as a state. With `ttl_s` it is held for so long, without it until it is released.

    Raises:
        DagError: `invalid_request` for a `ttl_s` that is no positive number of at most 1e9 seconds, a `pin` that is
            no bool, a `name` that is no text of 1 to 128 characters.
    """

    ttl_s: float | None = None
    pin: bool = False
    name: str | None = None

    def __post_init__(self) -> None:
        ttl, name = self.ttl_s, self.name
        if ttl is not None and (
            isinstance(ttl, bool) or not isinstance(ttl, int | float) or not 0 < ttl <= MAX_TTL_S
        ):
            raise DagError("invalid_request", "ttl_s is a positive number of seconds", "ttl_s")
        if not isinstance(self.pin, bool):
            raise DagError("invalid_request", "pin is true or false", "pin")
        if name is not None and (not isinstance(name, str) or not 0 < len(name) <= MAX_NAME):
            raise DagError("invalid_request", f"name is a text of 1 to {MAX_NAME} characters", "name")


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
        after: ids of earlier requests of the same submission that are waited for and not read, since what they compute
            serves this one. If one of them fails, so does this.
        most_tokens: where `sampling` names no `max_tokens`, the most to sample; None is as many as fit.
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
    after: tuple[str, ...] = ()
    most_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A sampled token's log-probability (natural log) and the likeliest alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class Timing:
    """Milliseconds: submission until it waits for no other request any more, compile references, lay out, prepare KV
    (lease, restore), submission to first token.

    Who runs in the step that completes what it reads waits until that step is chosen and the last of these tokens is
    known; compiling, laying out and preparing KV may be over by then, and are in `waited`, too.
    """

    waited: float
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


class TokenEvent(NamedTuple):
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
    _check_ids(request.input_ids, vocab_size)
    _check_types(request)
    for index, ref in enumerate(request.context):
        if not _is_plain(ref):
            _check_reference(ref, f"context[{index}]")
    for index, waited in enumerate(request.after):
        if not isinstance(waited, str):
            raise DagError(
                "invalid_request", f"a request id is a text, not {shown(waited)}", f"after[{index}]"
            )
    most = request.most_tokens
    if most is not None and (not _is_int(most) or most < 1):
        raise DagError(
            "invalid_request", f"most_tokens is an integer from 1, not {shown(most)}", "most_tokens"
        )
    turn, last = request.turn_start, len(request.input_ids)
    if turn is not None and (not _is_int(turn) or not 0 <= turn <= last):
        raise DagError(
            "invalid_request", f"turn_start is an integer from 0 to {last}, not {shown(turn)}", "turn_start"
        )
    params = request.sampling
    if params is None:
        return
    for token in (*params.stop_token_ids, *params.logit_bias):
        if token >= vocab_size:
            name = "logit_bias" if token in params.logit_bias else "stop_token_ids"
            raise DagError("invalid_request", f"the vocabulary has no token {shown(token)}", name)
    if params.stop and not has_text:
        raise DagError("unsupported", "stop strings need a tokenizer; this model has none", "stop")


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    """Refuse what is no token id; ids that all are, as nearly always, are looked at together."""
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for position, token in enumerate(ids):
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            rule = f"token ids are integers from 0 to {vocab_size - 1}, not {shown(token)}"
            raise DagError("invalid_request", rule, f"input[{position}]")


_TEXT_OR_NONE, _KEEP_OR_NONE = (str, NoneType), (Keep, NoneType)


def _check_types(request: Request) -> None:
    """Refuse values that no type allows, before anything is held for them."""
    rules: tuple[tuple[str, object, type | tuple[type, ...], str], ...] = (
        ("position", request.position, str, "the name of a position policy"),
        ("position_options", request.position_options, Mapping, "a mapping of the policy's options"),
        ("backend", request.backend, _TEXT_OR_NONE, "the name of an attention backend"),
        ("keep", request.keep, _KEEP_OR_NONE, "a Keep"),
        ("salt", request.salt, str, "a text"),
        ("after", request.after, tuple, "a tuple of request ids"),
    )
    for name, value, wanted, rule in rules:
        if not isinstance(value, wanted):
            raise DagError("invalid_request", f"{name} is {rule}, not {shown(value)}", name)
    if not _is_int(request.priority):
        raise DagError(
            "invalid_request", f"priority is an integer, not {shown(request.priority)}", "priority"
        )


def _is_plain(ref: ContextRef) -> bool:
    """Whether `_check_reference` has nothing to say, since this names a state and a mode alone, as nearly all do."""
    return (
        type(ref) is ContextRef
        and type(ref.state) is str
        and ref.request is ref.at is ref.start is None
        and ref.mode in MODES
    )


def _check_reference(ref: ContextRef, path: str) -> None:
    if not isinstance(ref, ContextRef):
        raise DagError("invalid_request", f"a reference is a ContextRef, not {shown(ref)}", path)
    if (ref.state is None) == (ref.request is None):
        raise DagError("invalid_request", "a reference names either a state or a request", f"{path}.state")
    for name, value in (("state", ref.state), ("request", ref.request)):
        if value is not None and not isinstance(value, str):
            raise DagError("invalid_request", f"a {name} id is a text, not {shown(value)}", f"{path}.{name}")
    if ref.mode not in MODES:
        rule = f"mode is inherit, digest or artifact, not {shown(ref.mode)}"
        raise DagError("invalid_request", rule, f"{path}.mode")
    for name, number in (("at", ref.at), ("start", ref.start)):
        if number is not None and not _is_int(number):
            rule = f"{name} is an integer, not {shown(number)}"
            raise DagError("invalid_request", rule, f"{path}.{name}")


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def check_parent(parent_id: str, earlier: Mapping[str, Request], field_name: str) -> None:
    """Refuse a reference to a request that does not come earlier in its submission, or that has several answers."""
    if parent_id not in earlier:
        raise DagError("cycle", f"{parent_id!r} is no earlier request", field_name)
    sampling = earlier[parent_id].sampling
    if sampling is not None and sampling.n > 1:
        raise DagError("invalid_request", "a request with n > 1 cannot be read", field_name)
