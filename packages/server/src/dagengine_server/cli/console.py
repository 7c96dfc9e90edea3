"""What commands read and print. Results go to standard output, all else to standard error.

Imports nothing of the engine, so that `dagengine --help` is quick.
"""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table


class CommandError(Exception):
    """A command cannot do what it was asked; attributes as of the engine's `DagError`."""

    def __init__(self, message: str, field: str | None = None, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.code, self.message, self.field = code, message, field


def new_app(summary: str) -> typer.Typer:
    """A command, or a group of them, with our settings.

    No markup: it would take `[default: ...]` in a help text for a tag, and its tables cut long option names.
    """
    return typer.Typer(
        help=summary, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None
    )


def say(message: str) -> None:
    """A message for people."""
    print(message, file=sys.stderr, flush=True)


def print_json(value: Any, *, indent: int | None = 2) -> None:
    print(json.dumps(value, ensure_ascii=False, indent=indent), flush=True)


def print_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """A table on standard output; cells are shown as they are, without markup."""
    table = Table(title=title, title_justify="left", header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(_plain(cell) for cell in row))
    console = Console(markup=False, highlight=False, width=None if sys.stdout.isatty() else 160)
    console.print(table)


def read_json(path: Path) -> Any:
    """The JSON document of a file, or of standard input for `-`. Raises CommandError."""
    text = read_text(path)
    try:
        return json.loads(text)
    except ValueError as error:
        raise CommandError(f"{path} is no JSON: {error}") from None
    except RecursionError:
        raise CommandError(f"{path} is nested too deeply") from None


def read_text(path: Path) -> str:
    """The text of a file, or of standard input for `-`. Raises CommandError."""
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path} cannot be read: {error}") from None


def is_refusal(error: Exception) -> bool:
    """Whether this is an error of one of our packages, meant for the user."""
    return isinstance(getattr(error, "code", None), str)


def error_line(error: Exception) -> str:
    """Such an error in one line: what is wrong, where, and its code."""
    code, field = getattr(error, "code", None), getattr(error, "field", None)
    message = getattr(error, "message", None) or str(error)
    where = f"{field}: " if field else ""
    return f"error: {where}{message}{f' ({code})' if code else ''}"


def suggestion(name: str, known: Iterable[str]) -> str:
    """`; did you mean ...?`, or nothing where nothing is close."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _plain(cell: object) -> str:
    return "" if cell is None else str(cell)
