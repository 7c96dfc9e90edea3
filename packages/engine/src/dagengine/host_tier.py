"""The host tier of one engine: the transfer that the store moves pages with, and what that costs. Knows no requests.

Costs are measured where steps and loads happen. Of steps that overlap, and of loads behind each other, each counts from
the end of the one before it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dagengine_kvstore import EventLog, Transfer
from dagengine_kvstore.recall import Recalls

from .costs import StepCosts
from .runner import Chunk
from .work import HI, LO

log = logging.getLogger("dagengine")


@dataclass(eq=False)
class HostTier:
    """
    Attributes:
        transfer: what the store was given.
        page_bytes: of one page over all layers.
        clock: seconds that only grow: the store's.
        closing: what to call at the end, in order.
        recalls: brings pages back that outlived an engine; None: nothing does.
    """

    transfer: Transfer
    costs: StepCosts
    page_bytes: int
    clock: Callable[[], float]
    closing: tuple[Callable[[], None], ...] = ()
    recalls: Recalls | None = None
    _steps: deque[tuple[int, int, float]] = field(default_factory=deque)
    _last_step: float = 0.0
    _loads: dict[int, float] = field(default_factory=dict)
    _last_load: float = 0.0
    _seen: int = 0

    def begin_step(self, chunks: Sequence[Chunk]) -> None:
        """A step is launched; what it computes of inputs is measured where that is most of it."""
        tokens = sum(chunk.count for chunk in chunks)
        filling = sum(chunk.count for chunk in chunks if chunk.count > 1)
        pairs = 0
        if 2 * filling >= tokens:
            for chunk in chunks:
                context = chunk.work.context
                visible = int((context[:, HI] - context[:, LO]).sum()) + chunk.work.computed
                pairs += chunk.count * visible + chunk.count * (chunk.count + 1) // 2
        self._steps.append((tokens, pairs, self.clock()))

    def end_step(self, *, failed: bool) -> None:
        """The oldest launched step was collected."""
        tokens, pairs, began = self._steps.popleft()
        now = self.clock()
        seconds, self._last_step = now - max(began, self._last_step), now
        if pairs and seconds > 0 and not failed:
            self.costs.observe_step(tokens, pairs, seconds)

    def watch(self, events: EventLog) -> int:
        """Measure the loads among the events since the last call. Returns how many offloads are done since then.

        Where the log dropped events in between, loads begun before these are not measured: they may have ended there.
        """
        found = events.since(self._seen)
        if len(found) < events.next_seq - self._seen:
            self._loads.clear()
        self._seen = events.next_seq
        pages, began = 0, float("inf")
        for event in found:
            if event.ticket is None:
                continue
            if event.kind == "load":
                self._loads[event.ticket] = event.seconds
            elif event.kind == "loaded" and event.ticket in self._loads:
                pages += event.pages or 0
                began = min(began, self._loads.pop(event.ticket))
            elif event.kind in ("load_failed", "load_lost"):
                self._loads.pop(event.ticket, None)
        if pages:
            now = self.clock()
            seconds, self._last_load = now - max(began, self._last_load), now
            if seconds > 0:
                self.costs.observe_load(pages, seconds)
        return sum(event.kind == "offloaded" for event in found)

    def close(self) -> None:
        """Wait for what is under way, and write what is to be kept. Failures are logged: nothing depends on it."""
        for close in self.closing:
            try:
                close()
            except Exception:
                log.exception("the host tier could not be closed")
