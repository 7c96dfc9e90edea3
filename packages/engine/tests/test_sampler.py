"""The sampler against a reference in plain Python (sampler_reference.py): choices, distributions, independence."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dagengine.sampler import NonFiniteLogits, Sampled, Sampler, SamplingRow
from dagengine.sampling import SamplingParams
from dagengine.sampling_rows import CHUNK_ELEMENTS

from .sampler_reference import CPU, OPTIONS, choices, probabilities, row, sample

DRAWS = 12_000
VOCAB = 12


def draw(logits: Tensor, one: SamplingRow) -> Sampled:
    (result,) = sample(logits[None], [one])
    assert isinstance(result, Sampled)
    return result


def draws(logits: list[float], one: SamplingRow, count: int = DRAWS) -> Counter[int]:
    """Ids of `count` sequences with seeds of their own."""
    rows = [one._replace(seed=seed) for seed in range(count)]
    results = sample(torch.tensor(logits).expand(count, -1), rows)
    assert all(isinstance(result, Sampled) for result in results)
    return Counter(result.token_id for result in results)


def surprise(counts: Counter[int], expected: Mapping[int, float]) -> float:
    """How many standard deviations Pearson's chi-square lies above its mean; infinite if what cannot be was drawn."""
    if not counts.keys() <= expected.keys():
        return math.inf
    if len(expected) == 1:
        return 0.0
    total = sum(counts.values())
    square = sum((counts[t] - total * p) ** 2 / (total * p) for t, p in expected.items())
    freedom = len(expected) - 1
    return (square - freedom) / math.sqrt(2 * freedom)


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
    "min_p, then top_p of what is left": {"min_p": 0.35, "top_p": 0.7},
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
    one = row(params, seen=(0, 2, 3), sampled=(4, 4, 7), banned=banned)
    assert surprise(draws(LOGITS, one), probabilities(LOGITS, one)) < 6


@pytest.mark.parametrize(
    ("options", "wrong"),
    [
        ({"top_k": 3}, {"top_k": 4}),
        ({"top_k": 4}, {"top_k": 3}),
        ({"top_p": 0.6}, {"top_p": 0.75}),
        ({"min_p": 0.4}, {"min_p": 0.38}),
        ({"temperature": 1.0}, {"temperature": 1.15}),
        ({"frequency_penalty": 0.4}, {"frequency_penalty": 0.6}),
        ({"top_k": 3, "top_p": 0.75}, {"top_k": 3, "top_p": 0.85}),
    ],
)
def test_the_comparison_would_notice_a_token_more_or_less(
    options: dict[str, float], wrong: dict[str, float]
) -> None:
    one, other = (
        row(SamplingParams(max_tokens=8, **o), seen=(0, 2, 3), sampled=(4, 4, 7)) for o in (options, wrong)
    )
    expected = probabilities(LOGITS, other)
    if options == {"min_p": 0.4}:  # 1.05 is to 2 as 0.387 is to 1
        assert len(expected) == len(probabilities(LOGITS, one)) + 1
    assert surprise(draws(LOGITS, one), expected) > 12


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    return SamplingParams(
        max_tokens=8,
        temperature=draw(st.sampled_from([0.0, 1e-9, 0.05, 0.7, 1.0, 3.0, 100.0])),
        top_k=draw(st.sampled_from([0, 0, -1, 1, 2, 5, VOCAB - 1, VOCAB, VOCAB + 1])),
        top_p=draw(st.sampled_from([1.0, 1.0, 1e-9, 0.31, 0.62, 0.93, 0.99999])),
        min_p=draw(st.sampled_from([0.0, 0.0, 1e-9, 0.03, 0.33, 0.97, 1.0])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 0.7, 1.3])),
        presence_penalty=draw(st.sampled_from([0.0, 0.0, -0.9, 1.1])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.0, -0.3, 0.6])),
        logit_bias=draw(
            st.dictionaries(st.integers(0, VOCAB - 1), st.sampled_from([-100.0, 0.35, 9.0]), max_size=2)
        ),
        logprobs=draw(st.sampled_from([None, 0, 3])),
    )


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[list[float]], list[SamplingRow]]:
    """Logits on a coarse grid, so that there are ties, with padded ids; and what to do with them."""
    ids = st.integers(0, VOCAB - 1)
    level = st.one_of(st.integers(-24, 24).map(lambda i: i / 4), st.just(-math.inf))
    rows, logits = [], []
    for key in range(draw(st.integers(1, 5))):
        logits.append(draw(st.lists(level, min_size=VOCAB, max_size=VOCAB)))
        rows.append(
            row(
                draw(parameters()),
                seed=draw(st.integers(-(2**63), 2**63 - 1)),
                key=key,
                seen=draw(st.lists(ids, max_size=5)),
                sampled=draw(st.lists(ids, max_size=5)),
                banned=draw(st.one_of(st.just(()), st.lists(ids, max_size=3), st.just(tuple(range(VOCAB))))),
            )
        )
    return logits, rows


