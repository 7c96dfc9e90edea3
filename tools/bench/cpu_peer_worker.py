"""What both engines' processes have in common: a line of JSON asks for a run, a line of JSON gives its times.

    {"run": "generate", "prompts": [[ids], ...], "tokens": n}      every prompt at once, n tokens each, greedily
    {"run": "contexts", "name": s, "contexts": [[ids], ...]}       encoded and kept (ours only)
    {"run": "readers", "name": s, "questions": [[ids], ...], "tokens": n}      question i reads context i % contexts

Times are of two parts: until every sequence has its first token, and from there to the end. Each in seconds on the wall
and of this process's processor time, which other processes of a busy machine lengthen less. Standard library only.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

Run = Callable[..., dict[str, Any]]


@dataclass
class Clock:
    """Told how many tokens each sequence has after every step; knows when all had their first, and what came later."""

    sequences: int
    begun: tuple[float, float] = field(default_factory=lambda: (time.perf_counter(), time.process_time()))
    first: tuple[float, float] | None = None
    at_first: int = 0
    counts: dict[str, int] = field(default_factory=dict)

    def saw(self, counts: Mapping[str, int]) -> None:
        self.counts.update(counts)
        if self.first is None and len(self.counts) == self.sequences and all(self.counts.values()):
            self.first, self.at_first = now(), sum(self.counts.values())

    def result(self) -> dict[str, Any]:
        end = now()
        assert self.first is not None, "not every sequence had a token"
        return {
            "first_s": self.first[0] - self.begun[0],
            "first_cpu_s": self.first[1] - self.begun[1],
            "rest_s": end[0] - self.first[0],
            "rest_cpu_s": end[1] - self.first[1],
            "rest_tokens": sum(self.counts.values()) - self.at_first,
        }


def now() -> tuple[float, float]:
    """Seconds on the wall, and of this process."""
    return time.perf_counter(), time.process_time()


def serve(ready: Mapping[str, Any], runs: Mapping[str, Run], answers: Any) -> None:
    """Answer requests until standard input ends; `ready` is said first."""
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps(runs[request.pop("run")](**request)), file=answers, flush=True)


def own_output() -> Any:
    """Standard output for the answers alone; whatever else is printed goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    return answers
