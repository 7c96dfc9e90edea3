"""What runs: one chain of tokens being computed, and where it stands. The scheduler moves it, the runner reads it."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from dagengine_kvstore import Lease, RestoreWriter, Writer

Extents = NDArray[np.int32]
PAGE, LO, HI, STORED, DELTA = range(5)


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

    Attributes:
        id: unique for ever; attention backends key their caches on it.
        tokens: own tokens known so far; `computed` of them have KV.
        own_start: view position of the first own token.
        context: extents of what is read, [n, 5] int32 (page, lo, hi, stored, delta).
    """

    id: int
    order: tuple[int, int, int]
    backend: str
    own_start: int
    tokens: list[int]
    writer: Writer | RestoreWriter
    computed: int = 0
    phase: Phase = Phase.WAITING
    lease: Lease | None = None
    context: Extents = field(default_factory=lambda: np.empty((0, 5), np.int32))

    @property
    def remaining(self) -> int:
        """Known own tokens whose KV is still to be computed."""
        return len(self.tokens) - self.computed

    @property
    def wants_logits(self) -> bool:
        """Whether a token is sampled once everything known is computed."""
        return False

    def extents(self, count: int) -> Extents:
        """Everything that the next `count` own tokens may see, themselves included, [n, 5] int32.

        The store's pages may have been computed at another base than this chain's positions; DELTA is the view
        position minus the page's own.
        """
        end = self.computed + count
        own: list[tuple[int, int, int, int, int]] = []
        offset = 0
        for page, lo, hi, stored in self.writer.extents():
            take = min(hi - lo, end - offset)
            if take <= 0:
                break
            own.append((page, lo, lo + take, stored, self.own_start + offset - stored))
            offset += take
        assert offset == end, f"own pages cover {offset} tokens of {end}"
        return np.concatenate([self.context, np.array(own, np.int32).reshape(-1, 5)])


@dataclass(eq=False)
class Restore(Work):
    """An evicted node computed again from its recipe, on behalf of a waiting sequence.

    Attributes:
        found: tokens whose pages were still there, and are not computed.
    """

    found: int = 0
