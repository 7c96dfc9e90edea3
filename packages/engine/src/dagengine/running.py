"""A submitted request until its terminal event: whom it waits for, what it holds meanwhile, its answers so far."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from dagengine_kvstore import KVStore, NodeRecord

from .errors import as_dag_error
from .prepare import Prepared, ResolvedRef
from .request import Choice, Request
from .sequence import Sequence


class Answer(NamedTuple):
    """A finished answer: its sequence, the id under which it was kept, if it was, and what ran as its backend."""

    sequence: Sequence
    state: str | None
    implementation: str


@dataclass(eq=False)
class RunningRequest:
    """
    Attributes:
        submitted, began: when it came, and when it waited for no other request any more; on the clock of
            `time.perf_counter`. One that runs in the step that completes what it reads waits until this step is chosen,
            and until all that it reads is known, which may be later than it was begun.
        arrival: its number in the order of submissions.
        parents: ids of requests of the same submission that it waits for.
        targets: what its references name, by index, and the first tokens held of it until this request began.
        children: requests that wait for it, and which of their references name it.
        answers: finished ones, by index.
    """

    request: Request
    submitted: float
    arrival: int
    parents: set[str] = field(default_factory=set)
    targets: dict[int, tuple[ResolvedRef, int | None]] = field(default_factory=dict)
    children: list[tuple[RunningRequest, list[int]]] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    answers: dict[int, Answer] = field(default_factory=dict)
    prepared: Prepared | None = None
    began: float | None = None

    def hold(self, store: KVStore, index: int, target: ResolvedRef, at: int | None) -> None:
        """Keep what reference `index` will read, whoever else lets go of it. Raises DagError `state_released`."""
        assert isinstance(target.node, NodeRecord)
        try:
            store.hold(target.node, at)
        except Exception as error:
            raise as_dag_error(error, f"context[{index}].state") from None
        self.targets[index] = target, at

    def release_targets(self, store: KVStore) -> None:
        """Let go of everything that `hold` keeps."""
        for target, at in self.targets.values():
            assert isinstance(target.node, NodeRecord)
            store.unhold(target.node, at)
        self.targets.clear()

    def holds_back(self, *, may_end_short: bool) -> bool:
        """Whether its answers hold back their last tokens, as of `Sequence`: for a request that `must_know` them."""
        return any(
            indices and child.must_know(indices, may_end_short=may_end_short)
            for child, indices in self.children
        )

    def must_know(self, indices: Iterable[int], *, may_end_short: bool) -> bool:
        """Whether it can begin only once all tokens of what these references name are known: for a repetition penalty,
        or since one of them ends where the output does.

        Args:
            may_end_short: whether the output may leave out tokens that were sampled.
        """
        params, context = self.request.sampling, self.request.context
        if params is not None and params.repetition_penalty != 1.0:
            return True
        return may_end_short and any(
            context[i].mode == "artifact" and context[i].span in (None, "output") for i in indices
        )

    def choices(self, facts: Mapping[str, object]) -> tuple[Choice, ...]:
        """The finished answers, in order; `facts` of the engine are for their records."""
        assert self.prepared is not None and self.began is not None
        return tuple(
            sequence.choice(self.prepared, state, implementation, self.submitted, self.began, facts)
            for _, (sequence, state, implementation) in sorted(self.answers.items())
        )

    def seen_tokens(self) -> list[int]:
        """Token ids that a repetition penalty looks at besides the sampled ones; none where there is no penalty."""
        params, prepared = self.request.sampling, self.prepared
        if params is None or params.repetition_penalty == 1.0 or prepared is None:
            return []
        visible = [t for read in prepared.reads for t in read.node.tokens[read.start : read.stop]]
        return [*visible, *self.request.input_ids]
