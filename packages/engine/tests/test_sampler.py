"""The sampler against distributions computed in plain Python."""

from __future__ import annotations

import math
from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dagengine.sampler import NonFiniteLogits, Sampled, SamplingRow, sample
from dagengine.sampling import SamplingParams

DRAWS = 800


def row(
    params: SamplingParams,
    *,
    seed: int = 0,
    seen: tuple[int, ...] = (),
    sampled: tuple[int, ...] = (),
    banned: tuple[int, ...] = (),
) -> SamplingRow:
    generator = None if params.temperature == 0 else torch.Generator().manual_seed(seed)
    return SamplingRow(params, generator, seen, sampled, frozenset(banned))


def draw(logits: Tensor, one: SamplingRow) -> Sampled:
    (result,) = sample(logits[None].clone(), [one])
    assert isinstance(result, Sampled)
    return result


def reference(logits: list[float], one: SamplingRow) -> dict[int, float]:
    """Token to probability, from the documentation of SamplingParams."""
    p = one.params
    scores = list(logits)
    for token in {*one.seen, *one.sampled}:
        scores[token] = (
            scores[token] / p.repetition_penalty
            if scores[token] > 0
            else scores[token] * p.repetition_penalty
        )
    for token, count in Counter(one.sampled).items():
        scores[token] -= p.presence_penalty + p.frequency_penalty * count
    for token, bias in p.logit_bias.items():
        scores[token] += bias
    for token in one.banned:
        scores[token] = -math.inf
    peak = max(scores)
    weights = {t: math.exp((s - peak) / p.temperature) for t, s in enumerate(scores)}
    order = sorted(weights, key=lambda t: (-weights[t], t))
    if p.top_k > 0:
        order = order[: p.top_k]
    order = [t for t in order if weights[t] >= p.min_p * weights[order[0]]]
    total, mass, kept = sum(weights[t] for t in order), 0.0, []
    for token in order:
        if mass >= p.top_p * total and kept:
            break
        kept.append(token)
        mass += weights[token]
    return {t: weights[t] / mass for t in kept if weights[t] > 0}


LOGITS = [2.0, 1.1, -0.5, 0.3, 1.9, -3.0, 0.0, 1.05]
CASES = {
    "plain": {},
    "hot": {"temperature": 3.0},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 3},
    "top_k 1": {"top_k": 1},
    "top_k over the vocabulary": {"top_k": 1000},
    "top_p": {"top_p": 0.6},
    "tiny top_p": {"top_p": 1e-6},
    "min_p": {"min_p": 0.4},
    "min_p 1": {"min_p": 1.0},
    "top_k, then top_p of what is left": {"top_k": 3, "top_p": 0.75},
    "all three, warm": {"top_k": 6, "top_p": 0.8, "min_p": 0.1, "temperature": 1.7},
    "repetition": {"repetition_penalty": 1.8},
    "presence and frequency": {"presence_penalty": 0.7, "frequency_penalty": 0.4},
    "negative penalties": {"presence_penalty": -1.0, "frequency_penalty": -0.4, "repetition_penalty": 0.7},
    "bias": {"logit_bias": {2: 4.0, 0: -100.0}},
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
@pytest.mark.parametrize("banned", [(), (0, 4)])
def test_draws_follow_the_reference_distribution(options: dict[str, object], banned: tuple[int, ...]) -> None:
    params = SamplingParams(max_tokens=8, **({"temperature": 1.0} | options))
    one = row(params, seed=3, seen=(0, 2, 3), sampled=(4, 4, 7), banned=banned)
    expected = reference(LOGITS, one)
    logits = torch.tensor(LOGITS)
    counts = Counter(draw(logits, one).token_id for _ in range(DRAWS))
    assert counts.keys() <= expected.keys()
    for token, probability in expected.items():
        allowed = 5 * math.sqrt(probability * (1 - probability) / DRAWS) + 1e-9
        assert abs(counts[token] / DRAWS - probability) <= allowed


@settings(max_examples=300, deadline=None)
@given(
    logits=st.lists(st.integers(-32, 32).map(lambda i: i / 4), min_size=2, max_size=12),
    seed=st.integers(0, 2**32),
    options=st.fixed_dictionaries(
        {
            "temperature": st.floats(0.05, 10),
            "top_k": st.integers(-1, 14),
            "top_p": st.floats(0.05, 1.0),
            "min_p": st.floats(0.0, 1.0),
        }
    ),
)
def test_only_tokens_of_the_reference_are_drawn(
    logits: list[float], seed: int, options: dict[str, float]
) -> None:
    one = row(SamplingParams(max_tokens=8, **options), seed=seed)
    token = draw(torch.tensor(logits), one).token_id
    edge = {name: value for name, value in options.items() if name in ("top_p", "min_p")}
    looser = options | {"top_p": min(1.0, edge["top_p"] + 1e-5), "min_p": edge["min_p"] * (1 - 1e-5)}
    ties = {t for t, v in enumerate(logits) if v == logits[token]}
    assert ties & reference(logits, row(SamplingParams(max_tokens=8, **looser), seed=seed)).keys()


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert draw(torch.tensor([0.0, 3.0, 3.0, 1.0]), row(greedy)).token_id == 1
    assert draw(torch.tensor([5.0, 3.0, 3.0, 5.0]), row(greedy)).token_id == 0
    assert draw(torch.tensor([-torch.inf, -4.0, -torch.inf]), row(greedy)).token_id == 1


