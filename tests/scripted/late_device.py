"""A device that is always behind: what is launched runs when somebody waits for it, in order, and no sooner.

With it a step that the engine has launched has not happened when the engine goes on. Whoever reads a result too early
finds a number that no token has; whoever gives a page away too early finds in it what the next owner, or the test that
poisons free pages, wrote there. When something fails, so does everything that was enqueued behind it by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from dagengine.core import EngineCore
from dagengine.pipeline import PendingSample, Sampler
from dagengine.runner import Chunk, Runner
from dagengine_kernels import AttentionBackend

NOT_YET = -1


@dataclass(eq=False)
class Task:
    run: Callable[[], None]
    runs_anyway: bool = False
    done: bool = False
    error: Exception | None = None


@dataclass(eq=False)
class LateDevice:
    """
    Attributes:
        errors: what failed, also of work that nobody asked for any more.
        most: the most tasks that were waiting at once.
    """

    errors: list[str] = field(default_factory=list)
    most: int = 0
    _tasks: deque[Task] = field(default_factory=deque)

    def enqueue(self, run: Callable[[], None], *, runs_anyway: bool = False) -> Task:
        """Put something at the end; what `runs_anyway` does so whatever failed before."""
        self._tasks.append(Task(run, runs_anyway))
        self.most = max(self.most, len(self._tasks))
        return self._tasks[-1]

    @property
    def last(self) -> Task | None:
        return self._tasks[-1] if self._tasks else None

    @torch.inference_mode()
    def wait(self, task: Task) -> None:
        """Run everything up to a task. Raises its error."""
        while not task.done:
            current = self._tasks.popleft()
            try:
                if current.error is None:
                    current.run()
            except Exception as error:
                self.errors.append(str(error))
                for behind in (current, *self._tasks):
                    if not behind.runs_anyway:
                        behind.error = behind.error or error
            current.done = True
        if task.error is not None:
            raise task.error


class LateRunner(Runner):
    """A runner whose batches are packed at once and run late."""

    def __init__(self, runner: Runner, late: LateDevice) -> None:
        self.__dict__.update(runner.__dict__)
        self._late = late

    def launch(self, chunks: Sequence[Chunk], backend: AttentionBackend, pending: Tensor | None) -> Tensor:
        batch = self.build_input(chunks, pending)
        ends = list(accumulate(chunk.count for chunk in chunks))
        unknown = [(end - 1, c.pending) for end, c in zip(ends, chunks, strict=True) if c.pending is not None]
        logits = torch.full((len(batch.logit_rows), self.geometry.vocab_size), torch.nan)

        def run() -> None:
            for place, row in unknown:
                assert pending is not None
                batch.input_ids[place] = pending[row]
            assert (batch.input_ids != NOT_YET).all(), "an id is read before it was sampled"
            logits.copy_(self.forward(batch, backend))

        self._late.enqueue(run)
        return logits

    def marker(self) -> Callable[[], None]:
        task = self._late.last
        assert task is not None
        return partial(self._late.wait, task)


@dataclass(eq=False)
class LateSample:
    """As PendingSample, of a sampler that runs late."""

    ids: Tensor
    late: LateDevice
    task: Task
    found: list[PendingSample]

    def results(self) -> list[object]:
        self.late.wait(self.task)
        return list(self.found[0].results())


class LateSampler:
    def __init__(self, sampler: Sampler, late: LateDevice) -> None:
        self._sampler, self._late = sampler, late

    def launch(self, logits: Tensor, rows: Sequence[object]) -> LateSample:
        ids = torch.full((len(rows),), NOT_YET)
        found: list[PendingSample] = []

        def run() -> None:
            found.append(self._sampler.launch(logits, rows))  # type: ignore[arg-type]
            ids.copy_(found[0].ids)

        return LateSample(ids, self._late, self._late.enqueue(run), found)

    def forget(self, key: int) -> None:
        self._late.enqueue(partial(self._sampler.forget, key), runs_anyway=True)


def make_late(core: EngineCore) -> LateDevice:
    """Let everything that a core launches run late."""
    late = LateDevice()
    runner, sampler = LateRunner(core._runner, late), LateSampler(core._sampler, late)
    core._runner = core._pipeline._runner = runner
    core._sampler = core._pipeline._sampler = sampler  # type: ignore[assignment]
    return late
