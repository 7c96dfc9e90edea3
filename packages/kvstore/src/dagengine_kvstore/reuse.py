"""What a page's content is. Knows signatures, salts, contexts and tokens; does not know pages or positions.

    Context   (signature, salt, what is read and where relative to the own start)
       ▲
    Prefix    tokens of page 0
       ▲
    Prefix    tokens of page 1 …

Both are interned: equal content is one object, so equality of all that precedes a page is one `is`. A digest
only finds candidates; equality is then decided by comparing tokens and contexts, so colliding digests cost
time and never serve wrong KV. KV of equal content at different own starts differs by one rotation, which is
why positions enter a context only relative to the own start.
"""

from __future__ import annotations

import struct
import weakref
from collections.abc import Iterable, Sequence
from functools import cache
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from dagengine_kvstore.nodes import NodeRecord
    from dagengine_kvstore.references import Read


def digest(fields: Iterable[tuple[str, bytes]]) -> bytes:
    """blake2b over tagged, length-prefixed fields: no two lists of fields have the same encoding."""
    return _hashed(part for tag, value in fields for part in (_head(tag, len(value)), value))


def _head(tag: str, size: int) -> bytes:
    """What `digest` puts before a value of this size."""
    return _prefixed(tag) + size.to_bytes(8, "little")


@cache
def _prefixed(tag: str) -> bytes:
    name = tag.encode()
    return len(name).to_bytes(8, "little") + name


def pack(values: Sequence[int]) -> bytes:
    """Integers as signed 64-bit words, little-endian."""
    return struct.pack(f"<{len(values)}q", *values)


_KEY_SIZE = 32
_PACK_READ = struct.Struct("<3q").pack
_SOURCE, _BEFORE = (_head(tag, _KEY_SIZE) for tag in ("source", "before"))
_READ = _head("read", struct.calcsize("<3q"))


def _hashed(parts: Iterable[bytes]) -> bytes:
    return blake2b(b"".join(parts), digest_size=_KEY_SIZE).digest()


def page_key(before: bytes, tokens: Sequence[int]) -> bytes:
    """The key of the tokens of one page behind what `before` is the key of: a context, or the page before."""
    return _hashed((_BEFORE, before, _head("page", 8 * len(tokens)), pack(tokens)))


class _Content:
    __slots__ = ("__weakref__", "key")

    def __init__(self, key: bytes) -> None:
        self.key = key

    def __hash__(self) -> int:
        return int.from_bytes(self.key[:8], "little")


class Context(_Content):
    """Everything but its own tokens that the KV of a node depends on, up to a common shift of positions."""

    __slots__ = ("reads", "salt", "signature")

    def __init__(
        self,
        signature: tuple[tuple[str, str], ...],
        salt: str,
        reads: tuple[Read, ...],
        own_start: int,
    ) -> None:
        self.signature = signature
        self.salt = salt
        self.reads = tuple(
            [(node, a, b, node.own_start + a + delta - own_start) for node, a, b, delta in reads]
        )
        fields = [("salt", salt.encode())]
        for name, value in signature:
            fields += [("signature", name.encode()), ("value", value.encode())]
        parts = [part for tag, value in fields for part in (_head(tag, len(value)), value)]
        for node, start, stop, relative in self.reads:
            parts += (_SOURCE, node.content_key(stop), _READ, _PACK_READ(start, stop, relative))
        super().__init__(_hashed(parts))

    __hash__ = _Content.__hash__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return (
            isinstance(other, Context)
            and self.signature == other.signature
            and self.salt == other.salt
            and len(self.reads) == len(other.reads)
            and all(mine[1:] == theirs[1:] for mine, theirs in zip(self.reads, other.reads, strict=True))
            and all(
                _same_content(mine[0], theirs[0], mine[2])
                for mine, theirs in zip(self.reads, other.reads, strict=True)
            )
        )


def _same_content(a: NodeRecord, b: NodeRecord, stop: int) -> bool:
    return a is b or (a.context is b.context and tuple(a.tokens[:stop]) == tuple(b.tokens[:stop]))


class Prefix(_Content):
    """The tokens of one page behind everything that precedes it."""

    __slots__ = ("before", "tokens")

    def __init__(self, before: Context | Prefix, tokens: tuple[int, ...]) -> None:
        self.before = before
        self.tokens = tokens
        super().__init__(page_key(before.key, tokens))

    __hash__ = _Content.__hash__

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        return isinstance(other, Prefix) and self.before is other.before and self.tokens == other.tokens


C = TypeVar("C", Context, Prefix)


class ContentTable:
    """Interns contexts and prefixes; forgets those that nothing refers to."""

    def __init__(self) -> None:
        self._contexts: weakref.WeakKeyDictionary[Context, weakref.ref[Context]] = weakref.WeakKeyDictionary()
        self._prefixes: weakref.WeakKeyDictionary[Prefix, weakref.ref[Prefix]] = weakref.WeakKeyDictionary()
        self._empty: weakref.WeakValueDictionary[tuple[object, ...], Context] = weakref.WeakValueDictionary()

    def context(
        self, signature: tuple[tuple[str, str], ...], salt: str, reads: tuple[Read, ...], own_start: int
    ) -> Context:
        if reads:
            return _intern(self._contexts, Context(signature, salt, reads, own_start))
        key = signature, salt
        found = self._empty.get(key)
        if found is None:
            found = self._empty[key] = _intern(self._contexts, Context(signature, salt, reads, own_start))
        return found

    def extend(self, before: Context | Prefix, tokens: Sequence[int]) -> Prefix:
        return _intern(self._prefixes, Prefix(before, tuple(tokens)))

    def find(self, before: Context | Prefix, tokens: Sequence[int]) -> Prefix | None:
        """The known content `tokens` behind `before`, if there is one."""
        found = self._prefixes.get(Prefix(before, tuple(tokens)))
        return None if found is None else found()


def _intern(table: weakref.WeakKeyDictionary[C, weakref.ref[C]], new: C) -> C:
    known = table.get(new)
    old = None if known is None else known()
    if old is not None:
        return old
    table[new] = weakref.ref(new)
    return new
