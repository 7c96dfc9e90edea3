"""What a user can do wrong, typed.

Every refusal carries a stable `code`, the `field` it is about (a path into what the caller sent), and a
message that says what would be right. The packages below raise errors of their own; `as_dag_error` is the one
place where they become the engine's.
"""

from __future__ import annotations


class DagError(Exception):
    """A request that is refused or that failed.

    Args:
        code: one of the refusals of the definition (`state_not_found`, `cycle`, ...), or `invalid_request`,
            `unsupported`, `model_not_found`, `invalid_weights`, `cancelled`, `timeout`, `internal`,
            `state_unavailable`, `queue_full`, `engine_dead`.
        message: what is wrong and what would be right.
        field: the path of the offending field in the caller's terms, if one is to blame.
    """

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field

    def __str__(self) -> str:
        where = f" ({self.field})" if self.field else ""
        return f"{self.code}: {self.message}{where}"


class EngineDead(DagError):
    """The engine thread stopped; nothing further is served."""

    def __init__(self, message: str) -> None:
        super().__init__("engine_dead", message)


def shown(value: object) -> str:
    """A caller's value in a message: its repr, cut short."""
    try:
        return repr(value)[:80]
    except ValueError:
        return "an integer of thousands of digits"


def as_dag_error(error: Exception, field: str | None = None) -> DagError:
    """Map an error of another package to the engine's; `field` is used where the error names none."""
    if isinstance(error, DagError):
        if error.field is None and field is not None:
            return DagError(error.code, error.message, field)
        return error
    code = getattr(error, "code", None)
    if isinstance(code, str):
        message = getattr(error, "message", None)
        text = message if isinstance(message, str) else str(error)
        return DagError(code, text, getattr(error, "field", None) or field)
    return DagError("internal", f"{type(error).__name__}: {error}", field)
