"""A host tier made of lists, for tests: its copies are late, out of order, torn while they run, and may fail, be lost
or be reported twice, all from one seed. Needs neither a device nor a thread; time is the number of polls.

    submit ──► torn, again at every poll ──► copied and reported          the bytes are taken at the very end
                     └──► lost: torn until it is released or aborted      failed: torn, and reported so
"""

from __future__ import annotations

import random
from collections.abc import Iterator, MutableSequence, Sequence
from dataclasses import dataclass

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.tiers import Completion, Copy


class Torn:
    """What is in a page that a copy is writing."""

    def __repr__(self) -> str:
        return "TORN"


TORN = Torn()


@dataclass(eq=False, slots=True)
class _Pending:
    ticket: int
    copy: Copy
    due: int
    error: str | None
    lost: bool


class FakeTransfer:
    """
    Args:
        device: the arena; page p is `device[p * rows : (p + 1) * rows]`.
        num_host_pages: pages of the host tier.
        rows: entries of `device` per page.
        seed: of everything that is random here.
        delay: polls that a copy takes, least and most.
        lose, fail, duplicate: how often a copy is never reported, fails, is reported twice; from 0 to 1.
        refuse: how often `submit` raises.
        confirm: how often `abort` of a lost copy is confirmed.

    Attributes:
        host: what the host pages hold, `rows` entries each.
        copies: everything that was submitted, in order.
        num_refused: how often `submit` raised for the seed's sake.
    """

    name = "fake"

    def __init__(
        self,
        device: MutableSequence[object],
        num_host_pages: int,
        *,
        rows: int = 1,
        seed: int = 0,
        delay: tuple[int, int] = (1, 3),
        lose: float = 0.0,
        fail: float = 0.0,
        duplicate: float = 0.0,
        refuse: float = 0.0,
        confirm: float = 0.0,
    ) -> None:
        for field, rate in (
            ("lose", lose),
            ("fail", fail),
            ("duplicate", duplicate),
            ("refuse", refuse),
            ("confirm", confirm),
        ):
            if not 0 <= rate <= 1:
                raise KVStoreError(
                    "invalid_count", f"{field} must be between 0 and 1, not {rate}", field=field
                )
        if not 1 <= delay[0] <= delay[1]:
            raise KVStoreError("invalid_count", f"delay must be two polls, ascending: {delay}", field="delay")
        self.lose, self.fail, self.duplicate = lose, fail, duplicate
        self.refuse, self.confirm = refuse, confirm
        self.delay = delay
        self.host: list[object] = [None] * (num_host_pages * rows)
        self.copies: list[Copy] = []
        self.num_refused = 0
        self._num_host_pages = num_host_pages
        self._device = device
        self._rows = rows
        self._rng = random.Random(seed)
        self._pending: dict[int, _Pending] = {}
        self._again: list[Completion] = []
        self._polls = 0

    @property
    def num_host_pages(self) -> int:
        return self._num_host_pages

    @property
    def lost(self) -> tuple[int, ...]:
        """Tickets that will never be reported unless they are released."""
        return tuple(pending.ticket for pending in self._pending.values() if pending.lost)

    def submit(self, copy: Copy) -> int:
        """Raises KVStoreError `capacity` for a page that there is not, RuntimeError as often as `refuse` says."""
        num_pages = len(self._device) // self._rows
        for device, host in copy.pages:
            if not (0 <= device < num_pages and 0 <= host < self._num_host_pages):
                message = f"there is no device page {device} or no host page {host}"
                raise KVStoreError("capacity", message, field="pages")
        if self._rng.random() < self.refuse:
            self.num_refused += 1
            raise RuntimeError("refused, as the seed says")
        self.copies.append(copy)
        ticket = len(self.copies)
        chance = self._rng.random()
        error = "failed, as the seed says" if self.lose <= chance < self.lose + self.fail else None
        due = self._polls + self._rng.randint(*self.delay)
        self._pending[ticket] = _Pending(ticket, copy, due, error, chance < self.lose)
        self._tear(self._pending[ticket])
        return ticket

    def poll(self) -> Sequence[Completion]:
        self._polls += 1
        done = [p for p in self._pending.values() if not p.lost and p.due <= self._polls]
        self._rng.shuffle(done)
        reported, self._again = self._again, []
        for pending in done:
            if pending.error is None:
                self._finish(pending)
            completion = Completion(pending.ticket, pending.error)
            del self._pending[pending.ticket]
            reported.append(completion)
            if self._rng.random() < self.duplicate:
                self._again.append(completion)
        for pending in self._pending.values():
            self._tear(pending)
        return reported

    def abort(self, ticket: int) -> bool:
        pending = self._pending.get(ticket)
        if pending is None:
            return True
        if pending.lost and self._rng.random() < self.confirm:
            del self._pending[ticket]
            return True
        return False

    def release_lost(self) -> None:
        """Report the lost copies after all, from the next poll on."""
        for pending in self._pending.values():
            pending.lost = False

    def _tear(self, pending: _Pending) -> None:
        for target, index, _, _ in self._cells(pending.copy):
            target[index] = TORN

    def _finish(self, pending: _Pending) -> None:
        for target, index, source, at in self._cells(pending.copy):
            target[index] = source[at]

    def _cells(
        self, copy: Copy
    ) -> Iterator[tuple[MutableSequence[object], int, MutableSequence[object], int]]:
        for device, host in copy.pages:
            for row in range(self._rows):
                left, right = device * self._rows + row, host * self._rows + row
                if copy.kind == "store":
                    yield self.host, right, self._device, left
                else:
                    yield self._device, left, self.host, right
