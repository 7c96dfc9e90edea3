"""Copies under way. Knows tickets and what they touch until they have ended; moves nothing and frees nothing.

    open ── completion polled ──► done
     └── deadline ──► lost ── completion polled (late), or aborted ──► done

What a lost ticket may touch stays as it is until it is done. A ticket that is reported again, or that nobody was
given, is counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Literal

from dagengine_kvstore.residency import PageCopy

REMEMBERED = 4096


@dataclass(eq=False, slots=True)
class Ticket:
    """One copy under way: `pages[i]` is the device page that `copies[i]` is copied from or to.

    `node` is on whose account it was started; `deadline` is in seconds of the store's clock.
    """

    id: int
    kind: Literal["store", "load"]
    copies: tuple[PageCopy, ...]
    pages: tuple[int, ...]
    node: int
    deadline: float
    lost: bool = False


class TicketTable:
    """Tickets by id, in the order of their submission."""

    def __init__(self) -> None:
        self.tickets: dict[int, Ticket] = {}
        self._done: deque[int] = deque()
        self._done_ids: set[int] = set()

    @property
    def num_in_flight(self) -> int:
        """Without lost ones."""
        return sum(not ticket.lost for ticket in self.tickets.values())

    @property
    def num_lost(self) -> int:
        return sum(ticket.lost for ticket in self.tickets.values())

    def num_pages(self, kind: Literal["store", "load"]) -> int:
        """Pages under tickets that are not lost."""
        return sum(
            len(ticket.pages) for ticket in self.tickets.values() if ticket.kind == kind and not ticket.lost
        )

    def is_known(self, ticket: int) -> bool:
        """Whether it was given before and, if it has ended, not long ago."""
        return ticket in self.tickets or ticket in self._done_ids

    def add(self, ticket: Ticket) -> None:
        assert not self.is_known(ticket.id)
        self.tickets[ticket.id] = ticket

    def finish(self, ticket: Ticket) -> None:
        """Remember only that it was."""
        del self.tickets[ticket.id]
        self._done.append(ticket.id)
        self._done_ids.add(ticket.id)
        if len(self._done) > REMEMBERED:
            self._done_ids.discard(self._done.popleft())

    def due(self, now: float) -> list[Ticket]:
        """Tickets past their deadline that are not lost yet."""
        return [ticket for ticket in self.tickets.values() if not ticket.lost and ticket.deadline <= now]

    def lost(self) -> list[Ticket]:
        return [ticket for ticket in self.tickets.values() if ticket.lost]
