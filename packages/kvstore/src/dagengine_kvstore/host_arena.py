"""Host memory for pages: all layers of one page lie together, so that a host page is one extent.

    chunk 0                              chunk 1                     mapped when a page in it is first asked for
    │ page 0 │ page 1 │ … │ page n-1 │   │ page n │ …
      └ layer 0 │ layer 1 │ …

Knows bytes and addresses; knows neither devices nor what a page holds. Whoever pins memory is told of every chunk.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Callable

from dagengine_kvstore.errors import KVStoreError

CHUNK_BYTES = 256 << 20


class HostArena:
    """Pages `0 … num_pages - 1` of `page_bytes` bytes; zeros until they are written. Threads may share it.

    Args:
        chunk_bytes: what is mapped at once, rounded up to whole pages.

    Attributes:
        chunk_pages: pages that are mapped, and lie behind each other, at once.
        pin: called with address and size of every chunk that is mapped; if it raises, the chunk is not.

    Raises KVStoreError `invalid_size` for a size below 1, or a negative number of pages.
    """

    def __init__(
        self,
        num_pages: int,
        page_bytes: int,
        *,
        chunk_bytes: int = CHUNK_BYTES,
    ) -> None:
        for field, size, least in (
            ("num_pages", num_pages, 0),
            ("page_bytes", page_bytes, 1),
            ("chunk_bytes", chunk_bytes, 1),
        ):
            if size < least:
                raise KVStoreError(
                    "invalid_size", f"{field} must be at least {least}, not {size}", field=field
                )
        self.num_pages = num_pages
        self.page_bytes = page_bytes
        self.chunk_pages = min(-(-chunk_bytes // page_bytes), max(num_pages, 1))
        self._chunks: dict[int, tuple[mmap.mmap, int]] = {}  # memory and its address
        self._lock = threading.Lock()
        self.pin: Callable[[int, int], None] | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes mapped so far."""
        return sum(len(memory) for memory, _ in self._chunks.values())

    def prepare(self, num_pages: int) -> None:
        """Map the first `num_pages` pages now, so that no copy has to wait for it. Raises as `page`."""
        for page in range(0, num_pages, self.chunk_pages):
            self.address(page)

    def address(self, page: int) -> int:
        """Where a page begins. Page n+1 begins where page n ends if both are in one chunk. Raises as `page`."""
        _, address, offset = self._locate(page)
        return address + offset

    def page(self, page: int) -> memoryview:
        """The bytes of a page, to be read or written; not a copy.

        Raises KVStoreError `capacity` for a page outside [0, num_pages).
        """
        memory, _, offset = self._locate(page)
        return memoryview(memory)[offset : offset + self.page_bytes]

    def _locate(self, page: int) -> tuple[mmap.mmap, int, int]:
        if not 0 <= page < self.num_pages:
            raise KVStoreError(
                "capacity", f"host page {page} is not inside [0, {self.num_pages})", field="pages"
            )
        index = page // self.chunk_pages
        if index not in self._chunks:
            with self._lock:
                if index not in self._chunks:
                    self._chunks[index] = self._map(index)
        memory, address = self._chunks[index]
        return memory, address, page % self.chunk_pages * self.page_bytes

    def _map(self, index: int) -> tuple[mmap.mmap, int]:
        pages = min(self.chunk_pages, self.num_pages - index * self.chunk_pages)
        memory = mmap.mmap(-1, pages * self.page_bytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)  # pinning walks every page of memory
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self.pin is not None:
            self.pin(address, len(memory))
        return memory, address
