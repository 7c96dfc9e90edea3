from __future__ import annotations

import ctypes

import pytest
from kvstore_helpers import refused

from dagengine_kvstore.host_arena import HostArena


def test_memory_is_mapped_in_chunks_of_whole_pages_as_it_is_needed() -> None:
    arena = HostArena(7, 24, chunk_bytes=50)  # 3 pages a chunk
    assert arena.num_bytes == 0
    arena.page(4)[:] = bytes(range(24))
    assert arena.num_bytes == 3 * 24
    assert arena.address(5) == arena.address(4) + 24
    assert arena.chunk_pages == 3
    arena = HostArena(7, 24, chunk_bytes=50)
    arena.page(4)[:] = bytes(range(24))
    assert ctypes.string_at(arena.address(4), 24) == bytes(range(24))
    assert not any(arena.page(3)) and not any(arena.page(5))
    arena.prepare(7)
    assert arena.num_bytes == 7 * 24
    assert bytes(arena.page(4)) == bytes(range(24))


def test_every_chunk_is_pinned_once_and_one_that_cannot_be_is_not_mapped() -> None:
    pinned: list[tuple[int, int]] = []

    def pin(address: int, size: int) -> None:
        if len(pinned) == 2:
            raise OSError("no more")
        pinned.append((address, size))

    arena = HostArena(5, 16, chunk_bytes=32)
    arena.pin = pin
    assert pinned == []
    for page in (2, 3, 0, 1):
        arena.page(page)
    assert pinned == [(arena.address(2), 32), (arena.address(0), 32)]
    with pytest.raises(OSError):
        arena.page(4)
    assert arena.num_bytes == 64


def test_pages_that_are_not_there_are_refused() -> None:
    arena = HostArena(2, 16)
    for page in (-1, 2):
        with refused("capacity", "pages"):
            arena.page(page)
    for sizes in ((-1, 16, 1), (1, 0, 1), (1, 1, 0)):
        with refused("invalid_size"):
            HostArena(*sizes[:2], chunk_bytes=sizes[2])
    with refused("capacity"):
        HostArena(0, 16).address(0)
