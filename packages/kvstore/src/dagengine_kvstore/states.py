"""Handles: names on nodes. Knows ids, tenants' salts, times to live and tombstones; knows no pages.

A handle keeps its node through its hold. When it ends (released, or its time to live is over and it is not
pinned) its id becomes a tombstone, so that for a while the answer is "released" and not "never heard of".
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.holds import Hold
from dagengine_kvstore.nodes import NodeRecord


@dataclass(slots=True)
class Handle:
    """A name on the first `at` tokens of a sealed node. `deadline` is in seconds of the store's clock."""

    id: str
    node: NodeRecord
    at: int
    hold: Hold
    name: str | None
    deadline: float | None
    pinned: bool


class HandleTable:
    """Handles by id, in order of arrival."""

    def __init__(self, clock: Callable[[], float], tombstone_s: float, new_id: Callable[[], str]) -> None:
        self._clock = clock
        self._tombstone_s = tombstone_s
        self._new_id = new_id
        self._handles: dict[str, Handle] = {}
        self._pinned: dict[str, Handle] = {}
        self._tombstones: dict[str, str] = {}  # id -> salt
        self._ended: deque[tuple[float, str]] = deque()  # (end of the tombstone, id), ascending
        self._deadlines: list[tuple[float, str]] = []  # a heap of when to look at which handle
        self._looks: dict[str, float] = {}  # the first of these times by handle

    def __iter__(self) -> Iterator[Handle]:
        return iter(tuple(self._handles.values()))

    def __len__(self) -> int:
        return len(self._handles)

    @property
    def pinned(self) -> tuple[Handle, ...]:
        """Those that are pinned, in the order in which they were."""
        return tuple(self._pinned.values())

    def add(self, node: NodeRecord, at: int, hold: Hold, name: str | None, pinned: bool) -> Handle:
        handle_id = self._new_id()
        if handle_id in self._handles or handle_id in self._tombstones:
            raise KVStoreError(
                "duplicate_handle", f"the id {handle_id!r} was given out before", field="new_id"
            )
        handle = Handle(handle_id, node, at, hold, name, None, pinned)
        self._handles[handle_id] = handle
        if pinned:
            self._pinned[handle_id] = handle
        return handle

    def get(self, handle_id: str, salt: str | None) -> Handle:
        """The handle, if the tenant's salt fits (None: not checked).

        Raises KVStoreError `state_released` for a tombstone, else `state_not_found` (also another tenant's).
        """
        handle = self._handles.get(handle_id)
        if handle is not None and salt in (None, handle.node.salt):
            return handle
        self._forget_tombstones(self._clock())
        if handle_id in self._tombstones and salt in (None, self._tombstones[handle_id]):
            raise KVStoreError("state_released", f"state {handle_id} was released", field="state")
        raise KVStoreError("state_not_found", f"there is no state {handle_id}", field="state")

    def set_ttl(self, handle: Handle, ttl_s: float | None) -> None:
        """Let a handle end `ttl_s` seconds from now; None: it stays until it is released."""
        if ttl_s is not None and not ttl_s > 0:
            raise KVStoreError("invalid_ttl", f"ttl_s must be positive, not {ttl_s}", field="ttl_s")
        handle.deadline = None if ttl_s is None else self._clock() + ttl_s
        self._look_in_time(handle)

    def set_pinned(self, handle: Handle, pinned: bool) -> None:
        handle.pinned = pinned
        if pinned:
            self._pinned[handle.id] = handle
        else:
            self._pinned.pop(handle.id, None)
        self._look_in_time(handle)

    def remove(self, handle: Handle) -> None:
        del self._handles[handle.id]
        self._pinned.pop(handle.id, None)
        self._tombstones[handle.id] = handle.node.salt
        self._ended.append((self._clock() + self._tombstone_s, handle.id))

    def due(self) -> list[Handle]:
        """Handles whose time to live is over, each once."""
        if not self._deadlines and not self._ended:
            return []
        now = self._clock()
        self._forget_tombstones(now)
        due: dict[str, Handle] = {}
        while self._deadlines and self._deadlines[0][0] <= now:
            time, handle_id = heapq.heappop(self._deadlines)
            if self._looks.get(handle_id) != time:
                continue
            del self._looks[handle_id]
            handle = self._handles.get(handle_id)
            if handle is None or handle.deadline is None or handle.pinned:
                continue
            if handle.deadline <= now:
                due[handle_id] = handle
            else:
                self._look_in_time(handle)
        return list(due.values())

    def _look_in_time(self, handle: Handle) -> None:
        """See to it that a handle is looked at by its deadline: once, however often that is moved on."""
        deadline = handle.deadline
        if deadline is not None and deadline < self._looks.get(handle.id, math.inf):
            self._looks[handle.id] = deadline
            heapq.heappush(self._deadlines, (deadline, handle.id))

    def _forget_tombstones(self, now: float) -> None:
        while self._ended and self._ended[0][0] <= now:
            del self._tombstones[self._ended.popleft()[1]]
