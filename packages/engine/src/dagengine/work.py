"""What runs: one chain of tokens being computed, and where it stands. The scheduler moves it, the runner reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dagengine_kvstore import Lease, RestoreWriter, Writer

Extents = NDArray[np.int32]
PAGE, LO, HI, STORED, DELTA = range(5)
EMPTY: Extents = np.empty((0, 5), np.int32)


class Phase(Enum):
    """Where a piece of work stands.

    WAITING → RUNNING → DONE, and back from RUNNING to WAITING when it is preempted.
    """

    WAITING = "waiting"
    RUNNING = "running"
    DONE = "done"


@dataclass(eq=False)
class Work:
    """A chain of own tokens over leased context: a sequence of a request, or an evicted node being recomputed.

        tokens   0 ········ committed ········ computed ········ len(tokens) ·· num_tokens
                 │ its steps ended    │ a step in flight │ to be computed │ pending

    Attributes:
        id: unique for ever; attention backends and the sampler key what they keep on it.
        tokens: own tokens known so far.
        computed: own tokens whose KV was written, or is written by a step in flight.
        pending: tokens behind these that a step in flight samples; the host does not know them yet.
        pending_row: the row of the last launch that samples the pending token.
        own_start: view position of the first own token.
        context: extents of what is read, [n, 5] int32 (page, lo, hi, stored, delta).
        full_pages: extents of the first own pages, which are full, so that a step adds to them and does not make them
            again.
    """

    id: int
    order: tuple[int, int, int]
    backend: str
    own_start: int
    tokens: list[int]
    writer: Writer | RestoreWriter
    computed: int = 0
    full_pages: Extents = field(default_factory=lambda: EMPTY)
    pending: int = 0
    pending_row: int | None = None
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    context: Extents = field(default_factory=lambda: EMPTY)

    @property
    def num_tokens(self) -> int:
        """Own tokens so far, pending ones included."""
        return len(self.tokens) + self.pending

    @property
    def remaining(self) -> int:
        """Own tokens, pending ones included, whose KV is still to be computed."""
        return self.num_tokens - self.computed

    @property
    def committed(self) -> bool:
        """Whether the KV of every own token was computed by a step that ended."""
        return not self.pending and self.writer.num_committed == len(self.tokens)

    @property
    def wants_logits(self) -> bool:
        """Whether a token is sampled once everything so far is computed."""
        return False

    def restart(self) -> None:
        """Nothing is computed any more: the writer was rolled back."""
        assert not self.pending, "a token would be lost"
        self.computed = 0
        self.full_pages = EMPTY

    def extents(self, count: int) -> Extents:
        """Everything that the next `count` own tokens may see, themselves included, [n, 5] int32.

        To be asked before the step that computes them is launched, and after their slots were given.

        The store's pages may have been computed at another base than this chain's positions; DELTA is the view
        position minus the page's own.
        """
        end, size = self.computed + count, self.writer.page_size
        offset = begin = len(self.full_pages) * size
        rows: list[tuple[int, int, int, int, int]] = []
        for page, lo, hi, stored in self.writer.extents(begin, end):
            rows.append((page, lo, hi, stored, self.own_start + offset - stored))
            offset += hi - lo
        own = np.array(rows, np.int32).reshape(-1, 5)
        full = (end - begin) // size
        if full:
            self.full_pages = np.concatenate([self.full_pages, own[:full]])
            own = own[full:]
        return np.concatenate([self.context, self.full_pages, own])


@dataclass(eq=False)
class Restore(Work):
    """An evicted node computed again from its recipe, on behalf of a waiting sequence.

    Attributes:
        found: tokens whose pages were still there, and are not computed.
    """

    found: int = 0
