"""From the bytes of a body to a checked value: whatever the bytes, that or a DagError naming the field. And when they
were there.
"""

from __future__ import annotations

import asyncio
import json
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from reprlib import repr as shortened
from typing import Any, TypeVar

import jiter
from pydantic import BaseModel, ValidationError
from starlette.requests import Request

from dagengine import DagError

from .protocol import Message

Body = TypeVar("Body", bound=BaseModel)
MESSAGES = dict.fromkeys(("model_type", "model_attributes_type", "dict_type"), "a JSON object is needed")
MOST_AT_ONCE = 2**16
"""Bytes of a body that is parsed in about a millisecond, whatever is wrong with it."""
MOST_AT_ONCE_BY_JITER, MOST_QUOTES = 2**20, 2**12
"""The same where jiter parses it and most of it are texts: bytes of a body, and quotation marks in it."""
BACKSLASH = "\\"
SURROGATE_ESCAPE = re.compile(r"\\u[dD][89a-fA-F]")


async def read_json(request: Request, *, optional: bool = False) -> Any:
    """The body's JSON value; None for an empty body where it is optional.

    Raises:
        DagError: `unsupported_media_type`, `body_too_large`, or `invalid_request` for what is no JSON.
    """
    data = await request.body()
    if optional and not data:
        return None
    _check_kind(request.headers.get("content-type", ""))
    return await _parsed(parse_json, data)


async def read_query_json(request: Request) -> Any:
    """What `parse_query_json` makes of the body, sent as JSON or, as spnl's client does, as plain text. Raises as
    `read_json`.
    """
    data = await request.body()
    _check_kind(request.headers.get("content-type", "text/plain"), "text/plain")
    if len(data) <= MOST_AT_ONCE_BY_JITER and data.count(b'"') <= MOST_QUOTES:
        try:
            return _by_jiter(data)
        except ValueError:
            return await _parsed(parse_json, data)
    return await _parsed(parse_query_json, data)


async def _parsed(parse: Callable[[bytes], Any], data: bytes) -> Any:
    """Here what takes about a millisecond; more on a thread, since to say what is wrong with it may take seconds."""
    return parse(data) if len(data) <= MOST_AT_ONCE else await asyncio.to_thread(parse, data)


def parse_query_json(data: bytes) -> Any:
    """What `parse_json` gives, in a tenth of its time; a number beyond a double is an infinity, which is refused where
    a query is read, by its path. Raises as `parse_json`.
    """
    try:
        return _by_jiter(data)
    except ValueError:
        return parse_json(data)  # what is wrong with it; or it is only nested more deeply than jiter goes


def _by_jiter(data: bytes) -> Any:
    return jiter.from_json(data, allow_inf_nan=False, cache_mode="keys", catch_duplicate_keys=True)


def is_small(value: Any, most: int) -> bool:
    """Whether a JSON value holds at most so many values, itself included; looks at no more than that."""
    waiting, left = [value], most
    while waiting:
        left -= 1
        found = waiting.pop()
        if isinstance(found, dict | list):
            if len(found) + len(waiting) > left:
                return False
            waiting += found.values() if isinstance(found, dict) else found
    return True


def parse_json(data: bytes) -> Any:
    """Strict JSON in UTF-8: no NaN, no number beyond a double, no half surrogate pairs, no field twice."""
    try:
        text = data.decode()
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite, object_pairs_hook=_once)
    except RecursionError:
        raise DagError("invalid_request", "the body's JSON is nested too deeply") from None
    except ValueError as error:
        raise DagError("invalid_request", f"the body is no JSON: {error}") from None
    if BACKSLASH in text and SURROGATE_ESCAPE.search(text):
        _require_unicode(value)
    return value


def _check_kind(content_type: str, *others: str) -> None:
    kind = content_type.partition(";")[0].strip().lower()
    if kind in ("application/json", *others) or (kind.startswith("application/") and kind.endswith("+json")):
        return
    raise DagError("unsupported_media_type", "send the body as application/json", "Content-Type")


