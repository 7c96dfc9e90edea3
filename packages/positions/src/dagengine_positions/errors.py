"""Typed refusals.

Every mistake a caller can make ends here: a code, the field that is wrong, and a message saying what would be
right. The codes are the refusals of the context-graph definition plus three of this package:
``invalid_config`` (a configuration value that cannot be what it should be), ``unsupported_model`` (a model
whose mathematics this package does not know) and ``plugin_broken`` (an extension that cannot be used).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from difflib import get_close_matches


class PositionError(Exception):
    """A refusal.

    Attributes:
        code: machine-readable reason, such as ``policy_unsupported`` or ``position_overflow``.
        field: path of the wrong value, such as ``context[2].start``, or None.
        message: one sentence naming what would be right.
    """

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def __reduce__(self) -> tuple[type[PositionError], tuple[str, str, str | None]]:
        return type(self), (self.code, self.message, self.field)


class ConfigError(PositionError):
    """A model configuration, or a value in it, that is refused."""


def suggestion(name: object, known: Iterable[str]) -> str:
    """`` (did you mean 'x'?)`` where one of `known` is close to `name`, else an empty string."""
    close = get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def shown(value: object) -> str:
    """`value` for a message: at most 60 characters, whatever it holds."""
    try:
        text = repr(value)
    except ValueError:  # Python prints no integers beyond a few thousand digits
        return f"a {type(value).__name__} too long to print"
    return text if len(text) <= 60 else text[:57] + "..."


def whole(error: type[PositionError], code: str, value: object, field: str, low: int, high: int) -> int:
    """`value` as an integer in [low, high]; raises `error` for anything else, also a bool."""
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise error(code, f"must be an integer from {low} to {high}, not {shown(value)}", field)
    return value


def real(error: type[PositionError], code: str, value: object, field: str, low: float, high: float) -> float:
    """`value` as a finite float in [low, high]; raises `error` for anything else, also NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not low <= value <= high:
        raise error(code, f"must be a number from {low:g} to {high:g}, not {shown(value)}", field)
    result = float(value)
    assert math.isfinite(result)
    return result
