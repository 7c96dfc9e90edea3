"""How long a device waits for the host between decode steps, told from events. Knows steps; not what they compute.

    host      launch k ─────────────► collect k-1 ··· launch k+1 ──────────►
    device    ├─ k-1 ───────────┤├─ k ──────────────┤         ├─ k+1 ──···
              the whole of k was queued: no wait     └─ waits ─┘ at most until k+1 was queued

If the step before was not done when the host had queued the whole of a step, the device waited for nothing. Otherwise
it waited at most from the end of that step until the host had queued this one: that much is counted, though the
device may have begun with its first kernels.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

IN_FLIGHT = 2
"""Steps, the newest ones, whose events may not have happened yet."""


class Event(Protocol):
    """The part of torch.cuda.Event, with timing, that is needed."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def elapsed_time(self, end: Any) -> float: ...


@dataclass(frozen=True)
class _Step:
    """
    Attributes:
        begin, end: before and behind what it queued.
        seconds: that queueing it took the host.
        late: whether the device was done with the step before by then.
    """

    decode: bool
    begin: Event
    end: Event
    seconds: float
    late: bool


class HostTime:
    """Counts over decode steps that followed a decode step; costs the host several microseconds a step.

    Args:
        make_event: by default torch.cuda.Event with timing, recorded on the current stream.
        clock: seconds.

    Attributes:
        steps: how many were counted.
        waited_s: seconds that the device waited in them, at most.
        total_s: seconds from the end of the step before to the end of each.
    """

    def __init__(
        self,
        make_event: Callable[[], Event] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.steps = 0
        self.waited_s = self.total_s = 0.0
        self._make_event = make_event or (lambda: torch.cuda.Event(enable_timing=True))
        self._clock = clock
        self._steps: deque[_Step] = deque()
        self._open: tuple[bool, Event, float] | None = None

    @property
    def share(self) -> float | None:
        """The waiting's share of the time, from 0 to 1; None before a step was counted."""
        return self.waited_s / self.total_s if self.total_s else None

    def begin(self, *, decode: bool) -> None:
        """A step is about to be queued. Steps before the one before it were collected."""
        event = self._make_event()
        event.record()
        self._open = decode, event, self._clock()

    def end(self) -> None:
        """The step was queued."""
        assert self._open is not None, "no step has begun"
        (decode, begin, began), self._open = self._open, None
        late = not self._steps or self._steps[-1].end.query()
        event = self._make_event()
        event.record()
        self._steps.append(_Step(decode, begin, event, self._clock() - began, late))
        while len(self._steps) > IN_FLIGHT + 1:
            self._count()

    def finish(self) -> None:
        """Count the last steps too, as far as they are done."""
        while len(self._steps) > 1 and self._steps[1].end.query():
            self._count()

    def _count(self) -> None:
        before, step = self._steps.popleft(), self._steps[0]
        if not (before.decode and step.decode):
            return
        total = before.end.elapsed_time(step.end) * 1e-3
        waited = before.end.elapsed_time(step.begin) * 1e-3 + step.seconds if step.late else 0.0
        self.steps += 1
        self.total_s += total
        self.waited_s += min(waited, total)