@settings(max_examples=400, deadline=None)
@given(batch=batches(), dtype=st.sampled_from([torch.float32, torch.float64]), padding=st.integers(0, 3))
def test_every_choice_is_that_of_the_reference(
    batch: tuple[list[list[float]], list[SamplingRow]], dtype: torch.dtype, padding: int
) -> None:
    logits, rows = batch
    table = torch.tensor(logits, dtype=dtype)
    padded = torch.cat([table, torch.full((len(rows), padding), 99.0, dtype=dtype)], dim=1)
    pending = Sampler(CPU, VOCAB).launch(padded, rows)
    for result, token, values, one in zip(pending.results(), pending.ids.tolist(), logits, rows, strict=True):
        right = choices(values, one, error=2e-5)
        if not right:
            assert isinstance(result, NonFiniteLogits) and token == 0
        else:
            assert isinstance(result, Sampled) and result.token_id == token
            assert token in right


@pytest.mark.parametrize("options", [{"top_k": 1}, {}], ids=["top_k", "cold"])
def test_scores_that_only_rounding_tells_apart_are_right_either_way(options: dict[str, int]) -> None:
    """-4.0 and -3.5 penalised, the first one less, and raised to the other: -4.55 both, but for the last bits."""
    params = SamplingParams(
        temperature=1e-9,
        repetition_penalty=1.3,
        frequency_penalty=-0.3,
        logit_bias={1: 0.35},
        **options,  # type: ignore[arg-type]
    )
    logits = [-math.inf, -4.0, -3.5, -9.0]
    for seed in range(20):
        one = row(params, seed=seed, seen=(1, 2), sampled=(1,))
        right = choices(logits, one, error=2e-5)
        assert right == {1, 2} if options else right <= {1, 2}
        for dtype in (torch.float32, torch.float64):
            assert draw(torch.tensor(logits, dtype=dtype), one).token_id in right


def test_the_reference_mostly_leaves_one_choice() -> None:
    logits = torch.randn(200, VOCAB, generator=torch.Generator().manual_seed(1)).tolist()
    params = SamplingParams(top_k=8, top_p=0.9, min_p=0.05)
    sizes = [len(choices(values, row(params, seed=i), error=2e-5)) for i, values in enumerate(logits)]
    assert sizes.count(1) >= 198


