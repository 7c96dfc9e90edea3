"""The one exception of this package: it knows what was asked and what would be right, never who asked.

`code` is stable and machine-readable, `field` names the argument (or the row of a table) at fault.
"""

from __future__ import annotations

INVALID_TABLE = "invalid_segment_table"
INVALID_ARGUMENT = "invalid_argument"
POSITION_OVERFLOW = "position_overflow"
UNSUPPORTED = "capability_missing"
BACKEND_UNKNOWN = "backend_not_found"
BACKEND_BROKEN = "backend_not_loadable"


class KernelError(ValueError):
    """A call that no kernel can serve.

    Attributes:
        code: one of the constants of this module.
        field: the argument, attribute or table row at fault, e.g. ``extents[3].HI``; None if it is not one.
    """

    def __init__(self, code: str, message: str, field: str | None = None) -> None:
        super().__init__(f"{field}: {message}" if field else message)
        self.code = code
        self.field = field
        self.message = message
