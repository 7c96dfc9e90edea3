"""What happened, in order. Append-only and bounded; knows no meaning beyond names and numbers.

`seq` counts every event ever recorded, so a reader that asks `since(seq)` can tell that it missed some.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from dagengine_kvstore.tiers import Tier


@dataclass(frozen=True, slots=True)
class Event:
    """One record. `seconds` is the store's clock; what follows `kind` is set where it applies.

    `tier` is where the `pages` pages are from now on; `error` is why a copy failed.
    """

    seq: int
    seconds: float
    kind: str
    node: int | None = None
    handle: str | None = None
    tokens: int | None = None
    pages: int | None = None
    ticket: int | None = None
    tier: Tier | None = None
    error: str | None = None


class EventLog:
    """The newest `max_events` records."""

    def __init__(self, max_events: int) -> None:
        self._ring: deque[tuple[Any, ...]] = deque(maxlen=max_events)  # fields of records; few are looked at
        self._next = 0

    def __iter__(self) -> Iterator[Event]:
        return iter([Event(*fields) for fields in self._ring])

    def __len__(self) -> int:
        return len(self._ring)

    @property
    def next_seq(self) -> int:
        """The number of events recorded so far."""
        return self._next

    def since(self, seq: int) -> tuple[Event, ...]:
        """Records with `event.seq >= seq` that are still kept; older ones may have been dropped."""
        count = min(max(0, self._next - seq), len(self._ring))
        return tuple([Event(*fields) for fields in islice(reversed(self._ring), count)])[::-1]

    def record(
        self,
        seconds: float,
        kind: str,
        *,
        node: int | None = None,
        handle: str | None = None,
        tokens: int | None = None,
        pages: int | None = None,
        ticket: int | None = None,
        tier: Tier | None = None,
        error: str | None = None,
    ) -> None:
        self._ring.append((self._next, seconds, kind, node, handle, tokens, pages, ticket, tier, error))
        self._next += 1
