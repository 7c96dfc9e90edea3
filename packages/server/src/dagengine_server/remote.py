"""What a client holds of a server's states: handles, results, and references to them as the wire has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from dagengine import ContextRef, DagError, NodeRef
from dagengine.request import SpanName

if TYPE_CHECKING:
    from .client import Client

Span = SpanName | tuple[int, int] | None


class State:
    """A handle on sealed KV on the server. As a context manager it is released when the block ends.

    `len` is the number of own tokens; the server is asked for it once where its answer did not say it.

    Attributes:
        id: the state id, `st_...`.
        spans: half-open named spans in the state's own tokens.
    """

    def __init__(
        self, client: Client, state_id: str, spans: Mapping[str, Sequence[int]], tokens: int | None = None
    ) -> None:
        self.id, self._client, self._tokens = state_id, client, tokens
        self.spans = {name: (span[0], span[1]) for name, span in spans.items()}

    def __len__(self) -> int:
        if self._tokens is None:
            self._tokens = int(self.describe()["tokens"])
        return self._tokens

    def __bool__(self) -> bool:
        return True

    def __repr__(self) -> str:
        return f"<State {self.id}>"

    def __enter__(self) -> State:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def inherit(self, *, start: int | None = None) -> ContextRef:
        """Read all that the state passes on and all of its tokens, and pass both on."""
        return ContextRef(state=self.id, mode="inherit", start=start)

    def digest(self, *, start: int | None = None) -> ContextRef:
        """Read the same as `inherit`, but pass nothing of it on."""
        return ContextRef(state=self.id, mode="digest", start=start)

    def artifact(self, span: Span = None, *, start: int | None = None) -> ContextRef:
        """Read only a span of the state's own tokens: its output, or all of a state that sampled nothing."""
        return ContextRef(state=self.id, mode="artifact", span=span, start=start)

    def fork(self, at: int) -> State:
        """A new handle on the first `at` tokens. Raises DagError `span_out_of_range`."""
        body = {"at": at, "keep": self._client.keep_object(True), "cache_salt": self._client.cache_salt}
        return self._client.state_of(self._client.post(f"{self._path}/fork", body))

    def retain(self, ttl_s: float | None = None) -> None:
        """Hold it for `ttl_s` seconds from now, or until it is released."""
        self._client.post(f"{self._path}/retain", {"ttl_s": ttl_s, "cache_salt": self._client.cache_salt})

    def offload(self) -> None:
        """Move its pages to the host as soon as nothing needs them on the device; reading it brings them back.

        Raises: DagError `unsupported` without a host tier, `capacity` if the host has no room.
        """
        self._client.post(f"{self._path}/offload", {"cache_salt": self._client.cache_salt})

    def prefetch(self) -> None:
        """Begin to bring back what was offloaded of it and of what it passes on, as far as pages are unused.

        Raises: DagError `unsupported` without a host tier.
        """
        self._client.post(f"{self._path}/prefetch", {"cache_salt": self._client.cache_salt})

    def describe(self) -> dict[str, Any]:
        """Tokens, pages, tier, readers, signature, layout."""
        return self._client.get(self._path, self._client.salted())

    def release(self) -> None:
        """Let go of the state; whatever reads it keeps what it reads. Releasing twice is no error."""
        try:
            self._client.call("DELETE", self._path, params=self._client.salted())
        except DagError as error:
            if error.code not in ("state_released", "state_not_found"):
                raise

    close = release

    @property
    def _path(self) -> str:
        return f"/v1/states/{quote(self.id, safe='')}"


@dataclass(frozen=True)
class Usage:
    """Tokens of one request: what the prompt sees and holds, how much was there already, what was sampled."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int


@dataclass(frozen=True)
class Result:
    """One finished answer.

    Attributes:
        state: None where it was not kept.
        usage: of the request that it came from; with n > 1 of all its answers together.
        dag: what was read, how it was laid out, and how long it took, as the server says it.
        logprobs: in the endpoint's own shape, or None.
    """

    text: str
    token_ids: tuple[int, ...]
    logprobs: Any
    finish_reason: str
    stop_reason: int | str | None
    usage: Usage
    state: State | None
    dag: Mapping[str, Any]

    def inherit(self, *, start: int | None = None) -> ContextRef:
        return self._kept().inherit(start=start)

    def digest(self, *, start: int | None = None) -> ContextRef:
        return self._kept().digest(start=start)

    def artifact(self, span: Span = None, *, start: int | None = None) -> ContextRef:
        return self._kept().artifact(span, start=start)

    def fork(self, at: int) -> State:
        return self._kept().fork(at)

    def release(self) -> None:
        """Release the state, if there is one."""
        if self.state is not None:
            self.state.release()

    close = release

    def _kept(self) -> State:
        if self.state is None:
            raise DagError("state_not_found", "this result was not kept; ask for it with keep=True", "keep")
        return self.state


ContextItem = State | Result | ContextRef | NodeRef | str


def context_objects(context: Sequence[ContextItem] | None) -> list[dict[str, Any]]:
    """References as the wire has them. Raises DagError `invalid_request`, naming `context[i]`."""
    if context is None:
        return []
    if isinstance(context, str) or not isinstance(context, Sequence):
        raise DagError("invalid_request", "context is a list of states, results or references", "context")
    return [_reference(item, f"context[{index}]") for index, item in enumerate(context)]


def position_object(policy: str | None, options: Mapping[str, object] | None) -> dict[str, Any] | None:
    if options is not None and not isinstance(options, Mapping):
        message = "position_options is a mapping of names to values"
        raise DagError("invalid_request", message, "position_options")
    if policy is None and not options:
        return None
    return {**({} if policy is None else {"policy": policy}), **(options or {})}


def _reference(item: object, path: str) -> dict[str, Any]:
    if isinstance(item, str):
        return {"state": item}
    if isinstance(item, State | Result | NodeRef):
        item = item.inherit()
    if not isinstance(item, ContextRef):
        message = f"a reference is a state, a result, a node or a state id, not {type(item).__name__}"
        raise DagError("invalid_request", message, path)
    named = without_none(asdict(item))
    if "request" in named:
        named["node"] = named.pop("request")
    return named


def without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that have a value; null means absent on the wire."""
    return {name: value for name, value in values.items() if value is not None}
