"""Plug-ins by entry point, one group per kind. Loads by name, on demand; a broken plug-in is listed with its
error and breaks nothing else. Built-ins register the same way.
"""

from __future__ import annotations

from dataclasses import dataclass
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points

from dagengine_kvstore.errors import KVStoreError

EVICTION_POLICIES = "dagengine.eviction_policies"
TRANSFERS = "dagengine.transfers"


@dataclass(frozen=True, slots=True)
class Plugin:
    """One registered plug-in; `error` is why it cannot be loaded, or None."""

    group: str
    name: str
    target: str
    distribution: str | None
    error: str | None


def plugins(group: str) -> tuple[Plugin, ...]:
    """All plug-ins of a group, sorted by name; tries to load each."""
    found = []
    for entry in sorted(entry_points(group=group), key=lambda entry: (entry.name, entry.value)):
        try:
            entry.load()
            error = None
        except Exception as exc:
            error = f"{type(exc).__name__}: {exc}"
        distribution = None if entry.dist is None else entry.dist.name
        found.append(Plugin(group, entry.name, entry.value, distribution, error))
    return tuple(found)


def load(group: str, name: str) -> object:
    """The object registered under a name.

    Raises KVStoreError `plugin_not_found` (with the nearest name) or `plugin_broken` (with the cause).
    """
    entries: dict[str, EntryPoint] = {}
    for entry in entry_points(group=group):
        entries.setdefault(entry.name, entry)
    if name not in entries:
        near = get_close_matches(name, entries, n=1)
        hint = (
            f", did you mean {near[0]!r}?" if near else f"; installed: {', '.join(sorted(entries)) or 'none'}"
        )
        raise KVStoreError("plugin_not_found", f"no plug-in {name!r} in {group}{hint}", field=group)
    try:
        loaded: object = entries[name].load()
    except Exception as exc:
        message = f"plug-in {name!r} of {group} cannot be loaded: {exc}"
        raise KVStoreError("plugin_broken", message, field=group) from exc
    return loaded
