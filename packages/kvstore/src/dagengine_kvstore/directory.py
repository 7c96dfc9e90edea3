"""Pages in a directory, by content key: a cache that outlives the process. Knows files; knows no tickets.

    path/lock            held by whoever makes room
    path/tmp/NAME        being written, locked by its writer
    path/ab/abcd….page   whole: written, synced and then renamed

A file's name is a digest of layout and key. A key stands for signature, salt, context and tokens, so that one tenant's
pages are never found under another's salt; tokens are compared again on a hit. A crash leaves files under tmp, which
nobody reads and the next start removes; whatever else goes wrong with a file is found by its digest, and the file is
removed. Any number of processes may use one directory.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from io import FileIO
from pathlib import Path
from secrets import token_hex

from dagengine_kvstore import page_file
from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.page_file import BadPage, PageRecord
from dagengine_kvstore.reuse import digest

SUFFIX = ".page"
SCANS_PER_BUDGET = 16


class PageDirectory:
    """
    Args:
        path: made if it is not there.
        page_bytes: of every page.
        max_bytes: of all files; the least recently used go first. Several processes together may exceed it by what
            each writes between two looks at the directory, at most a sixteenth of it.
        layout: what the bytes of a page mean, beyond what keys stand for, such as the order of axes and the page size.

    Threads may share it. Raises KVStoreError `invalid_size`, and OSError where the directory cannot be used.
    """

    def __init__(
        self, path: str | os.PathLike[str], page_bytes: int, max_bytes: int, *, layout: Mapping[str, str]
    ) -> None:
        for field, size in (("page_bytes", page_bytes), ("max_bytes", max_bytes)):
            if size < 1:
                raise KVStoreError("invalid_size", f"{field} must be at least 1, not {size}", field=field)
        self.page_bytes = page_bytes
        self.max_bytes = max_bytes
        fields = [("version", bytes([page_file.VERSION])), ("page_bytes", page_bytes.to_bytes(8, "little"))]
        for name, value in sorted(layout.items()):
            fields += [("layout", name.encode()), ("value", value.encode())]
        self._layout = digest(fields)
        self._path = Path(path)
        self._index: OrderedDict[str, int] = OrderedDict()  # name -> bytes, least recently used first
        self._total = 0
        self._unseen = 0  # bytes written since the last look at the directory
        self._lock = threading.Lock()
        (self._path / "tmp").mkdir(parents=True, exist_ok=True)
        self._remove_torn()
        self._make_room()

    @property
    def num_pages(self) -> int:
        """Files of the last look at the directory, and what this process did since."""
        return len(self._index)

    @property
    def num_bytes(self) -> int:
        """Likewise."""
        return self._total

    def holds(self, key: bytes) -> bool:
        """Whether a page is probably there. Asks no disk, so another process may have written or removed it."""
        name = self._name(key)
        with self._lock:
            return name in self._index

    def put(
        self,
        key: bytes,
        tokens: Sequence[int],
        base: int,
        payload: memoryview,
        *,
        consumed: Callable[[], None] = lambda: None,
    ) -> bool:
        """Write a page, unless it is there. Whether it is there now: not if it is larger than the budget.

        Args:
            key: 32 bytes.
            tokens: of the page's rows.
            base: stored position of row 0.
            consumed: called once when `payload` is not needed any more, also if this raises.

        Raises OSError.
        """
        name = self._name(key)
        size = page_file.num_bytes(len(tokens), self.page_bytes)
        try:
            assert len(payload) == self.page_bytes
            if size > self.max_bytes:
                return False
            if self._use(name):
                return True
            file = self._open_temporary(name)
            temporary = Path(file.name)
            try:
                with file:
                    record = PageRecord(self._layout, key, tuple(tokens), base)
                    page_file.write(file, record, payload)
                    consumed()
                    consumed = _nothing
                    _mark_used(file.fileno())
                    os.fsync(file)
                    self._publish(temporary, name)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
        finally:
            consumed()
        self._add(name, size)
        return True

    def get(self, key: bytes, tokens: Sequence[int], payload: memoryview) -> int | None:
        """Read a page into `payload`, which holds anything if there is none.

        Returns: the stored position of row 0, or None if there is no whole page with this key and these tokens.
        """
        name = self._name(key)
        path = self._file(name)
        try:
            with open(path, "rb", buffering=0) as file:
                record = page_file.read(file, payload, max_tokens=self.page_bytes)
        except BadPage:
            self._remove(name)
            return None
        except OSError:
            self._forget(name)
            return None
        if (record.layout, record.key) != (self._layout, key):
            self._remove(name)  # under a name that is not its own
            return None
        if record.tokens != tuple(tokens):
            return None
        self._use(name)
        return record.base

    def refresh(self) -> None:
        """Look at the directory again: what is there, in the order of its last use."""
        found: list[tuple[int, str, int]] = []
        for folder in os.scandir(self._path):
            if len(folder.name) != 2 or not folder.is_dir():
                continue
            for entry in os.scandir(folder):
                name = entry.name.removesuffix(SUFFIX)
                if name == entry.name or name[:2] != folder.name:
                    continue
                try:
                    told = entry.stat()
                except FileNotFoundError:  # another process made room
                    continue
                found.append((told.st_mtime_ns, name, told.st_size))
        with self._lock:
            self._index = OrderedDict((name, size) for _, name, size in sorted(found))
            self._total = sum(self._index.values())
            self._unseen = 0

    def _make_room(self) -> None:
        """Remove the least recently used files until the others fit into the budget. One process at a time."""
        with open(self._path / "lock", "wb") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.refresh()
            while self._total > self.max_bytes:
                self._remove(next(iter(self._index)))

    def _add(self, name: str, size: int) -> None:
        with self._lock:
            self._total += size - self._index.pop(name, 0)
            self._index[name] = size
            self._unseen += size
            crowded = self._total > self.max_bytes or self._unseen * SCANS_PER_BUDGET > self.max_bytes
        if crowded:
            self._make_room()

    def _use(self, name: str) -> bool:
        """Make a file the most recently used one; whether it is there."""
        try:
            _mark_used(self._file(name))
            size = os.stat(self._file(name)).st_size
        except OSError:
            self._forget(name)
            return False
        with self._lock:
            self._total += size - self._index.pop(name, 0)
            self._index[name] = size
        return True

    def _open_temporary(self, name: str) -> FileIO:
        """A new file under tmp, locked. One that another start removed before it was locked is of no use."""
        while True:
            file = open(self._path / "tmp" / f"{name}.{token_hex(8)}", "xb", buffering=0)
            try:
                fcntl.flock(file, fcntl.LOCK_EX)
                if os.fstat(file.fileno()).st_nlink:
                    return file
            except BaseException:
                Path(file.name).unlink(missing_ok=True)
                file.close()
                raise
            file.close()

    def _publish(self, temporary: Path, name: str) -> None:
        folder = self._path / name[:2]
        folder.mkdir(exist_ok=True)
        os.replace(temporary, self._file(name))
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def _remove(self, name: str) -> None:
        self._file(name).unlink(missing_ok=True)
        self._forget(name)

    def _forget(self, name: str) -> None:
        with self._lock:
            self._total -= self._index.pop(name, 0)

    def _remove_torn(self) -> None:
        """Remove what writers that are no more have left behind: a file that nobody has locked."""
        for entry in os.scandir(self._path / "tmp"):
            try:
                with open(entry.path, "rb") as file:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(entry.path)
            except OSError:  # being written, or gone
                continue

    def _file(self, name: str) -> Path:
        return self._path / name[:2] / f"{name}{SUFFIX}"

    def _name(self, key: bytes) -> str:
        return digest([("layout", self._layout), ("key", key)]).hex()


def _mark_used(file: int | Path) -> None:
    """The file system's own time is too coarse to order uses by."""
    now = time.time_ns()
    os.utime(file, ns=(now, now))


def _nothing() -> None:
    pass
