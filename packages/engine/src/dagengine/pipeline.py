"""Steps between their launch and their collection. Knows batches and fences; not requests, text or pages.

    launch k │ launch k+1 │ collect k │ launch k+2 │ collect k+1 │ …        the device runs k+1 from here ─┐
                          └─ waits for k ────────────────────────────────────────── while the host plans ──┘

A step's results come to the host when it is collected. What the next step needs before that, the ids it samples,
stays on the device: `Chunk.pending` says which. The fence of a step is open from before its launch until it is
collected, so pages that were freed meanwhile are not handed out under it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from dataclasses import dataclass, field

import torch
from torch import Tensor

from dagengine_kernels import AttentionBackend
from dagengine_kvstore import KVStore

from .host_time import HostTime
from .runner import Chunk, Runner
from .sampler import NonFiniteLogits, PendingSample, Sampled, Sampler
from .sequence import Sequence

log = logging.getLogger("dagengine")


@dataclass(eq=False)
class Launch:
    """The part of a step that one attention backend runs.

    Attributes:
        sequences: those that sample, in the order of their rows.
        sample: their next tokens; None if nothing is sampled.
        logits: [R, vocab], kept only for an observer.
        wait: returns when the device is done, also with what was queued of one that failed.
        results: one per sequence, once collected.
        error: why it failed, at its launch or when it was collected.
    """

    chunks: list[Chunk]
    sequences: list[Sequence] = field(default_factory=list)
    sample: PendingSample | None = None
    logits: Tensor | None = None
    wait: Callable[[], None] | None = None
    results: list[Sampled | NonFiniteLogits] = field(default_factory=list)
    error: Exception | None = None


@dataclass(eq=False)
class Flight:
    """A launched step, until it is collected."""

    fence: int
    launches: list[Launch] = field(default_factory=list)

    @property
    def failed(self) -> bool:
        return any(launch.error is not None for launch in self.launches)


class Pipeline:
    """Launches steps and collects them in order.

    Args:
        backend: an attention backend by its name.
        keep_logits: leave each launch's logits with it.

    Attributes:
        host_time: counts how long the device waits for the host, if it is to be counted.
    """

    def __init__(
        self,
        store: KVStore,
        runner: Runner,
        sampler: Sampler,
        backend: Callable[[str], AttentionBackend],
        *,
        keep_logits: bool,
    ) -> None:
        self._store, self._runner, self._sampler = store, runner, sampler
        self._backend, self._keep_logits = backend, keep_logits
        self._flights: deque[Flight] = deque()
        self._ids: dict[str, Tensor] = {}
        self.host_time: HostTime | None = None

    @property
    def num_in_flight(self) -> int:
        return len(self._flights)

    @property
    def oldest(self) -> Flight:
        """The step that is collected next."""
        return self._flights[0]

    def launch(self, chunks: SequenceOf[Chunk]) -> Flight:
        """Enqueue one step. Chunks of different backends run one after the other; a launch that fails says so."""
        flight = Flight(self._store.begin_step())
        self._flights.append(flight)
        previous, self._ids = self._ids, {}
        if self.host_time is not None:
            self.host_time.begin(decode=all(chunk.count == 1 for chunk in chunks))
        for name, group in _by_backend(chunks).items():
            launch = Launch(group)
            flight.launches.append(launch)
            try:
                self._enqueue(launch, name, previous.get(name))
            except Exception as error:
                log.exception("a launch failed; its requests end")
                launch.error = error
                with suppress(Exception):  # of a device that is lost
                    launch.wait = self._runner.marker()
        if self.host_time is not None:
            self.host_time.end()
        return flight

    def collect(self) -> tuple[Flight, list[Launch]]:
        """Wait for the oldest step in flight and end its fence. Returns it, and what turned out to have failed."""
        flight = self._flights.popleft()
        failed: list[Launch] = []
        try:
            for launch in flight.launches:
                if launch.error is not None:
                    if launch.wait is not None:  # what of it was queued may write its pages until then
                        with suppress(Exception):
                            launch.wait()
                    continue
                try:
                    assert launch.wait is not None
                    launch.wait()
                    launch.results = [] if launch.sample is None else launch.sample.results()
                except Exception as error:
                    log.exception("a step failed; its requests end")
                    launch.error = error
                    failed.append(launch)
        finally:
            self._store.end_step(flight.fence)
        return flight, failed

    @torch.inference_mode()
    def _enqueue(self, launch: Launch, name: str, pending: Tensor | None) -> None:
        logits = self._runner.launch(launch.chunks, self._backend(name), pending)
        launch.sequences = [c.work for c in launch.chunks if c.samples and isinstance(c.work, Sequence)]
        if launch.sequences:
            if self._keep_logits:
                launch.logits = logits.clone()
            launch.sample = self._sampler.launch(logits, [s.sampling_row() for s in launch.sequences])
            self._ids[name] = launch.sample.ids
        launch.wait = self._runner.marker()
        for chunk in launch.chunks:
            chunk.work.computed += chunk.count
        for row, sequence in enumerate(launch.sequences):
            sequence.pending += 1
            sequence.pending_row = row


def _by_backend(chunks: SequenceOf[Chunk]) -> dict[str, list[Chunk]]:
    if len({chunk.work.backend for chunk in chunks}) == 1:
        return {chunks[0].work.backend: list(chunks)}
    groups: dict[str, list[Chunk]] = {}
    for chunk in chunks:
        groups.setdefault(chunk.work.backend, []).append(chunk)
    return groups
