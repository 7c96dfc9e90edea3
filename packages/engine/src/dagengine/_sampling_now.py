"""The interface of the sampler that enqueues, around the one that does not: each launch samples at once."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from .sampler import NonFiniteLogits, Sampled, sample
from .sampler import SamplingRow as Row
from .sampling import SamplingParams

__all__ = ["NonFiniteLogits", "PendingSample", "Sampled", "Sampler", "SamplingRow"]

STRIDE = 0xD1342543DE82EF95


@dataclass(frozen=True)
class SamplingRow:
    """One row to sample: what decides its token, and `key`, the sequence that it belongs to."""

    params: SamplingParams
    seed: int | None
    key: int
    step: int
    seen: SequenceOf[int]
    sampled: SequenceOf[int]
    banned: frozenset[int]


@dataclass(frozen=True)
class PendingSample:
    ids: Tensor
    sampled: list[Sampled | NonFiniteLogits]

    def results(self) -> list[Sampled | NonFiniteLogits]:
        return self.sampled


class Sampler:
    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device, self._vocab = device, vocab_size
        self._sampled: dict[int, list[int]] = {}

    def launch(self, logits: Tensor, rows: SequenceOf[SamplingRow]) -> PendingSample:
        if self._vocab < logits.shape[1]:
            logits[:, self._vocab :] = -torch.inf
        results = sample(logits, [self._row(row) for row in rows])
        ids: list[int] = []
        for row, result in zip(rows, results, strict=True):
            ids.append(result.token_id if isinstance(result, Sampled) else 0)
            self._sampled[row.key].append(ids[-1])
        return PendingSample(torch.tensor(ids, device=self._device), results)

    def forget(self, key: int) -> None:
        self._sampled.pop(key, None)

    def _row(self, row: SamplingRow) -> Row:
        generator = None
        if row.seed is not None:
            generator = torch.Generator().manual_seed((row.seed + row.step * STRIDE) % 2**63)
        known = self._sampled.setdefault(row.key, list(row.sampled))
        return Row(row.params, generator, row.seen, list(known), row.banned)
