"""Extensions by entry point: named, loaded when first asked for, listed even when broken.

Built-ins are registered like any other: by the entry points of the package that ships them. An entry point
names a class (or function) that is called without arguments and returns the extension, whose ``name`` is the
entry point's. An extension that cannot be used never harms another one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

from .errors import PositionError, shown, suggestion

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point, as found.

    Attributes:
        name: name of the entry point.
        value: ``module:attribute`` that it names.
        distribution: the installed distribution that ships it, or None.
        error: why it cannot be used, or None.
    """

    name: str
    value: str
    distribution: str | None
    error: str | None


class Registry(Generic[T]):
    """The extensions of one kind.

    Args:
        group: name of the entry-point group.
        methods: what an extension must be able to do, by method name.
        code: refusal code for a name that nobody registered.
        find: the entry points of a group; replaced in tests.
    """

    def __init__(
        self,
        group: str,
        *,
        methods: tuple[str, ...],
        code: str,
        find: Callable[[str], tuple[EntryPoint, ...]] | None = None,
    ) -> None:
        self.group = group
        self._methods = methods
        self._code = code
        self._find = find or (lambda group: tuple(entry_points(group=group)))
        self._points: dict[str, list[EntryPoint]] | None = None
        self._loaded: dict[str, T] = {}

    def names(self) -> tuple[str, ...]:
        """The registered names, sorted. Loads nothing."""
        return tuple(sorted(self._entry_points()))

    def get(self, name: str) -> T:
        """The extension called `name`, loaded now if it was not before.

        Raises:
            PositionError: the registry's code for an unknown name, ``plugin_broken`` for one that cannot be
                used.
        """
        points = self._entry_points().get(name) if isinstance(name, str) else None
        if points is None:
            known = ", ".join(self.names()) or "none"
            message = f"{shown(name)} is not one of {known}{suggestion(name, self.names())}"
            raise PositionError(self._code, message)
        if name not in self._loaded:
            try:
                self._loaded[name] = self._load(points)
            except Exception as error:
                message = f"{self.group} {name!r} cannot be used: {type(error).__name__}: {error}"
                raise PositionError("plugin_broken", message) from error
        return self._loaded[name]

    def plugins(self) -> tuple[Plugin, ...]:
        """Every entry point, by name, with the error of each that cannot be used. Loads all of them."""
        return tuple(
            self._describe(name, point) for name in self.names() for point in self._entry_points()[name]
        )

    def _describe(self, name: str, point: EntryPoint) -> Plugin:
        error = None
        try:
            self.get(name)
        except PositionError as refusal:
            error = refusal.message
        return Plugin(name, point.value, point.dist.name if point.dist else None, error)

    def _entry_points(self) -> dict[str, list[EntryPoint]]:
        if self._points is None:
            self._points = {}
            for point in self._find(self.group):
                self._points.setdefault(point.name, []).append(point)
        return self._points

    def _load(self, points: list[EntryPoint]) -> T:
        values = sorted({point.value for point in points})
        if len(values) > 1:
            raise TypeError(f"registered more than once: {', '.join(values)}")
        extension = points[0].load()()
        if getattr(extension, "name", None) != points[0].name:
            raise TypeError(f"its name is {getattr(extension, 'name', None)!r}, not that of its entry point")
        for method in self._methods:
            if not callable(getattr(extension, method, None)):
                raise TypeError(f"it has no method {method!r}")
        return cast(T, extension)
