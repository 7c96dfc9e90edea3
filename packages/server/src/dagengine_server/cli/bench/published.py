"""Marks that a paper published, beside ours: of other hardware, models and baselines; a neighbour, not a goal."""

from __future__ import annotations

from dataclasses import dataclass

from .record import Figure

SPAN_QUERIES = "arXiv:2511.02749"
WORD = "published"


@dataclass(frozen=True)
class Mark:
    """What was published, in words, and the number that ours is divided by: of a range the end that asks most."""

    words: str
    value: float
    source: str = SPAN_QUERIES

    @property
    def name(self) -> str:
        return f"{WORD}, {self.source}: {self.words}"

    def beside(self, case: str, backend: str, metric: str, value: float) -> Figure:
        """Our factor beside the published one."""
        return Figure.count(case, backend, metric, value, "x").against(self.name, self.value)
