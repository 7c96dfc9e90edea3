"""From what a caller writes (text, ids, messages; states, results, references) to requests. Knows no queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from .errors import DagError
from .request import ContextRef, Keep, Request
from .sampling import SamplingParams
from .tokenizer import ChatPrompt, Tokenizer

ROLES = ("system", "user", "assistant", "tool", "developer")
Input = str | Sequence[int] | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class InputEncoder:
    """Turns inputs into ids the way the definition says.

    Text is tokenised as it stands, with special tokens iff the node has no context; ids are taken as they are;
    messages go through the chat template, after a context without a second BOS and default system turn, and with
    the generation prompt iff the node generates.
    """

    tokenizer: Tokenizer | None

    def encode(
        self,
        value: Input,
        *,
        generate: bool,
        has_context: bool,
        add_special_tokens: bool | None = None,
        field: str = "input",
    ) -> ChatPrompt:
        """Own input tokens, and where a chat's generation prompt begins.

        Raises:
            DagError: `invalid_request` or `unsupported`, naming `field`.
        """
        if isinstance(value, str):
            special = not has_context if add_special_tokens is None else add_special_tokens
            try:
                ids = self._require(field).encode(value, add_special_tokens=special)
            except DagError as error:
                raise DagError(error.code, error.message, field) from None
            return ChatPrompt(tuple(ids), None)
        if not isinstance(value, Sequence) or isinstance(value, bytes):
            raise DagError("invalid_request", "input is text, token ids, or messages", field)
        if all(isinstance(item, int) for item in value):
            return ChatPrompt(tuple(value), None)  # type: ignore[arg-type]
        if not all(isinstance(item, Mapping) for item in value):
            raise DagError(
                "invalid_request", "input is text, a list of token ids, or a list of messages", field
            )
        if add_special_tokens is not None:
            raise DagError(
                "invalid_request",
                "the chat template decides on special tokens in messages",
                "add_special_tokens",
            )
        messages = [_message(m, f"{field}[{i}]") for i, m in enumerate(value)]  # type: ignore[arg-type]
        return self._require(field).chat(messages, generate=generate, has_context=has_context)

    def _require(self, field: str) -> Tokenizer:
        if self.tokenizer is None:
            raise DagError("unsupported", "this model has no tokenizer; send token ids", field)
        return self.tokenizer


def build_request(
    encoder: InputEncoder,
    value: Input,
    *,
    sampling: SamplingParams | None,
    context: Sequence[ContextRef] = (),
    position: str = "linear",
    position_options: Mapping[str, object] | None = None,
    backend: str | None = None,
    keep: Keep | None = None,
    salt: str = "",
    priority: int = 0,
    add_special_tokens: bool | None = None,
    request_id: str | None = None,
) -> Request:
    """A request from a caller's input. Raises as `InputEncoder.encode`."""
    if position_options is not None and not isinstance(position_options, Mapping):
        rule = "position_options is a mapping of names to values"
        raise DagError("invalid_request", rule, "position_options")
    prompt = encoder.encode(
        value, generate=sampling is not None, has_context=bool(context), add_special_tokens=add_special_tokens
    )
    return Request(
        id=request_id or new_request_id(),
        input_ids=prompt.input_ids,
        sampling=sampling,
        context=tuple(context),
        position=position,
        position_options=dict(position_options or {}),
        backend=backend,
        keep=keep,
        salt=salt,
        priority=priority,
        turn_start=prompt.turn_start,
    )


def new_request_id() -> str:
    return f"req-{uuid4().hex}"


def parse_keep(value: object, field: str) -> Keep:
    """`keep` from JSON-like data: `{"ttl_s", "pin", "name"}`, all optional.

    Raises:
        DagError: `invalid_request`, naming the field.
    """
    if not isinstance(value, Mapping):
        raise DagError("invalid_request", "keep is an object with ttl_s, pin, name", field)
    for key in value:
        if key not in ("ttl_s", "pin", "name"):
            raise DagError("invalid_request", f"keep has ttl_s, pin and name, not {key!r}", f"{field}.{key}")
    try:
        return Keep(**{name: item for name, item in value.items() if item is not None})
    except DagError as error:
        raise DagError(error.code, error.message, f"{field}.{error.field}") from None


def _message(message: Mapping[str, Any], field: str) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    if role not in ROLES:
        raise DagError("invalid_request", f"role is one of {', '.join(ROLES)}, not {role!r}", f"{field}.role")
    if isinstance(content, Sequence) and not isinstance(content, str):
        content = _joined_parts(content, f"{field}.content")
    if not isinstance(content, str):
        raise DagError("invalid_request", "content is text, or a list of text parts", f"{field}.content")
    return {**message, "content": content}


def _joined_parts(parts: Sequence[Any], field: str) -> str:
    texts = []
    for index, part in enumerate(parts):
        if (
            not isinstance(part, Mapping)
            or part.get("type") != "text"
            or not isinstance(part.get("text"), str)
        ):
            raise DagError("invalid_request", "only parts of type text are supported", f"{field}[{index}]")
        texts.append(part["text"])
    return "".join(texts)
