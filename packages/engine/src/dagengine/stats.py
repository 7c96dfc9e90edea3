"""Counters of one engine: what metrics and tests read. Only the engine's thread writes them."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from .errors import DagError
from .request import Choice, Timing


@dataclass
class EngineStats:
    """Totals since the engine began.

    Attributes:
        finished: requests by finish reason, or by error code.
        timings: of answers that finished and that nobody has drained yet (at most 4,096 are kept).
        failed_steps: failed steps in a row.
        reloaded_tokens: read by finished answers that waited for them to come from the host.
        reloads_chosen, recomputes_chosen: how often what the host had of a node was loaded for somebody who read it, or
            computed again since that cost less.
        prefetches: loads for sequences that waited for their turn.
        offloads: states that were asked to leave the device, and did.
    """

    steps: int = 0
    batched_tokens: int = 0
    generated_tokens: int = 0
    prompt_tokens: int = 0
    reused_tokens: int = 0
    restored_tokens: int = 0
    reloaded_tokens: int = 0
    reloads_chosen: int = 0
    recomputes_chosen: int = 0
    prefetches: int = 0
    offloads: int = 0
    non_finite: int = 0
    failed_steps: int = 0
    last_batch: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    timings: deque[Timing] = field(default_factory=lambda: deque(maxlen=4096))

    def step(self, sequences: int, tokens: int) -> None:
        self.steps += 1
        self.last_batch = sequences
        self.batched_tokens += tokens

    def finish(self, error: DagError | None, choices: Sequence[Choice]) -> None:
        if error is not None:
            self.finished[error.code] += 1
        for choice in choices:
            self.finished[choice.finish_reason] += 1
            self.prompt_tokens += choice.dag.visible + choice.dag.input
            self.reused_tokens += choice.dag.reused
            self.reloaded_tokens += choice.dag.reloaded
            self.timings.append(choice.dag.timing)
