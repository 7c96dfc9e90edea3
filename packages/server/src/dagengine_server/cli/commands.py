"""Finding commands: the entry points `dagengine.commands`, where the built-in ones are registered too.

An entry point names a `typer.Typer`, or a callable that takes the arguments after the command's name, a list
of strings, and returns an exit status (None is 0). A built-in is never replaced; of several others with one
name the first distribution by name counts. Nothing is loaded before it is asked for, and a broken command
harms no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points

import typer

GROUP = "dagengine.commands"
OWN = "dagengine-server"


class CommandBroken(Exception):
    """An entry point that cannot be used; the message says why."""


@dataclass(frozen=True)
class Command:
    """One registered command."""

    name: str
    point: EntryPoint

    @property
    def distribution(self) -> str:
        return self.point.dist.name if self.point.dist is not None else ""

    def load(self) -> typer.Typer | Callable[[list[str]], int | None]:
        """The command itself. Raises CommandBroken."""
        try:
            loaded = self.point.load()
        except (Exception, SystemExit) as error:
            raise CommandBroken(f"{type(error).__name__}: {error}") from error
        if not callable(loaded):
            raise CommandBroken(f"{self.point.value} is neither a typer.Typer nor callable")
        return loaded  # type: ignore[no-any-return]

    def summary(self) -> str:
        """One line for the list of commands; the error of a broken one."""
        try:
            loaded = self.load()
        except CommandBroken as error:
            return f"(broken: {error})"
        text = loaded.info.help if isinstance(loaded, typer.Typer) else loaded.__doc__
        return (text or "").strip().partition("\n")[0] if isinstance(text, str) else ""

    def run(self, arguments: Sequence[str]) -> int:
        """Run it; returns the exit status. Raises CommandBroken, and whatever the command raises."""
        loaded = self.load()
        try:
            if isinstance(loaded, typer.Typer):
                loaded(args=list(arguments), prog_name=f"dagengine {self.name}")
                return 0
            return loaded(list(arguments)) or 0
        except SystemExit as stop:
            return stop.code if isinstance(stop.code, int) else int(stop.code is not None)


def find_commands() -> dict[str, Command]:
    """All commands by name, in the order of their names."""
    found: dict[str, Command] = {}
    for point in sorted(entry_points(group=GROUP), key=_precedence):
        found.setdefault(point.name, Command(point.name, point))
    return dict(sorted(found.items()))


def _precedence(point: EntryPoint) -> tuple[bool, str]:
    name = point.dist.name if point.dist is not None else ""
    return name.lower() != OWN, name
