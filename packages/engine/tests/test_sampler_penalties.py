"""Counts that live on the device: ids the host has not heard of count, and steps that are run again count once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagengine.penalties import PenaltyCounts
from dagengine.sampler import Sampled, Sampler
from dagengine.sampling import SamplingParams

from .sampler_reference import CPU, choices, row, sample

VOCAB = 10
PENALISED = SamplingParams(
    temperature=0.0, repetition_penalty=1.3, presence_penalty=0.25, frequency_penalty=0.5, logprobs=1
)


def logits_of(key: int, step: int) -> torch.Tensor:
    return torch.randn(VOCAB, generator=torch.Generator().manual_seed(1000 * key + step)) * 0.5


def test_the_host_may_lag_behind() -> None:
    """No launch after the first knows an id of its own; the choices are those of a sampler that knows them all."""
    sampler, sampled = Sampler(CPU, VOCAB), []
    for step in range(30):
        one = row(PENALISED, key=7, step=step, seen=(1, 2))
        (got,) = sampler.launch(logits_of(0, step)[None], [one]).results()
        known = one._replace(sampled=tuple(sampled))
        assert [got] == sample(logits_of(0, step)[None], [known])
        assert isinstance(got, Sampled)
        assert got.token_id in choices(logits_of(0, step).tolist(), known, error=1e-5)
        sampled.append(got.token_id)
    assert len(set(sampled)) > 5  # without penalties a token or two win throughout
    assert max(sampled.count(t) for t in range(VOCAB)) > 1


@settings(max_examples=120, deadline=None)
@given(data=st.data())
def test_sequences_come_lag_repeat_and_go(data: st.DataObject) -> None:
    """Several sequences in one sampler, in random batches, with steps run again: each as if it were alone."""
    sampler = Sampler(CPU, VOCAB)
    params = [
        PENALISED,
        SamplingParams(temperature=0.0, frequency_penalty=1.0),
        SamplingParams(temperature=1.0, repetition_penalty=0.5, top_k=4),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=0.8, presence_penalty=-0.7),
        SamplingParams(temperature=0.7),
    ]
    live: dict[int, list[int]] = {}
    fresh = 0
    for _ in range(data.draw(st.integers(1, 12))):
        for key in data.draw(st.sets(st.sampled_from(sorted(live)))) if live else ():
            match data.draw(st.sampled_from(["end", "roll back", "again", "forget"])):
                case "end":
                    sampler.forget(key)
                    del live[key]
                case "roll back":
                    sampler.forget(key)
                    del live[key][len(live[key]) // 2 :]
                case "again":
                    del live[key][-1:]
                case "forget":
                    sampler.forget(key)
        for _ in range(data.draw(st.integers(0, 3))):
            live[fresh] = []
            fresh += 1
        keys = data.draw(st.permutations(sorted(live)))[:4]
        rows = [
            row(params[key % 6], seed=key, key=key, seen=(key % VOCAB, 3), sampled=tuple(live[key]))
            for key in keys
        ]
        if not rows:
            continue
        logits = torch.stack([logits_of(one.key, one.step) for one in rows])
        got = sampler.launch(logits, rows).results()
        assert got == sample(logits, rows)
        for key, result in zip(keys, got, strict=True):
            assert isinstance(result, Sampled)
            live[key].append(result.token_id)


def test_memory_is_for_live_sequences_with_penalties() -> None:
    sampler = Sampler(CPU, VOCAB)
    counts = sampler._counts
    plain = [row(SamplingParams(temperature=1.0), key=key) for key in range(9)]
    sampler.launch(torch.zeros(9, VOCAB), plain)
    assert counts.nbytes == 0
    for round_ in range(20):
        rows = [row(PENALISED, key=10 * round_ + i) for i in range(9)]
        sampler.launch(torch.zeros(9, VOCAB), rows)
        assert counts.nbytes == 16 * VOCAB * 4
        for one in rows[1:]:
            sampler.forget(one.key)
        sampler.forget(10 * (round_ - 1))
    assert counts.nbytes == 16 * VOCAB * 4
    sampler.forget(190)
    sampler.forget(12345)
    assert counts.nbytes == 0


def test_a_slot_is_clean_for_its_next_sequence() -> None:
    sampler = Sampler(CPU, VOCAB)
    sampler.launch(torch.zeros(1, VOCAB), [row(PENALISED, key=1, seen=range(VOCAB), sampled=(0, 0, 5))])
    sampler.launch(torch.zeros(1, VOCAB), [row(PENALISED, key=2)])
    sampler.forget(1)
    one = row(PENALISED, key=3, sampled=(4,))
    assert sampler.launch(logits_of(1, 1)[None], [one]).results() == sample(logits_of(1, 1)[None], [one])


def test_ids_the_counts_need_cannot_be_missing() -> None:
    with pytest.raises(AssertionError, match="lacks ids"):
        Sampler(CPU, VOCAB).launch(torch.zeros(1, VOCAB), [row(PENALISED, key=1, step=2, sampled=(3,))])


def test_neutral_penalties_leave_every_bit() -> None:
    """A row without one of the penalties may share a pass with rows that have it."""
    counts = PenaltyCounts(CPU, VOCAB)
    slots = torch.tensor(counts.slots([row(PENALISED, key=1, seen=range(VOCAB), sampled=(1, 1, 2))]))
    values = [-torch.inf, -3e38, -0.1, -1e-40, -0.0, 0.0, 1e-40, 0.1, 3e38, 1.0]
    scores = torch.tensor([values])
    one, zero = torch.ones(1, 1), torch.zeros(1, 1)
    counts.repeat(scores, slots, one)
    counts.subtract(scores, slots, zero, zero)
    assert torch.equal(scores, torch.tensor([values]))