def parse_body(model: type[Body], value: Any, path: str = "") -> Body:
    """The value as `model`. Raises DagError `invalid_request` or `unsupported`, naming the field."""
    if not isinstance(value, dict):
        raise DagError("invalid_request", f"a JSON object is needed, not {_shown(value)}", path or None)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
    where = _path(found["loc"], value)
    if found["type"] in ("unknown_field", "unsupported_field"):
        code = "invalid_request" if found["type"] == "unknown_field" else "unsupported"
        where = _join(where, str(found["ctx"]["name"]))
        raise DagError(code, found["msg"], _join(path, where))
    message = MESSAGES.get(found["type"]) or found["msg"][0].lower() + found["msg"][1:]
    if found["type"] == "missing":
        raise DagError("invalid_request", f"{where} is required", _join(path, where))
    raise DagError("invalid_request", f"{message}, not {_shown(found['input'])}", _join(path, where) or None)


def check_messages(messages: Any, path: str, *, names: bool) -> None:
    """Every message has a role, a content and nothing that would be ignored.

    Args:
        names: whether the chat template uses the names of messages.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise DagError("invalid_request", "send at least one message", path)
    for index, message in enumerate(messages):
        here = f"{path}[{index}]"
        checked = parse_body(Message, dict(message) if isinstance(message, Mapping) else message, here)
        if checked.name is not None and not names:
            raise DagError("unsupported", "this model's chat template uses no names", f"{here}.name")


def plain_messages(messages: Any) -> list[dict[str, Any]]:
    """Messages without the fields that hold nothing."""
    kept = ("role", "content", "name")
    return [{name: message[name] for name in kept if message.get(name) is not None} for message in messages]


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is beyond a double")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name in counts if counts[name] > 1).encode(errors="replace").decode()
        raise DagError("invalid_request", f"an object has the field {_shown(twice)} twice", twice)
    return found


def _require_unicode(value: Any) -> None:
    stack: list[tuple[str, Any]] = [("", value)]
    while stack:
        path, item = stack.pop()
        if isinstance(item, str):
            if not _is_unicode(item):
                message = "the text holds a lone surrogate, which is no character"
                raise DagError("invalid_request", message, path or None)
        elif isinstance(item, list):
            worth = [index for index, member in enumerate(item) if _may_be_wrong(member)]
            stack += [(f"{path}[{index}]", item[index]) for index in reversed(worth)]
        elif isinstance(item, dict):
            for name, member in reversed(item.items()):
                if not _is_unicode(name):
                    raise DagError("invalid_request", "a field's name holds a lone surrogate", path or None)
                if _may_be_wrong(member):
                    stack.append((_join(path, name), member))


def _may_be_wrong(value: Any) -> bool:
    """Whether a value holds others or is no Unicode: only of such a path is made."""
    return not _is_unicode(value) if isinstance(value, str) else isinstance(value, dict | list)


def _is_unicode(text: str) -> bool:
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _path(loc: tuple[int | str, ...], value: Any) -> str:
    """The location as a JSON path; parts that name a branch of a union address nothing and are left out."""
    path = ""
    for index, part in enumerate(loc):
        last = index == len(loc) - 1
        if isinstance(value, Mapping) and isinstance(part, str) and (part in value or last):
            path, value = _join(path, part), value.get(part)
        elif isinstance(value, list) and isinstance(part, int) and part < len(value):
            path, value = f"{path}[{part}]", value[part]
    return path


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _shown(value: Any) -> str:
    try:
        return shortened(value)
    except ValueError:
        return "an integer of thousands of digits"


async def body_came(request: Request) -> float:
    """When the last of the body came, on the clock of `time.perf_counter`, once it is there: on another connection than
    `BoundedHttp`, which does not note it, when it was read. Raises as `Request.body`.
    """
    await request.body()
    came: float = getattr(request.state, "body_came", None) or time.perf_counter()
    return came
