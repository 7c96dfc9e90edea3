"""`dagengine plugins`: what is registered in each entry-point group of the project, and what is broken."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated

import typer

from .console import new_app, print_json, print_table

GROUPS = (
    "dagengine.models",
    "dagengine.position_policies",
    "dagengine.model_adapters",
    "dagengine.attention_backends",
    "dagengine.eviction_policies",
    "dagengine.transfers",
    "dagengine.retrievers",
    "dagengine.commands",
)

app = new_app("List the plug-ins of every kind, with the error of each that is broken.")


@dataclass(frozen=True)
class PluginInfo:
    """One entry point; `error` is None if it loads."""

    group: str
    name: str
    value: str
    distribution: str | None
    version: str | None
    error: str | None


def list_plugins(groups: tuple[str, ...] = GROUPS) -> list[PluginInfo]:
    """Every registered entry point, each loaded once, in the order of the groups and of their names.

    A name that several distributions register is an error of each: which one is meant nobody can tell.
    """
    found = []
    for group in groups:
        points = sorted(entry_points(group=group), key=lambda p: (p.name, _distribution(p) or ""))
        for point in points:
            rivals = sorted({_distribution(p) or "?" for p in points if p.name == point.name})
            found.append(_inspect(group, point, rivals))
    return found


@app.command()
def plugins(as_json: Annotated[bool, typer.Option("--json", help="print JSON")] = False) -> None:
    """List the plug-ins of every kind, with the error of each that is broken."""
    found = list_plugins()
    if as_json:
        print_json([asdict(plugin) for plugin in found])
        return
    for group in GROUPS:
        rows = [
            (p.name, p.value, " ".join(filter(None, (p.distribution, p.version))), p.error or "ok")
            for p in found
            if p.group == group
        ]
        if rows:
            print_table(group, ("name", "object", "distribution", "state"), rows)
        else:
            print(f"{group}: none\n")
    broken = sum(plugin.error is not None for plugin in found)
    print(f"{len(found)} plug-ins, {broken} broken")


def _inspect(group: str, point: EntryPoint, rivals: list[str]) -> PluginInfo:
    error = None
    try:
        point.load()
    except (Exception, SystemExit) as failure:
        error = f"{type(failure).__name__}: {failure}"
    if error is None and len(rivals) > 1:
        error = f"the name is registered by {', '.join(rivals)}"
    version = point.dist.version if point.dist is not None else None
    return PluginInfo(group, point.name, point.value, _distribution(point), version, error)


def _distribution(point: EntryPoint) -> str | None:
    return point.dist.name if point.dist is not None else None
