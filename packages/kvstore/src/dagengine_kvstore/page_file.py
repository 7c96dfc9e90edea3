"""One page as a file that proves itself. Knows bytes; knows neither names nor places of files.

    magic 8 │ version 4 │ tokens n 4 │ base 8 │ payload size 8 │ layout 32 │ key 32 │ tokens 8 n │ payload │ digest 32

Integers are little-endian; `layout` and `key` are digests. The last one is blake2b over everything before it: a file
that was cut off, goes on behind its end, or differs in any byte, is not a page.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

MAGIC = b"dagkvpg\n"
VERSION = 2
DIGEST_BYTES = 32
_HEAD = struct.Struct(f"<8sIIqQ{DIGEST_BYTES}s{DIGEST_BYTES}s")


class BadPage(Exception):
    """A file that is not a whole page of this version."""


class Sink(Protocol):
    def write(self, data: bytes | memoryview, /) -> int: ...


class Source(Protocol):
    def read(self, size: int, /) -> bytes: ...

    def readinto(self, buffer: memoryview, /) -> int: ...


@dataclass(frozen=True, slots=True)
class PageRecord:
    """What a page is.

    Attributes:
        layout: digest of what its bytes mean.
        key: digest of all that its content depends on.
        tokens: of its own rows.
        base: stored position of row 0.
    """

    layout: bytes
    key: bytes
    tokens: tuple[int, ...]
    base: int


def num_bytes(num_tokens: int, page_bytes: int) -> int:
    """The size of a file."""
    return _HEAD.size + 8 * num_tokens + page_bytes + DIGEST_BYTES


def write(file: Sink, record: PageRecord, payload: memoryview) -> None:
    """Write a page; an unbuffered file may take it in pieces."""
    tokens = record.tokens
    head = _HEAD.pack(MAGIC, VERSION, len(tokens), record.base, len(payload), record.layout, record.key)
    head += struct.pack(f"<{len(tokens)}q", *tokens)
    digest = blake2b(head, digest_size=DIGEST_BYTES)
    digest.update(payload)
    for part in (head, payload, digest.digest()):
        _write_all(file, memoryview(part))


def read(file: Source, payload: memoryview, max_tokens: int) -> PageRecord:
    """Read a page of `len(payload)` bytes into `payload`, which holds anything if this raises.

    Raises BadPage.
    """
    head = _read_all(file, _HEAD.size)
    magic, version, count, base, size, layout, key = _HEAD.unpack(head)
    if magic != MAGIC or version != VERSION:
        raise BadPage(f"{magic!r} version {version} is not {MAGIC!r} version {VERSION}")
    if size != len(payload) or count > max_tokens:
        raise BadPage(f"{size} bytes of {count} tokens, not {len(payload)} of at most {max_tokens}")
    packed = _read_all(file, 8 * count)
    _fill(file, payload)
    digest = blake2b(head + packed, digest_size=DIGEST_BYTES)
    digest.update(payload)
    if _read_all(file, DIGEST_BYTES) != digest.digest():
        raise BadPage("the digest differs")
    if file.read(1):
        raise BadPage("goes on behind its end")
    return PageRecord(layout, key, struct.unpack(f"<{count}q", packed), base)


def _write_all(file: Sink, data: memoryview) -> None:
    while data:
        data = data[file.write(data) :]


def _read_all(file: Source, size: int) -> bytes:
    data = bytearray(size)
    _fill(file, memoryview(data))
    return bytes(data)


def _fill(file: Source, buffer: memoryview) -> None:
    while buffer:
        count = file.readinto(buffer)
        if not count:
            raise BadPage("ends too early")
        buffer = buffer[count:]
