"""Pages for the tests of the directory: what a key's page holds is decided by the key."""

from __future__ import annotations

import random
from collections.abc import Sequence

from dagengine_kvstore import Completion, Copy, KVStoreError
from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.host_arena import HostArena

LAYOUT = {"page_size": "4", "order": "layer, page, kv, head, row, dim"}
PAGE_BYTES = 3000


def directory(path: object, pages: int = 100, **options: object) -> PageDirectory:
    """A directory with room for so many full pages of 4 tokens."""
    size = 140 + 4 * 8 + PAGE_BYTES
    return PageDirectory(path, PAGE_BYTES, pages * size, layout=LAYOUT, **options)  # type: ignore[arg-type]


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def tokens(number: int) -> tuple[int, ...]:
    return tuple(range(number, number + 1 + number % 4))


def base(number: int) -> int:
    return 10 * number


def content(number: int) -> bytes:
    return random.Random(number).randbytes(PAGE_BYTES)


def put(pages: PageDirectory, number: int) -> bool:
    return pages.put(key(number), tokens(number), base(number), memoryview(content(number)))


def get(pages: PageDirectory, number: int) -> bytes | None:
    """The page, or None; fails if anything about it is wrong."""
    payload = bytearray(b"\xee" * PAGE_BYTES)
    found = pages.get(key(number), tokens(number), memoryview(payload))
    if found is None:
        return None
    assert found == base(number) and bytes(payload) == content(number), f"page {number} is wrong"
    return bytes(payload)


class BytesTransfer:
    """Copies pages of bytes at the submit; reports them at the next poll."""

    name = "bytes"

    def __init__(self, device: list[bytes], num_host_pages: int, page_bytes: int = PAGE_BYTES) -> None:
        self.device = device
        self.host = HostArena(num_host_pages, page_bytes)
        self.num_host_pages = num_host_pages
        self.given = 0
        self.done: list[Completion] = []

    def submit(self, copy: Copy) -> int:
        for _, host in copy.pages:
            if not 0 <= host < self.num_host_pages:
                raise KVStoreError("capacity", "no such host page", field="pages")
        for page, host in copy.pages:
            if copy.kind == "store":
                self.host.page(host)[:] = self.device[page]
            else:
                self.device[page] = bytes(self.host.page(host))
        self.given += 1
        self.done.append(Completion(self.given))
        return self.given

    def poll(self) -> Sequence[Completion]:
        done, self.done = self.done, []
        return done

    def abort(self, ticket: int) -> bool:
        return True