@pytest.mark.parametrize("few", [2, 1000], ids=["sorted", "selected"])
@pytest.mark.parametrize("spread", [0.3, 8.0])
def test_top_p_of_a_large_vocabulary(few: int, spread: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the vocabulary was sorted or not."""
    monkeypatch.setattr("dagengine.sampler.FEW", few)
    logits = torch.randn(6, 1500, generator=torch.Generator().manual_seed(4)) * spread
    rows = [
        row(SamplingParams(top_p=0.9, min_p=m), seed=i, key=i)
        for i, m in enumerate((0, 0, 0, 0.01, 0.1, 0.5))
    ]
    results = sample(logits, rows)
    for result, values, one in zip(results, logits.tolist(), rows, strict=True):
        assert isinstance(result, Sampled)
        assert result.token_id in choices(values, one, error=1e-6)


def test_greedy_takes_the_largest_and_the_lowest_id_on_ties() -> None:
    greedy = SamplingParams(temperature=0.0)
    assert draw(torch.tensor([0.0, 3.0, 3.0, 1.0]), row(greedy)).token_id == 1
    assert draw(torch.tensor([5.0, 3.0, 3.0, 5.0]), row(greedy)).token_id == 0
    assert draw(torch.tensor([-torch.inf, -4.0, -torch.inf]), row(greedy)).token_id == 1


def test_of_equal_tokens_the_filters_keep_the_lowest_ids() -> None:
    logits = [1.0, 0.0, -0.0, 1.0, 0.0, 0.0, 1.0, -0.0]
    for options, expected in (
        ({"top_k": 2}, {0, 3}),
        ({"top_k": 5}, {0, 3, 6, 1, 2}),
        ({"top_p": 0.2}, {0}),
        ({"top_p": 0.5}, {0, 3, 6}),
        ({"top_p": 0.65}, {0, 3, 6, 1}),
        ({"min_p": 1.0}, {0, 3, 6}),
    ):
        one = row(SamplingParams(max_tokens=8, **options))
        assert draws(logits, one, 500).keys() == expected == probabilities(logits, one).keys()


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
        return [draw(logits, row(params, seed=seed, step=step)).token_id for step in range(20)]

    assert tokens(5) == tokens(5) == tokens(5 + 2**64)
    assert len({tuple(tokens(seed)) for seed in range(20)}) == 20
    assert len(set(tokens(5))) > 10


@pytest.mark.parametrize("chunk", [1, 150, 1 << 16])
def test_a_row_never_depends_on_the_other_rows_of_the_batch(
    chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(2)).mul(2).round().div(2)
    rows = [row(p, seed=i, seen=(1, 2), sampled=(3,)) for i, p in enumerate(OPTIONS)]
    alone = [draw(logits[i], one) for i, one in enumerate(rows)]
    monkeypatch.setitem(CHUNK_ELEMENTS, "cpu", chunk)
    assert sample(logits, rows) == alone
    order = [8, 3, 0, 5, 10, 1, 7, 9, 2, 6, 4]
    assert sample(logits[order], [rows[i] for i in order]) == [alone[i] for i in order]
    twice = sample(logits.repeat(3, 1), rows * 3)
    assert twice == alone * 3


def test_a_row_does_not_depend_on_the_ids_past_the_vocabulary() -> None:
    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(2))
    rows = [row(p, seed=i, seen=(1, 2, 55), sampled=(3, 51), banned=(4, 52)) for i, p in enumerate(OPTIONS)]
    rows[5] = rows[5]._replace(params=replace(OPTIONS[5], logit_bias={3: 5.0, 53: 100.0}))
    for filler in (1e9, float("nan"), -torch.inf):
        wide = torch.cat([logits, torch.full((11, 6), filler)], dim=1)
        assert sample(wide, rows, vocab_size=50) == sample(logits, rows)


def test_bad_rows_end_alone() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor(
        [[1.0, 2.0], [1.0, nan], [nan, 1.0], [-inf, -inf], [inf, 0.0], [-inf, 0.5], [3.0, 2.0]]
    )
    for params in (
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(top_k=1),
        SamplingParams(top_k=1, top_p=0.5, logprobs=2),
        SamplingParams(top_p=0.5, min_p=0.1),
        SamplingParams(temperature=0.0, repetition_penalty=1.5, logprobs=1),
    ):
        rows = [row(params, seed=i, key=i, seen=(0, 1)) for i in range(7)]
        pending = Sampler(CPU, 2).launch(logits, rows)
        results = pending.results()
        failed = [isinstance(result, NonFiniteLogits) for result in results]
        assert failed == [False, True, True, True, True, False, False]
        assert [result.row for result in results if isinstance(result, NonFiniteLogits)] == [1, 2, 3, 4]
        assert pending.ids[1:5].tolist() == [0, 0, 0, 0]
        assert results[5].token_id == 1


def test_banned_ids_are_never_drawn_even_when_likeliest() -> None:
    one = row(SamplingParams(temperature=1.0), banned=(0, 3))
    assert draws([50.0, 1.0, 0.0, 40.0], one, 200).keys() == {1, 2}


def test_a_row_whose_every_choice_is_banned_fails_and_does_not_crash() -> None:
    for options in ({"temperature": 0.0}, {}, {"top_k": 1}, {"top_p": 0.5}, {"min_p": 0.5}):
        one = row(SamplingParams(**options), banned=(0, 1))
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


def test_logprobs_of_a_flat_distribution_over_a_large_vocabulary() -> None:
    found = draw(torch.zeros(200_000), row(SamplingParams(temperature=0.0, logprobs=2))).logprob
    assert found is not None
    assert found.logprob == pytest.approx(-math.log(200_000), abs=1e-6)
    assert found.top == ((0, found.logprob), (1, found.logprob))


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
    logits = torch.randn(11, 50, generator=torch.Generator().manual_seed(2))
    before = logits.clone()
    sample(logits, [row(p, seed=i, seen=(1, 2), sampled=(3,), banned=(2,)) for i, p in enumerate(OPTIONS)])
    assert torch.equal(logits, before)


def test_extreme_logits_at_a_tiny_temperature_are_greedy() -> None:
    logits = torch.tensor([3e38, -3e38, 2.9e38])
    for options in ({}, {"top_k": 2}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert draw(logits, row(SamplingParams(temperature=1e-9, **options))).token_id == 0


def test_a_huge_temperature_is_nearly_uniform() -> None:
    one = row(SamplingParams(temperature=100.0))
    assert surprise(draws(LOGITS, one), probabilities(LOGITS, one)) < 6
    assert min(probabilities(LOGITS, one).values()) > 0.11


def test_no_rows_are_no_results() -> None:
    assert sample(torch.empty(0, 5), []) == []


@pytest.mark.parametrize("vocab_size", [0, 2**21])
def test_a_vocabulary_that_masses_cannot_hold_is_refused(vocab_size: int) -> None:
    with pytest.raises(ValueError, match="vocab_size"):
        Sampler(CPU, vocab_size)
