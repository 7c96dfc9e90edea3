"""Builders: what a Python user writes queries with. A plain text stands for a user's message.

    g(cross(system("Answer."), plus("…", "…"), "Which is it?"), model="m", max_tokens=64)

Every builder checks what it is given and raises `QueryError` with the path of the wrong argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeAlias, TypeVar

from .. import fields
from ..errors import GraphError, QueryError, short
from ..fields import Json
from .expressions import (
    CALLS,
    MAX_DEPTH,
    MAX_INT32,
    MAX_REPEAT,
    RETRIEVE,
    Chat,
    Cross,
    Fragment,
    Generate,
    GenerateParams,
    Map,
    Message,
    Monad,
    Par,
    Plus,
    Print,
    Query,
    Repeat,
    Retrieve,
    Role,
    Seq,
    Zip,
)

Part: TypeAlias = Query | str
Q = TypeVar("Q", bound=Query)


def system(text: str) -> Message:
    """S: a system message."""
    return _message("system", text)


def user(text: str) -> Message:
    """U: a user's message."""
    return _message("user", text)


def assistant(text: str) -> Message:
    """A: an assistant's message."""
    return _message("assistant", text)


def fragment(text: str, source: str | None = None) -> Fragment:
    """F: a piece of a corpus."""
    return Fragment(_text(text, "fragment"), None if source is None else _text(source, "fragment.source"))


def plus(*parts: Part) -> Plus:
    """+ : parts that stand alone, in no order. One part is no mere grouping: it no longer sees what precedes it."""
    return Plus(_parts(parts, "plus"))


def cross(*parts: Part) -> Cross:
    """⋈ : parts of which each sees those before it."""
    return Cross(_parts(parts, "cross"))


def seq(*parts: Part) -> Seq:
    """Parts one after another."""
    return Seq(_parts(parts, "seq"))


def par(*parts: Part) -> Par:
    """Parts at once, kept in order."""
    return Par(_parts(parts, "par"))


def g(
    input: Part,
    *,
    model: str | None = None,
    max_tokens: int = 0,
    temperature: float = 0.6,
    options: Mapping[str, Json] | None = None,
    closed: bool = False,
) -> Generate:
    """G: one call over `input`.

    Args:
        max_tokens: 0 leaves it to whoever runs the query.
        options: further parameters by the engine's names, such as `{"seed": 7}`.
        closed: declares a closed reducer: its answers keep what another such call over them needs.
    """
    checked = _params(model, max_tokens, temperature, options, "g")
    return _deep(Generate(checked, _part(input, "g.input"), _flag(closed, "g.closed")))


def prepare(input: Part, *, model: str | None = None) -> Generate:
    """G¹: a call of one token at temperature 0, for what it leaves in the cache."""
    return g(input, model=model, max_tokens=1, temperature=0.0)


def chat(
    *messages: Message | str,
    model: str | None = None,
    max_tokens: int = 0,
    temperature: float = 0.6,
    options: Mapping[str, Json] | None = None,
) -> Chat:
    """C: one call over messages in order."""
    parts = _parts(messages, "chat.messages")
    for index, part in enumerate(parts):
        if not isinstance(part, Message):
            raise QueryError(
                "invalid_request", f"a chat holds messages, not {part.tag}", f"chat.messages[{index}]"
            )
    return Chat(_params(model, max_tokens, temperature, options, "chat"), parts)  # type: ignore[arg-type]


def retrieve(
    corpus: str,
    question: Part,
    *,
    limit: int | None = None,
    document: str | None = None,
    embedding_model: str | None = None,
) -> Retrieve:
    """R: the fragments of `corpus` that `question`, which holds no call and no retrieval, finds."""
    found = Retrieve(
        _text(corpus, "retrieve.corpus"),
        _part(question, "retrieve.question"),
        limit,
        None if document is None else _text(document, "retrieve.document"),
        None if embedding_model is None else _text(embedding_model, "retrieve.embedding_model"),
    )
    try:
        return _deep(check_retrieve(found))
    except QueryError as error:
        raise error if error.code == "capacity" else error.under("retrieve") from None


def repeat(n: int, call: Generate) -> Repeat:
    """`n` samples of one call, at most 255."""
    if not isinstance(n, int) or isinstance(n, bool) or not 0 <= n <= MAX_REPEAT:
        raise QueryError("invalid_request", f"n is an integer from 0 to 255, not {short(n)}", "repeat.n")
    if not isinstance(call, Generate):
        raise QueryError("invalid_request", f"a repeat holds a g, not {short(call)}", "repeat.g")
    return _deep(Repeat(n, call))