def test_greedy_with_penalties_is_the_largest_of_what_is_left() -> None:
    logits = torch.tensor([2.0, 1.8, -1.0])
    assert draw(logits, row(SamplingParams(temperature=0.0, repetition_penalty=2.0), seen=(0,))).token_id == 1
    assert (
        draw(logits, row(SamplingParams(temperature=0.0, presence_penalty=1.0), sampled=(0,))).token_id == 1
    )
    assert draw(logits, row(SamplingParams(temperature=0.0, presence_penalty=1.0), seen=(0,))).token_id == 0
    assert draw(logits, row(SamplingParams(temperature=0.0, logit_bias={2: 9.0}))).token_id == 2
    assert draw(logits, row(SamplingParams(temperature=0.0), banned=(0, 1))).token_id == 2


def test_a_seed_gives_the_same_tokens_and_another_seed_others() -> None:
    params = SamplingParams(temperature=1.0)
    logits = torch.randn(200, generator=torch.Generator().manual_seed(0))

    def tokens(seed: int) -> list[int]:
        one = row(params, seed=seed)
        return [draw(logits, one).token_id for _ in range(20)]

    assert tokens(5) == tokens(5)
    assert tokens(5) != tokens(6)


def test_a_row_never_depends_on_the_other_rows_of_the_batch() -> None:
    logits = torch.randn(9, 50, generator=torch.Generator().manual_seed(2))
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.9),
        SamplingParams(temperature=1.5, top_k=5, logprobs=3),
        SamplingParams(temperature=1.0, top_p=0.5),
        SamplingParams(temperature=0.7, min_p=0.2, presence_penalty=1.0),
        SamplingParams(temperature=0.0, logit_bias={3: 5.0}, logprobs=0),
        SamplingParams(temperature=2.0),
        SamplingParams(temperature=1.0, repetition_penalty=1.5),
        SamplingParams(temperature=1.0),
    ]

    def rows() -> list[SamplingRow]:
        return [row(p, seed=i, seen=(1, 2), sampled=(3,)) for i, p in enumerate(params)]

    alone = [draw(logits[i], one) for i, one in enumerate(rows())]
    assert sample(logits.clone(), rows()) == alone
    order = [8, 3, 0, 5, 1, 7, 2, 6, 4]
    shuffled = sample(logits[order].clone(), [rows()[i] for i in order])
    assert shuffled == [alone[i] for i in order]


def test_bad_rows_end_alone() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[1.0, 2.0], [1.0, nan], [nan, 1.0], [-inf, -inf], [inf, 0.0], [-inf, 0.5], [3.0, 2.0]]
    )
    greedy, warm = SamplingParams(temperature=0.0), SamplingParams(temperature=1.0)
    for params in (greedy, warm):
        results = sample(logits.clone(), [row(params, seed=i) for i in range(7)])
        failed = [isinstance(result, NonFiniteLogits) for result in results]
        assert failed == [False, True, True, True, True, False, False]
    assert results[5].token_id == 1


def test_banned_ids_are_never_drawn_even_when_likeliest() -> None:
    logits = torch.tensor([50.0, 1.0, 0.0, 40.0])
    one = row(SamplingParams(temperature=1.0), banned=(0, 3))
    assert {draw(logits, one).token_id for _ in range(100)} == {1, 2}


def test_a_row_whose_every_choice_is_banned_fails_and_does_not_crash() -> None:
    for temperature in (0.0, 1.0):
        one = row(SamplingParams(temperature=temperature), banned=(0, 1))
        (result,) = sample(torch.tensor([[1.0, 2.0]]), [one])
        assert isinstance(result, NonFiniteLogits)


def test_logprobs_are_the_models_distribution_before_penalties_and_temperature() -> None:
    logits = torch.tensor(LOGITS)
    params = SamplingParams(temperature=5.0, logprobs=8, presence_penalty=2.0, logit_bias={5: 50.0})
    found = draw(logits, row(params, sampled=(0,)))
    assert found.token_id == 5
    assert found.logprob is not None
    expected = torch.log_softmax(logits, -1).tolist()
    assert found.logprob.logprob == pytest.approx(expected[5], abs=1e-6)
    assert [token for token, _ in found.logprob.top] == sorted(range(8), key=lambda t: -LOGITS[t])
    assert sum(math.exp(value) for _, value in found.logprob.top) == pytest.approx(1.0, abs=1e-6)
    for token, value in found.logprob.top:
        assert value == pytest.approx(expected[token], abs=1e-6)


def test_logprobs_of_masked_ids_are_left_out() -> None:
    """A padded id has log-probability minus infinity, which no JSON can hold."""
    logits = torch.tensor([1.0, 2.0, -torch.inf, -torch.inf])
    found = draw(logits, row(SamplingParams(temperature=0.0, logprobs=4)))
    assert found.logprob is not None
    assert all(math.isfinite(value) for _, value in found.logprob.top)
    assert [token for token, _ in found.logprob.top] == [1, 0]


@pytest.mark.parametrize(("count", "expected"), [(None, None), (0, 0), (3, 3), (20, 8)])
def test_as_many_alternatives_as_asked_for(count: int | None, expected: int | None) -> None:
    found = draw(torch.tensor(LOGITS), row(SamplingParams(temperature=0.0, logprobs=count))).logprob
    assert (None if found is None else len(found.top)) == expected


def test_logits_are_left_as_they_were() -> None:
    logits = torch.tensor([LOGITS])
    before = logits.clone()
    sample(logits, [row(SamplingParams(temperature=1.0, presence_penalty=1.0), sampled=(1,), banned=(2,))])
    assert torch.equal(logits, before)


def test_extreme_logits_at_a_tiny_temperature_are_greedy() -> None:
    logits = torch.tensor([3e38, -3e38, 2.9e38])
    assert draw(logits, row(SamplingParams(temperature=1e-9))).token_id == 0
