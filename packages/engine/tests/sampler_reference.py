"""What the sampler must choose, row by row, in plain Python: written from the documentation of SamplingParams."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence as SequenceOf
from dataclasses import replace

import torch
from torch import Tensor

from dagengine.sampler import NonFiniteLogits, Sampled, Sampler, SamplingRow
from dagengine.sampling import SamplingParams

CPU = torch.device("cpu")

TIE = 4e-6
"""How far apart, of their size, two scores may be that float32 may put either way."""


def row(
    params: SamplingParams,
    *,
    seed: int = 0,
    key: int = 0,
    step: int | None = None,
    seen: SequenceOf[int] = (),
    sampled: SequenceOf[int] = (),
    banned: SequenceOf[int] = (),
) -> SamplingRow:
    return SamplingRow(
        params=params,
        seed=None if params.temperature == 0 else seed,
        key=key,
        step=len(sampled) if step is None else step,
        seen=seen,
        sampled=sampled,
        banned=frozenset(banned),
    )


def sample(
    logits: Tensor, rows: SequenceOf[SamplingRow], vocab_size: int | None = None
) -> list[Sampled | NonFiniteLogits]:
    """One launch of a new sampler on the device of the logits; every row becomes a sequence of its own."""
    sampler = Sampler(logits.device, vocab_size or logits.shape[1])
    return sampler.launch(logits, [one._replace(key=i) for i, one in enumerate(rows)]).results()


def splitmix64(state: int) -> SequenceOf[int]:
    """The outputs of SplitMix64 from a state, in order, as its authors give it: a state that moves, and no counter."""
    while True:
        state = (state + 0x9E3779B97F4A7C15) % 2**64
        z = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
        yield z ^ (z >> 31)


def nth(state: int, index: int) -> int:
    return next(itertools.islice(splitmix64(state), index, None))


def noise(seed: int, step: int, count: int) -> list[float]:
    """Gumbel noise of the ids from 0."""
    key = nth(nth(seed % 2**64, 0), step)
    numbers = (bits % 2**63 / 2**63 for bits in itertools.islice(splitmix64(key), count))
    return [-math.log(-math.log1p(-min(max(u, 2.0**-64), 1 - 2.0**-24))) for u in numbers]


def adjusted(logits: SequenceOf[float], one: SamplingRow) -> list[float]:
    """Penalties, biases, banned ids."""
    p, scores = one.params, list(logits)
    for token in {*one.seen, *one.sampled}:
        positive = scores[token] > 0
        scores[token] = (
            scores[token] / p.repetition_penalty if positive else scores[token] * p.repetition_penalty
        )
    for token, count in Counter(one.sampled).items():
        scores[token] -= p.presence_penalty + p.frequency_penalty * count
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    for token in one.banned:
        scores[token] = -math.inf
    return scores


def weights(scores: SequenceOf[float], p: SamplingParams) -> dict[int, float]:
    """The tokens that stay, with log-weights: less the greatest, over the temperature."""
    peak = max(scores)
    logs = {t: (s - peak) / max(p.temperature, 1e-5) for t, s in enumerate(scores)}
    order = sorted(logs, key=lambda t: (-logs[t], t))
    if p.top_k > 0:
        order = order[: p.top_k]
    order = [t for t in order if math.exp(logs[t]) >= p.min_p]
    total, before, kept = math.fsum(math.exp(logs[t]) for t in order), 0.0, []
    for token in order:
        if p.top_p < 1.0 and kept and before >= p.top_p * total:
            break
        kept.append(token)
        before += math.exp(logs[token])
    return {t: logs[t] for t in kept}


def probabilities(logits: SequenceOf[float], one: SamplingRow) -> dict[int, float]:
    """Token to probability, of the tokens that can be drawn."""
    logs = weights(adjusted(logits, one), one.params)
    total = math.fsum(math.exp(value) for value in logs.values())
    return {t: math.exp(value) / total for t, value in logs.items() if math.exp(value) > 0}


def choices(logits: SequenceOf[float], one: SamplingRow, *, error: float) -> set[int]:
    """The choices that are right if all that is compared may be wrong by `error`; mostly one. Empty: no choice."""
    if not math.isfinite(max(logits)) or any(math.isnan(value) for value in logits):
        return set()
    scores = adjusted(logits, one)
    if not math.isfinite(max(scores)):
        return set()
    p = one.params
    if p.temperature == 0.0:
        return {t for t, s in enumerate(scores) if s >= max(scores) - error * max(1.0, abs(max(scores)))}
    assert one.seed is not None
    gumbel, right = noise(one.seed, one.step, len(scores)), set()
    for broken, top_p, min_p in itertools.product(
        _ties_broken(scores, logits), (-error, 0.0, error), (-error, 0.0, error)
    ):
        edge = replace(
            p,
            top_p=min(1.0, p.top_p * (1 + top_p)) if p.top_p < 1.0 else 1.0,
            min_p=min(1.0, max(0.0, p.min_p * (1 + min_p))),
        )
        values = {t: log + gumbel[t] for t, log in weights(broken, edge).items()}
        right |= {t for t, value in values.items() if value >= max(values.values()) - error}
    return right


def _ties_broken(scores: SequenceOf[float], logits: SequenceOf[float]) -> list[SequenceOf[float]]:
    """The scores, and those where one that was changed, and is about as high as another, is a little higher or lower:
    in float32 either of two may come out first, and a low temperature or top-k makes much of that.
    """
    found = [scores]
    for t, score in enumerate(scores):
        little = TIE * max(1.0, abs(score))
        near = any(other != t and abs(score - s) <= little for other, s in enumerate(scores))
        if score != logits[t] and math.isfinite(score) and near:
            for moved in (score - 2 * little, score + 2 * little):
                found.append([*scores[:t], moved, *scores[t + 1 :]])
    return found


OPTIONS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.9),
    SamplingParams(temperature=1.5, top_k=5, logprobs=3),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=0.7, min_p=0.2, presence_penalty=1.0),
    SamplingParams(temperature=0.0, logit_bias={3: 5.0}, logprobs=0),
    SamplingParams(temperature=2.0, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.0, repetition_penalty=1.5, logprobs=20),
    SamplingParams(temperature=0.0, frequency_penalty=0.5),
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=1.0, top_p=0.97, min_p=0.01),
]
"""Every kind of choice, alone and together."""
