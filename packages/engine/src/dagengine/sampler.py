"""From logits to the next token of each sequence.

Each row is processed by itself with its own generator, so a sequence's tokens never depend on what else is in
the batch. Greedy rows without any processing take a vectorised path that gives the same ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass

import torch
from torch import Tensor

from .request import TokenLogprob
from .sampling import SamplingParams


@dataclass(frozen=True)
class SamplingRow:
    """One row to sample: its parameters, generator (None when greedy), and the tokens that penalties look at.

    Attributes:
        seen: token ids the request sees or was given (for the repetition penalty).
        sampled: token ids the request has sampled.
        banned: ids that must not be chosen now (terminating ids before `min_tokens`).
    """

    params: SamplingParams
    generator: torch.Generator | None
    seen: SequenceOf[int]
    sampled: SequenceOf[int]
    banned: frozenset[int]

    @property
    def plain_greedy(self) -> bool:
        p = self.params
        no_penalty = p.repetition_penalty == 1.0 and p.presence_penalty == 0.0 and p.frequency_penalty == 0.0
        return p.temperature == 0.0 and no_penalty and not p.logit_bias and not self.banned


@dataclass(frozen=True)
class Sampled:
    token_id: int
    logprob: TokenLogprob | None


@dataclass(frozen=True)
class NonFiniteLogits:
    """A row's logits hold NaN or only infinities, or no id may be chosen: the sequence cannot go on."""

    row: int


def sample(logits: Tensor, rows: SequenceOf[SamplingRow]) -> list[Sampled | NonFiniteLogits]:
    """Sample one token per row of `logits` [R, V] (float32); ids that no tokenizer knows are already at -inf."""
    finite = torch.isfinite(logits.amax(dim=-1)).tolist()  # the greatest of a row that holds NaN is NaN
    greedy = _argmax(logits)
    result: list[Sampled | NonFiniteLogits] = []
    for index, row in enumerate(rows):
        if not finite[index]:
            result.append(NonFiniteLogits(index))
            continue
        token = greedy[index] if row.plain_greedy else _sample_row(logits[index], row)
        if token is None:
            result.append(NonFiniteLogits(index))
            continue
        result.append(Sampled(token, _logprob(logits[index], token, row.params.logprobs)))
    return result


def _argmax(logits: Tensor) -> list[int]:
    """The first of the greatest of each row; numpy's is many times faster than torch's on a CPU."""
    found = logits.numpy().argmax(-1) if logits.device.type == "cpu" else logits.argmax(dim=-1)
    ids: list[int] = found.tolist()
    return ids


def _sample_row(logits: Tensor, row: SamplingRow) -> int | None:
    """A token id, or None if every id is banned or masked."""
    params = row.params
    scores = _penalised(logits.clone(), row)
    peak = scores.max()
    if not torch.isfinite(peak):
        return None
    if params.temperature == 0.0:
        return int(scores.argmax())
    assert row.generator is not None
    scores = (scores - peak) / max(params.temperature, 1e-5)
    ordered, ids = scores.sort(descending=True, stable=True)
    probs = torch.softmax(ordered, dim=-1)
    keep = torch.ones_like(probs, dtype=torch.bool)
    if params.top_k > 0:
        keep[params.top_k :] = False
    if params.min_p > 0.0:
        keep &= probs >= params.min_p * probs[0]
    if params.top_p < 1.0:
        kept = torch.where(keep, probs, torch.zeros_like(probs))
        kept = kept / kept.sum()
        keep &= kept.cumsum(dim=-1) - kept < params.top_p
    keep[0] = True
    probs = torch.where(keep, probs, torch.zeros_like(probs))
    return int(ids[torch.multinomial(probs, 1, generator=row.generator)])


def _penalised(scores: Tensor, row: SamplingRow) -> Tensor:
    params = row.params
    if params.repetition_penalty != 1.0 and (row.seen or row.sampled):
        ids = torch.tensor(sorted({*row.seen, *row.sampled}), device=scores.device)
        values = scores[ids]
        scaled = torch.where(
            values > 0, values / params.repetition_penalty, values * params.repetition_penalty
        )
        scores[ids] = scaled
    if row.sampled and (params.presence_penalty or params.frequency_penalty):
        ids, counts = torch.tensor(list(row.sampled), device=scores.device).unique(return_counts=True)
        scores[ids] -= params.presence_penalty + params.frequency_penalty * counts.to(scores.dtype)
    for token, bias in params.logit_bias.items():
        scores[token] += bias
    if row.banned:
        scores[torch.tensor(sorted(row.banned), device=scores.device)] = -torch.inf
    return scores


def _logprob(logits: Tensor, token: int, count: int | None) -> TokenLogprob | None:
    if count is None:
        return None
    logprobs = torch.log_softmax(logits, dim=-1)
    top: tuple[tuple[int, float], ...] = ()
    if count:
        values, ids = logprobs.topk(min(count, logprobs.shape[-1]))
        top = tuple(p for p in zip(ids.tolist(), values.tolist(), strict=True) if math.isfinite(p[1]))
    return TokenLogprob(token, float(logprobs[token]), top)
