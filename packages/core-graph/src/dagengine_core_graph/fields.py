"""Checked access to JSON-like values: whatever comes in, a value of the right type or a SchemaError.

Every function takes the value and its JSON path, and raises SchemaError with `field` = that path.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from typing import TypeAlias

from .context import Reference, Span, make_reference
from .errors import GraphError, SchemaError, short

Json: TypeAlias = bool | int | float | str | list["Json"] | dict[str, "Json"] | None

LARGEST_INT = 2**53 - 1
DEEPEST_JSON = 32
SPAN_NAMES = ("prompt", "output", "turn", "all")


def join(path: str, name: str) -> str:
    """The path of a member of the object at `path`."""
    return f"{path}.{name}" if path else name


def suggest(name: str, known: Iterable[str]) -> str:
    """`; did you mean 'known'?` if one is close, else nothing."""
    close = get_close_matches(name[:64], [candidate[:64] for candidate in known], n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def members(value: object, path: str, known: tuple[str, ...]) -> dict[str, object]:
    """The members of an object, all of them `known`; null means absent."""
    if not isinstance(value, Mapping):
        raise SchemaError("invalid_request", f"an object is needed, not {short(value)}", path)
    for name in value:
        if not isinstance(name, str):
            raise SchemaError("invalid_request", f"names are strings, unlike {short(name)}", path)
        if name not in known:
            hint = suggest(name, known) or f"; known are {', '.join(known)}"
            raise SchemaError("invalid_request", f"unknown field{hint}", join(path, short(name)[1:-1]))
    return {name: member for name, member in value.items() if member is not None}


def items(value: object, path: str) -> list[object]:
    """The items of an array; absent is empty."""
    if value is None:
        return []
    if not isinstance(value, list | tuple):
        raise SchemaError("invalid_request", f"an array is needed, not {short(value)}", path)
    return list(value)


def text(value: object, path: str) -> str:
    """A string that can be encoded: half a surrogate pair cannot."""
    if not isinstance(value, str):
        raise SchemaError("invalid_request", f"a string is needed, not {short(value)}", path)
    if value.isascii():
        return value
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise SchemaError("invalid_request", f"half a surrogate pair at {error.start}", path) from None
    return value


def name(value: object, path: str) -> str:
    """A string that is not empty."""
    if value == "":
        raise SchemaError("invalid_request", "a name is needed, not an empty string", path)
    return text(value, path)


def boolean(value: object, path: str) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise SchemaError("invalid_request", f"true or false is needed, not {short(value)}", path)
    return value


def integer(value: object, path: str) -> int:
    """An int that JSON carries exactly; neither a bool nor a float."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise SchemaError("invalid_request", f"an integer is needed, not {short(value)}", path)
    if not -LARGEST_INT <= value <= LARGEST_INT:
        raise SchemaError("invalid_request", "an integer within 2^53 is needed", path)
    return int(value)


def count(value: object, path: str) -> int:
    """An int from 0."""
    if integer(value, path) < 0:
        raise SchemaError("invalid_request", f"an integer from 0 is needed, not {value}", path)
    return integer(value, path)


def mapping(value: object, path: str) -> dict[str, Json]:
    """A copy of an object of plain JSON values, whatever its names."""
    if not isinstance(value, Mapping):
        raise SchemaError("invalid_request", f"an object is needed, not {short(value)}", path)
    copied = plain(value, path)
    assert isinstance(copied, dict)
    return copied


def plain(value: object, path: str, depth: int = 0) -> Json:
    """A copy of a JSON value: finite numbers, string names, a bounded depth."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, path)
    if isinstance(value, int):
        return integer(value, path)
    if isinstance(value, float):
        if not math.isfinite(value):
            raise SchemaError("invalid_request", f"a finite number is needed, not {value}", path)
        return value
    if depth == DEEPEST_JSON:
        raise SchemaError("invalid_request", f"nested deeper than {DEEPEST_JSON}", path)
    if isinstance(value, list | tuple):
        return [plain(item, f"{path}[{index}]", depth + 1) for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        return {
            name(key, path): plain(member, join(path, short(key)[1:-1]), depth + 1)
            for key, member in value.items()
        }
    raise SchemaError("invalid_request", f"{short(value)} is not JSON", path)


def span(value: object, path: str) -> Span:
    """A named span, or `[start, stop]`."""
    if isinstance(value, str):
        for known in SPAN_NAMES:
            if value == known:
                return known  # type: ignore[return-value]
        hint = suggest(value, SPAN_NAMES)
        raise SchemaError("invalid_request", f"a span is prompt, output, turn or all{hint}", path)
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise SchemaError("invalid_request", f"a span is a name or [start, stop], not {short(value)}", path)
    start, stop = integer(value[0], f"{path}[0]"), integer(value[1], f"{path}[1]")
    if not 0 <= start <= stop:
        raise SchemaError("span_out_of_range", f"0 <= start <= stop is needed, not [{start}, {stop}]", path)
    return start, stop


def reference(parent: str, found: Mapping[str, object], path: str) -> Reference:
    """The reference to `parent` whose `mode`, `span`, `at` and `start` are among the members `found`."""
    at = integer(found["at"], join(path, "at")) if "at" in found else None
    if at is not None and at < 0:
        raise SchemaError("span_out_of_range", f"a fork is cut at 0 or later, not {at}", join(path, "at"))
    try:
        return make_reference(
            parent,
            text(found.get("mode", "inherit"), join(path, "mode")),
            span(found["span"], join(path, "span")) if "span" in found else None,
            at,
            count(found["start"], join(path, "start")) if "start" in found else None,
        )
    except SchemaError:
        raise
    except GraphError as error:
        raise SchemaError(error.code, error.message, join(path, error.field or "")) from None
