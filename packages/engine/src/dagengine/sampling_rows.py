"""The rows to sample; those that need more than an argmax as jobs, grouped, with their parameters on the device.

Knows parameters and sizes, not logits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from .rng import stream_keys
from .sampling import SamplingParams
from .transfer import to_device

MIN_TEMPERATURE = 1e-5
"""Temperatures above 0 but below this one count as this one."""

CHUNK_ELEMENTS = {"cpu": 1 << 16}
"""Rows × vocabulary that one pass over changed rows takes, by kind of device: bounds temporaries, suits caches."""

CHUNK_ELEMENTS_ELSEWHERE = 1 << 22


class SamplingRow(NamedTuple):
    """One row to sample: its parameters, and what identifies and precedes this choice.

    Attributes:
        seed: decides the choice together with `step`; any integer, taken modulo 2^64. None when greedy.
        key: unique id of the sequence.
        step: how many tokens the sequence sampled before this one, those the host does not know yet included.
        seen: token ids the request sees or was given (for the repetition penalty).
        sampled: token ids the request has sampled, as far as the host knows; must be all `step` of them when a
            sequence with penalties is new to the sampler, was forgotten, or comes with another step than the next.
        banned: ids that must not be chosen now (terminating ids before `min_tokens`).
    """

    params: SamplingParams
    seed: int | None
    key: int
    step: int
    seen: SequenceOf[int]
    sampled: SequenceOf[int]
    banned: frozenset[int]

    @property
    def penalised(self) -> bool:
        """Whether the choice depends on what was seen or sampled before."""
        return self.params.penalised

    @property
    def changed(self) -> bool:
        """Whether its logits change before the choice."""
        return bool(self.params.logit_bias or self.banned or self.penalised)

    @property
    def plain_greedy(self) -> bool:
        return self.params.plain_greedy and not self.banned


class Kind(IntEnum):
    """How a row's token is chosen: the greatest, or drawn from all, from top_k, or from what top_p leaves of all."""

    GREEDY = 0
    RACE = 1
    LIKELIEST = 2
    ALL_IN_ORDER = 3


@dataclass(eq=False)
class Job:
    """A row that is not plain greedy.

    Attributes:
        index: its row of the logits.
        top_k: how many tokens top-k leaves; all of the vocabulary without it.
        slot: its row of the penalty counts, if it has penalties.
    """

    index: int
    row: SamplingRow
    kind: Kind
    top_k: int
    slot: int | None = None

    @property
    def group(self) -> tuple[Kind, bool]:
        """Jobs of one group are processed alike."""
        return self.kind, self.row.changed


def job_of(index: int, row: SamplingRow, vocab_size: int) -> Job | None:
    """The job of row `index` of the logits; None where the argmax is the choice."""
    if row.plain_greedy:
        return None
    p = row.params
    if p.temperature == 0.0:
        return Job(index, row, Kind.GREEDY, vocab_size)
    if 0 < p.top_k < vocab_size:
        return Job(index, row, Kind.LIKELIEST, p.top_k)
    return Job(index, row, Kind.RACE if p.top_p >= 1.0 else Kind.ALL_IN_ORDER, vocab_size)


_INTEGERS = ("index", "key", "top_k", "slot")
_NUMBERS = ("temperature", "log_min_p", "top_p", "repetition", "presence", "frequency")


@dataclass(frozen=True)
class Table:
    """Parameters of jobs on the device: one transfer for all. int64 [columns, n]; numbers are the bits of float64."""

    columns: Tensor

    @classmethod
    def load(cls, jobs: SequenceOf[Job], device: torch.device) -> Table:
        rows = [job.row for job in jobs]
        host = np.empty((len(_INTEGERS) + len(_NUMBERS), len(jobs)), np.int64)
        host[0] = [job.index for job in jobs]
        host[1] = stream_keys([_seed(job) for job in jobs], [row.step for row in rows])
        host[2] = [job.top_k for job in jobs]
        host[3] = [job.slot or 0 for job in jobs]
        host[4:] = np.array([_numbers(row.params) for row in rows], np.float64).T.copy().view(np.int64)
        return cls(to_device(host, device))

    def slice(self, begin: int, end: int) -> Table:
        return Table(self.columns[:, begin:end])

    @property
    def index(self) -> Tensor:
        return self.columns[0]

    @property
    def key(self) -> Tensor:
        return self.columns[1]

    @property
    def top_k(self) -> Tensor:
        return self.columns[2]

    @property
    def slot(self) -> Tensor:
        return self.columns[3]

    def column(self, name: str, dtype: torch.dtype) -> Tensor:
        """[n, 1]"""
        place = len(_INTEGERS) + _NUMBERS.index(name)
        return self.columns[place].view(torch.float64).to(dtype)[:, None]


def _seed(job: Job) -> int:
    """Of the row; 0 where nothing is drawn."""
    if job.kind is Kind.GREEDY:
        return 0
    assert job.row.seed is not None, "a row with a temperature has a seed"
    return job.row.seed


def _numbers(p: SamplingParams) -> tuple[float, ...]:
    """In the order of _NUMBERS."""
    return (
        max(p.temperature, MIN_TEMPERATURE),
        math.log(p.min_p) if p.min_p > 0.0 else -math.inf,
        p.top_p if p.top_p < 1.0 else math.inf,
        p.repetition_penalty,
        p.presence_penalty,
        p.frequency_penalty,
    )


def chunk_rows(vocab_size: int, device: torch.device) -> int:
    """How many rows one pass takes."""
    return max(1, CHUNK_ELEMENTS.get(device.type, CHUNK_ELEMENTS_ELSEWHERE) // vocab_size)


def chunks(jobs: SequenceOf[Job], vocab_size: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Half-open ranges of jobs of one group, of bounded size."""
    size, begin = chunk_rows(vocab_size, device), 0
    for end in range(1, len(jobs) + 1):
        if end == len(jobs) or jobs[end].group != jobs[begin].group or end - begin == size:
            yield begin, end
            begin = end
