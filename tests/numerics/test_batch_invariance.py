"""The needle test of `batch_invariant`: a request's tokens and logits have the same bits in any company.

Company shares what the needle reads, samples, joins late and is preempted; steps, pools and orders change; states are
evicted and computed again. Without the mode the same runs differ in bits.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from dagengine.errors import DagError
from dagengine.request import Choice, ContextRef, FinishedEvent, Request
from dagengine_kernels.linear import PackedLinear

from .driver import Driver, request

PAGE_SIZE = 16
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
    "attention_bias": False,
}
PLACES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(PackedLinear.unavailable() is not None, reason="no compiled kernels")
    ),
    pytest.param(
        "cuda",
        marks=[
            pytest.mark.gpu,
            pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
        ],
    ),
]
Answer = dict[str, tuple[tuple[int, ...], dict[int, Tensor]]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("needle")
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def engine(folder: Path, device: str, **options: Any) -> Driver:
    settings = {
        "load_format": "dummy",
        "seed": 3,
        "dtype": "bfloat16",
        "page_size": PAGE_SIZE,
        "kv_pages": 800,
    }
    return Driver(folder, device=device, **settings | options)


def ids(seed: int, count: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(320) for _ in range(count)]


FIRST, SECOND, QUESTION, PLAIN = ids(1, 150), ids(2, 75), ids(3, 21), ids(4, 130)
SAMPLED = 12


def needles(states: list[str]) -> list[Request]:
    """One that reads two states, and one that reads nothing."""
    context = [ContextRef(state=state) for state in states]
    return [
        request("needle", QUESTION, SAMPLED, context=context, keep=False),
        request("plain", PLAIN, SAMPLED, keep=False),
    ]


def company(rng: random.Random, states: list[str], number: int) -> list[Request]:
    made = []
    for i in range(rng.choice((0, 1, 5, 20))):
        shared = [ContextRef(state=state) for state in rng.sample(states, rng.randrange(len(states) + 1))]
        prompt = ids(1000 * number + i, rng.choice((1, 9, 40, 160)))
        made.append(
            request(f"company-{number}-{i}", prompt, rng.choice((1, 6, 20)), context=shared, keep=False)
        )
    return made


def finished(driver: Driver, wanted: set[str]) -> dict[str, FinishedEvent]:
    ended = {}
    while wanted - ended.keys():
        for event in driver.core.step():
            if isinstance(event, FinishedEvent):
                ended[event.request_id] = event
    return ended


def answer(driver: Driver, rng: random.Random | None, number: int) -> Answer:
    """What the needles sample and the logits that it is sampled from; without rng they are alone, one by one."""
    driver.logits.clear()
    states = []
    for name, tokens in (("first", FIRST), ("second", SECOND)):
        kept = driver.choice(request(f"{name}-{number}", tokens))
        assert kept.dag.state is not None
        states.append(kept.dag.state)
    asked = needles(states)
    if rng is None:
        choices = [driver.choice(one) for one in asked]
    else:
        if rng.random() < 0.3:
            driver.evict_all()
        early, late = company(rng, states, 2 * number + 1), company(rng, states, 2 * number + 2)
        together = [*asked, *early]
        rng.shuffle(together)
        steps = rng.randrange(6)
        driver.core.submit_group(together)
        ended: dict[str, FinishedEvent] = {}
        for _ in range(steps):
            for event in driver.core.step():
                if isinstance(event, FinishedEvent):
                    ended[event.request_id] = event
        driver.core.submit_group(late)
        ended |= finished(driver, {one.id for one in (*together, *late)} - ended.keys())
        for event in ended.values():
            assert event.error is None
        choices = [ended[one.id].choices[0] for one in asked]
    for choice in choices:
        assert isinstance(choice, Choice)
    return {
        one.id: (choice.token_ids, dict(driver.logits[one.id]))
        for one, choice in zip(asked, choices, strict=True)
    }


def same_bits(one: Answer, other: Answer) -> bool:
    return all(
        one[name][0] == other[name][0]
        and one[name][1].keys() == other[name][1].keys()
        and all(torch.equal(one[name][1][offset], other[name][1][offset]) for offset in one[name][1])
        for name in ("needle", "plain")
    )


def trials(folder: Path, device: str, batch_invariant: bool, count: int) -> tuple[Answer, list[Answer], int]:
    """The needles alone, in `count` engines with company, twice in each; and how often anything was preempted."""
    alone = answer(engine(folder, device, batch_invariant=batch_invariant), None, 0)
    found, preempted = [], 0
    for seed in range(count):
        rng = random.Random(seed)
        options: dict[str, Any] = {
            "max_num_batched_tokens": rng.choice((24, 64, 100, 512)),
            "max_num_seqs": rng.choice((3, 8, 24)),
            "kv_pages": rng.choice((40, 60, 800)),
            "overlap": rng.choice((False, True)),
            "enforce_eager": rng.choice((False, True)),
        }
        driver = engine(folder, device, batch_invariant=batch_invariant, **options)
        for number in range(2):
            found.append(answer(driver, rng, number))
        preempted += driver.core.num_preemptions
        driver.release_all()
    return alone, found, preempted


@pytest.mark.parametrize("device", PLACES)
def test_a_request_has_the_same_bits_in_any_batch(folder: Path, device: str) -> None:
    alone, found, preempted = trials(folder, device, True, 60 if device == "cpu" else 16)
    assert preempted > 0
    for number, one in enumerate(found):
        assert same_bits(one, alone), number


@pytest.mark.parametrize("device", PLACES)
def test_without_the_mode_some_batch_changes_bits(folder: Path, device: str) -> None:
    alone, found, _ = trials(folder, device, False, 8)
    assert not all(same_bits(one, alone) for one in found)


@pytest.mark.parametrize("device", PLACES)
def test_pages_that_were_computed_at_another_position_are_not_taken(folder: Path, device: str) -> None:
    """They would give the same attention in other bits; those of the same place are taken."""
    fragment = ids(9, 50)

    def reused(driver: Driver, name: str, own_start: int) -> int:
        options = {"own_start": own_start}
        found = driver.choice(request(name, fragment, 2, position="explicit", options=options, keep=False))
        return found.dag.reused

    driver = engine(folder, device, batch_invariant=True)
    assert [reused(driver, name, at) for name, at in (("a", 3), ("b", 500), ("c", 3))] == [0, 0, 48]
    assert reused(driver, "d", 500) == 48


@pytest.mark.parametrize("device", PLACES)
def test_an_answer_says_whether_the_mode_was_on(folder: Path, device: str) -> None:
    for on in (False, True):
        found = engine(folder, device, batch_invariant=on).choice(request("a", PLAIN, 1, keep=False))
        assert found.dag.record["batch_invariant"] is on


def test_what_cannot_be_promised_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(DagError) as refused:
        engine(folder, "cpu", batch_invariant=True, dtype="float32")
    assert (refused.value.code, refused.value.field) == ("unsupported", "batch_invariant")
    assert "bfloat16" in refused.value.message
    if PackedLinear.unavailable() is not None:
        return
    with pytest.raises(DagError) as refused:
        engine(folder, "cpu", batch_invariant=True, attention_backend="segmented")
    assert refused.value.code == "capability_missing"
    assert "segmented" in refused.value.message
    driver = engine(folder, "cpu", batch_invariant=True)
    with pytest.raises(DagError) as refused:
        driver.core.submit_group([request("a", PLAIN, 1, backend="packed", keep=False)])
    assert refused.value.field == "backend"
    assert "packed" in refused.value.message


@pytest.mark.parametrize("own", [1, 21])
@pytest.mark.parametrize("lengths", [(1,), (1, 1), (17, 30), (40, 150, 200)])
@pytest.mark.parametrize("device", PLACES)
def test_who_runs_in_the_step_of_what_it_reads_has_the_same_bits(
    folder: Path, device: str, lengths: tuple[int, ...], own: int
) -> None:
    """As over states that were computed before. Several times, since later ones are replayed."""
    apart, together = (engine(folder, device, batch_invariant=True) for _ in range(2))
    for number in range(4):
        inputs = [ids(100 * number + i, length) for i, length in enumerate(lengths)]
        question = ids(100 * number + 99, own)
        documents = [request(f"{number}.{i}", tokens) for i, tokens in enumerate(inputs)]
        states = [apart.choice(document).dag.state for document in documents]
        context = [ContextRef(state=state) for state in states]
        judge = f"judge-{number}"
        found = apart.choice(request(judge, question, 3, context=context, keep=False))
        before = together.core.stats.steps
        context = [ContextRef(request=document.id) for document in documents]
        *_, ended = together.run(*documents, request(judge, question, 3, context=context, keep=False))
        assert ended.error is None and ended.choices[0].token_ids == found.token_ids
        assert together.core.stats.steps == before + 3
        bits, expected = (driver.logits.pop(judge) for driver in (together, apart))
        assert bits.keys() == expected.keys()
        assert all(torch.equal(bits[offset], expected[offset]) for offset in bits)