def map_inputs(
    inputs: Sequence[str],
    *,
    model: str | None = None,
    max_tokens: int = 0,
    temperature: float = 0.6,
    options: Mapping[str, Json] | None = None,
) -> Map:
    """The same call over each of several user messages."""
    if isinstance(inputs, str) or not isinstance(inputs, Sequence) or not inputs:
        raise QueryError("invalid_request", "a map needs a list of texts, at least one", "map.inputs")
    texts = tuple(_text(item, f"map.inputs[{index}]") for index, item in enumerate(inputs))
    if "" in texts:
        raise QueryError(
            "invalid_request", "an input without text shows nothing", f"map.inputs[{texts.index('')}]"
        )
    return Map(_params(model, max_tokens, temperature, options, "map.metadata"), texts)


def zipped(first: Part, second: Part) -> Zip:
    """`first` before each child of `second`."""
    return _deep(Zip(_part(first, "zip.first"), _part(second, "zip.second")))


def monad(query: Part) -> Monad:
    """Execute for what it leaves in the cache; show nothing."""
    return _deep(Monad(_part(query, "monad")))


def note(text: str) -> Print:
    """A text for whoever runs the query."""
    return Print(_text(text, "print"))


def check_retrieve(query: Retrieve) -> Retrieve:
    """The same retrieval. Raises QueryError with the field `limit` or `question` if it cannot be that."""
    limit = query.limit
    if limit is not None and (isinstance(limit, bool) or not isinstance(limit, int) or limit < 1):
        raise QueryError("invalid_request", f"an integer from 1 is needed, not {short(limit)}", "limit")
    if query.question.kinds & (CALLS | RETRIEVE):
        raise QueryError(
            "invalid_request",
            "a question holds no call and no retrieval: what is found is known before anything is generated",
            "question",
        )
    return query


def check_params(params: GenerateParams) -> GenerateParams:
    """The same parameters. Raises QueryError with the field's name if one cannot be."""
    limit, temperature = params.max_tokens, params.temperature
    if isinstance(limit, bool) or not isinstance(limit, int) or not 0 <= limit <= MAX_INT32:
        raise QueryError(
            "invalid_request", f"an integer from 0 to 2^31 - 1 is needed, not {short(limit)}", "max_tokens"
        )
    if isinstance(temperature, bool) or not isinstance(temperature, int | float):
        raise QueryError("invalid_request", f"a number is needed, not {short(temperature)}", "temperature")
    if not 0 <= temperature or not math.isfinite(temperature):
        raise QueryError(
            "invalid_request", f"a finite number from 0 is needed, not {short(temperature)}", "temperature"
        )
    for name in ("model", "max_tokens", "temperature", "n"):
        if name in params.options:
            raise QueryError("invalid_request", f"{name} is no further parameter", f"options.{name}")
    return params


def _params(
    model: str | None,
    max_tokens: int,
    temperature: float,
    options: Mapping[str, Json] | None,
    path: str,
) -> GenerateParams:
    try:
        return check_params(
            GenerateParams(
                None if model is None else fields.name(model, "model"),
                max_tokens,
                temperature,
                fields.mapping({} if options is None else options, "options"),
            )
        )
    except GraphError as error:
        raise QueryError(error.code, error.message, error.field).under(path) from None


def _message(role: Role, text: str) -> Message:
    return Message(role, _text(text, role))


def _text(value: object, path: str) -> str:
    try:
        return fields.text(value, path)
    except GraphError as error:
        raise QueryError(error.code, error.message, error.field) from None


def _flag(value: object, path: str) -> bool:
    if not isinstance(value, bool):
        raise QueryError("invalid_request", f"true or false is needed, not {short(value)}", path)
    return value


def _parts(values: Sequence[object], path: str) -> tuple[Query, ...]:
    if not values:
        raise QueryError("invalid_request", "at least one part is needed; leave out what is empty", path)
    parts = tuple(_part(value, f"{path}[{index}]") for index, value in enumerate(values))
    for part in parts:
        if part.depth >= MAX_DEPTH:
            raise _too_deep(path)
    return parts


def _part(value: object, path: str) -> Query:
    if isinstance(value, Query):
        return value
    if isinstance(value, str):
        return Message("user", _text(value, path))
    raise QueryError("invalid_request", f"a query or a text is needed, not {short(value)}", path)


def _deep(query: Q) -> Q:
    if query.depth > MAX_DEPTH:
        raise _too_deep(query.tag)
    return query


def _too_deep(path: str) -> QueryError:
    return QueryError("capacity", f"a query nests at most {MAX_DEPTH} constructors", path)
