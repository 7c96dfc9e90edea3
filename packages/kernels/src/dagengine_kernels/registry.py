"""Finding backends by name. Knows entry points only: the built-in backends register like anyone else's.

A backend is a class in the group ``dagengine.attention_backends``. Loading is lazy and by name; one that does
not load is listed with its error and breaks nothing else.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from dagengine_kernels.backend import AttentionBackend
from dagengine_kernels.errors import BACKEND_BROKEN, BACKEND_UNKNOWN, INVALID_ARGUMENT, KernelError

GROUP = "dagengine.attention_backends"


@dataclass(frozen=True, slots=True)
class BackendEntry:
    """One registered backend.

    Attributes:
        name: what `get_backend` takes.
        target: ``module:Class``.
        distribution: the package that registers it, if known.
        error: why it does not load; None if it does.
    """

    name: str
    target: str
    distribution: str | None
    error: str | None


def backends() -> tuple[BackendEntry, ...]:
    """Every registered backend, by name, each tried once."""
    listed = []
    for name, point in sorted(_points().items()):
        error = None
        try:
            _load(point)
        except KernelError as e:
            error = e.message
        listed.append(BackendEntry(name, point.value, point.dist.name if point.dist else None, error))
    return tuple(listed)


def get_backend(name: str, **options: Any) -> AttentionBackend:
    """A new instance of the backend `name`, with its constructor's options.

    Raises: KernelError (backend_not_found, backend_not_loadable, or invalid_argument for a wrong option).
    """
    points = _points()
    if name not in points:
        near = difflib.get_close_matches(name, points, 1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        message = f"{name!r} is not one of {', '.join(sorted(points)) or 'none registered'}{hint}"
        raise KernelError(BACKEND_UNKNOWN, message, "backend")
    backend_class = _load(points[name])
    try:
        return backend_class(**options)
    except TypeError as e:
        raise KernelError(INVALID_ARGUMENT, f"backend {name!r}: {e}", "options") from e


def _points() -> dict[str, EntryPoint]:
    found: dict[str, EntryPoint] = {}
    for point in entry_points(group=GROUP):
        found.setdefault(point.name, point)
    return found


def _load(point: EntryPoint) -> type[AttentionBackend]:
    try:
        loaded = point.load()
    except Exception as e:  # a plug-in may fail in any way; its error is reported, not hidden
        raise KernelError(BACKEND_BROKEN, f"{point.name!r} ({point.value}): {e!r}", "backend") from e
    if not (isinstance(loaded, type) and issubclass(loaded, AttentionBackend)):
        raise KernelError(BACKEND_BROKEN, f"{point.name!r} ({point.value}) is no AttentionBackend", "backend")
    return loaded
