"""One exception type: a typed refusal that says which field is wrong and what would be right."""

from __future__ import annotations

from reprlib import repr as shortened
from typing import Self


class GraphError(Exception):
    """A mistake of the caller.

    Attributes:
        code: a refusal of the product (`state_not_found`, `state_not_sealed`, `span_out_of_range`,
            `edge_mix_forbidden`, `cycle`) or `invalid_request`.
        field: path of the offending field, such as `context[2].span`; None if it is the call as a whole.
        message: what is wrong and what would be right.
    """

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.field = field

    def __str__(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message

    def under(self, path: str) -> Self:
        """The same refusal with its field seen from further out: `span` becomes `path.span`."""
        return type(self)(self.code, self.message, f"{path}.{self.field}" if self.field else path)


class SchemaError(GraphError):
    """A JSON document that does not follow its format; `field` is the JSON path."""


class QueryError(GraphError):
    """A span query that cannot be built, planned or lowered.

    `field` is the path of the subtree, such as `g.input.cross[1].plus[0]`; the code is `invalid_request`, or
    `capacity` for what is too large or too deep.
    """


def short(value: object) -> str:
    """The value for a message, cut to a readable length."""
    try:
        return shortened(value)
    except ValueError:
        return "an integer of thousands of digits"
