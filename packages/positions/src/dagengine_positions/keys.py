"""The keys of one JSON object, each read once, checked as it is read.

Knows types and ranges, and which keys nobody asked for. Does not know what any key means.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NoReturn, TypeVar

from .errors import ConfigError, real, shown, suggestion, whole

T = TypeVar("T")


class Keys:
    """Reads a JSON object key by key; a null value counts as an absent key.

    Every reader raises `ConfigError` with the path of the key: ``invalid_config`` for a value that is missing
    or not of its type and range, ``unsupported_model`` for one that is not known here.
    """

    def __init__(self, mapping: object, path: str) -> None:
        if not isinstance(mapping, Mapping):
            raise ConfigError("invalid_config", f"must be an object, not {shown(mapping)}", path or None)
        self._path = path
        self._nulls = {key for key, value in mapping.items() if value is None}
        self._left = {key: value for key, value in mapping.items() if value is not None}
        self._asked: set[str] = set()

    def has(self, name: str) -> bool:
        return name in self._left

    def is_null(self, name: str) -> bool:
        return name in self._nulls

    def take(self, name: str) -> object:
        self._asked.add(name)
        return self._left.pop(name, None)

    def whole(self, name: str, low: int, high: int, default: int | None = None) -> int:
        value = self.take(name)
        if value is None:
            if default is None:
                self.invalid(name, "is missing")
            return default
        return self.checked_whole(value, name, low, high)

    def checked_whole(self, value: object, name: str, low: int, high: int) -> int:
        return whole(ConfigError, "invalid_config", value, self._field(name), low, high)

    def real(self, name: str, low: float, high: float) -> float:
        value = self.take(name)
        if value is None:
            self.invalid(name, "is missing")
        return real(ConfigError, "invalid_config", value, self._field(name), low, high)

    def flag(self, name: str) -> bool:
        value = self.take(name)
        if value is None:
            return False
        if not isinstance(value, bool):
            self.invalid(name, f"must be true or false, not {shown(value)}")
        return value

    def token_id(self, name: str, vocab_size: int) -> int | None:
        value = self.take(name)
        return None if value is None else self.checked_whole(value, name, 0, vocab_size - 1)

    def agreed(self, name: str, outer: object) -> object:
        """The value of `name`, which `outer`, another spelling of it, must not contradict."""
        inner = self.take(name)
        if inner is not None and outer is not None and inner != outer:
            self.invalid(name, f"is {shown(inner)} here and {shown(outer)} under its other name; keep one")
        return outer if inner is None else inner

    def fixed(self, name: str, only: T) -> T:
        value = self.take(name)
        if value is not None and (value != only or isinstance(value, bool) != isinstance(only, bool)):
            self.unsupported(name, f"only {only!r} is supported, not {shown(value)}")
        return only

    def refuse_rest(self, inert: Collection[str]) -> None:
        """Refuse keys that nobody asked for, but for the `inert`, private notes (`_...`) and ids of special tokens."""
        for key in self._left:
            if key not in inert and not (
                isinstance(key, str) and (key[:1] == "_" or key.endswith("_token_id"))
            ):
                known = self._asked | set(inert)
                self.unsupported(str(key), f"the meaning of this key is not known{suggestion(key, known)}")

    def invalid(self, name: str, message: str) -> NoReturn:
        raise ConfigError("invalid_config", message, self._field(name))

    def unsupported(self, name: str, message: str) -> NoReturn:
        raise ConfigError("unsupported_model", message, self._field(name))

    def _field(self, name: str) -> str:
        return f"{self._path}.{name}" if self._path else name
