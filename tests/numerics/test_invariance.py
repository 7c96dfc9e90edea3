"""What must not change an answer: pages, chunks, company, memory, caches, the order of references."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import on_gpu
from torch import Tensor

from dagengine.request import ContextRef, Request
from dagengine.sampling import SamplingParams

from .driver import Driver, request, save_tiny_llama
from .graphs import Node, inherits_only, pages_needed, random_plan, run_at_once, run_by_state

BAR = 1e-4
PAGE_SIZE = 4
PLANS = [random_plan(300 + seed, size=8, longest=30) for seed in range(4)]

Place = dict[str, Any]
Logits = dict[str, dict[int, Tensor]]
Answer = tuple[dict[str, tuple[int, ...]], Logits]


@pytest.fixture(
    scope="module",
    params=[
        pytest.param({"device": "cpu"}, id="cpu"),
        *(
            on_gpu({"device": "cuda", "attention_backend": backend}, id=f"cuda-{backend}")
            for backend in ("reference", "packed", "segmented")
        ),
    ],
)
def place(request: pytest.FixtureRequest) -> Place:
    """Where an engine runs, and with which attention."""
    return dict(request.param)


@pytest.fixture(scope="module")
def answers(tiny_folder: Path, place: Place) -> list[Answer]:
    """Every plan, each request by itself in one piece, with room for everything."""
    found = []
    for plan in PLANS:
        driver = Driver(tiny_folder, **place, page_size=PAGE_SIZE, kv_pages=1000)
        found.append((run_by_state(driver, plan), driver.logits))
    return found


def assert_same(tokens: dict[str, tuple[int, ...]], logits: Logits, answer: Answer) -> None:
    assert tokens == answer[0]
    for name, by_offset in answer[1].items():
        assert logits[name].keys() == by_offset.keys()
        for offset, expected in by_offset.items():
            assert float((logits[name][offset] - expected).abs().max()) <= BAR


def without_company(logits: Logits) -> Logits:
    return {name: by_offset for name, by_offset in logits.items() if not name.startswith("company")}


@pytest.mark.parametrize(
    "options",
    [
        {"page_size": 1},
        {"page_size": 3},
        {"page_size": 64},
        {"max_num_batched_tokens": 1},
        {"max_num_batched_tokens": 2},
        {"max_num_batched_tokens": 7},
        {"max_num_batched_tokens": 7, "page_size": 3},
        {"max_num_seqs": 1},
        {"overlap": True},
        {"overlap": True, "max_num_batched_tokens": 7, "page_size": 3},
    ],
    ids=lambda options: "-".join(f"{name}={value}" for name, value in options.items()),
)
@pytest.mark.parametrize("run", [run_by_state, run_at_once])
def test_pages_and_chunks(
    tiny_folder: Path, answers: list[Answer], run: Callable[..., Any], options: dict[str, int], place: Place
) -> None:
    for plan, answer in zip(PLANS, answers, strict=True):
        driver = Driver(tiny_folder, **place, **({"page_size": PAGE_SIZE, "kv_pages": 1000} | options))
        assert_same(run(driver, plan), driver.logits, answer)
        driver.release_all()


@pytest.mark.parametrize("release", [True, False])
@pytest.mark.parametrize(
    "options",
    [{}, {"max_num_batched_tokens": 5}, {"page_size": 3}, {"max_num_batched_tokens": 5, "overlap": True}],
)
def test_eviction_of_everything_between_requests(
    tiny_folder: Path, answers: list[Answer], release: bool, options: dict[str, int], place: Place
) -> None:
    restored = 0
    for plan, answer in zip(PLANS, answers, strict=True):
        driver = Driver(tiny_folder, **place, **({"page_size": PAGE_SIZE, "kv_pages": 1000} | options))
        driver.check_every_step = True
        tokens = run_by_state(driver, plan, between=Driver.evict_all, release=release)
        assert_same(tokens, driver.logits, answer)
        restored += driver.core.stats.restored_tokens
        driver.release_all()
    assert restored > 0


def test_a_digested_source_that_was_released_and_evicted_is_computed_again(
    tiny_folder: Path, place: Place
) -> None:
    def answer(evict: bool) -> tuple[tuple[int, ...], Tensor, int]:
        driver = Driver(tiny_folder, **place, page_size=PAGE_SIZE, kv_pages=200)
        source = driver.choice(request("source", range(20, 41))).dag.state
        middle = driver.choice(request("middle", range(5), context=[ContextRef(state=source)])).dag.state
        digest = driver.choice(
            request("digest", [50, 51, 52], 3, context=[ContextRef(state=middle, mode="digest")])
        ).dag.state
        driver.core.release_state(source)
        driver.core.release_state(middle)
        if evict:
            assert driver.evict_all() > 0
        choice = driver.choice(request("reader", [60, 61], 6, context=[ContextRef(state=digest)]))
        assert choice.dag.visible == 6
        return choice.token_ids, driver.logits["reader"][1], driver.core.stats.restored_tokens

    kept, again = answer(False), answer(True)
    assert kept[0] == again[0]
    assert float((kept[1] - again[1]).abs().max()) <= BAR
    assert kept[2] == 0
    assert again[2] == 21 + 5 + 6


def test_evicted_pages_that_are_still_there_are_not_counted_as_computed(
    tiny_folder: Path, place: Place
) -> None:
    driver = Driver(tiny_folder, **place, page_size=PAGE_SIZE, kv_pages=100)
    state = driver.choice(request("source", range(20, 41))).dag.state
    node, _ = driver.core.store.resolve(state)
    assert driver.core.store.evict(node) == 6
    choice = driver.choice(request("reader", [60, 61], 6, context=[ContextRef(state=state)]))
    assert (choice.dag.reused, choice.dag.computed) == (21, 2)
    driver.evict_all()
    choice = driver.choice(request("again", [60, 61], 6, context=[ContextRef(state=state)]))
    assert (choice.dag.reused, choice.dag.computed) == (0, 23)


@pytest.mark.parametrize(("page_size", "overlap"), [(1, False), (4, False), (4, True)])
@pytest.mark.parametrize("run", [run_by_state, run_at_once])
def test_a_pool_that_just_fits_the_largest_request_and_its_ancestors(
    tiny_folder: Path,
    answers: list[Answer],
    run: Callable[..., Any],
    page_size: int,
    overlap: bool,
    place: Place,
) -> None:
    chains = [inherits_only(plan) for plan in PLANS]
    roomy = Driver(tiny_folder, **place, page_size=PAGE_SIZE, kv_pages=4000)
    found = []
    for plan in chains:
        found.append((run_by_state(roomy, plan), dict(roomy.logits)))
        roomy.logits.clear()
    for plan, answer in zip([*PLANS, *chains], [*answers, *found], strict=True):
        pages = pages_needed(plan, page_size)
        options = {"page_size": page_size, "kv_pages": pages, "max_num_batched_tokens": 11}
        driver = Driver(tiny_folder, **place, overlap=overlap, **options)
        driver.check_every_step = True
        assert_same(run(driver, plan), driver.logits, answer)
        driver.release_all()


@pytest.mark.parametrize("overlap", [False, True])
def test_preemption_by_a_tiny_pool(tiny_folder: Path, overlap: bool, place: Place) -> None:
    rng = random.Random(5)
    prompts = [[rng.randrange(101) for _ in range(rng.randint(1, 12))] for _ in range(6)]
    requests = [request(f"r{i}", prompt, 12, keep=False) for i, prompt in enumerate(prompts)]
    roomy = Driver(tiny_folder, **place, page_size=2, kv_pages=400)
    tight = Driver(tiny_folder, **place, page_size=2, kv_pages=16, overlap=overlap)
    tight.check_every_step = True
    expected = [event.choices[0].token_ids for event in roomy.run(*requests)]
    assert [event.choices[0].token_ids for event in tight.run(*requests)] == expected
    assert roomy.core.num_preemptions == 0
    assert tight.core.num_preemptions > 3
    tight.release_all()


def company(count: int, seed: int) -> list[Request]:
    """Other requests, some sampled, of very different lengths."""
    rng = random.Random(seed)
    return [
        Request(
            id=f"company{i}",
            input_ids=tuple(rng.randrange(101) for _ in range(rng.choice((1, 3, 60)))),
            sampling=SamplingParams(
                max_tokens=rng.randint(1, 25), temperature=i % 2 * 1.0, seed=i, ignore_eos=True
            ),
        )
        for i in range(count)
    ]


@pytest.mark.parametrize(("count", "overlap"), [(3, False), (20, False), (20, True)])
def test_other_requests_in_the_batch(
    tiny_folder: Path, answers: list[Answer], count: int, overlap: bool, place: Place
) -> None:
    for plan, answer in zip(PLANS, answers, strict=True):
        options = {"page_size": PAGE_SIZE, "kv_pages": 2000, "max_num_batched_tokens": 64}
        driver = Driver(tiny_folder, **place, overlap=overlap, **options)
        before, after = company(count, 1), company(2 * count, 2)[count:]
        driver.core.submit_group(before)
        tokens = run_at_once(driver, plan, after)
        assert_same(tokens, without_company(driver.logits), answer)
        driver.release_all()


def test_cache_hits(tiny_folder: Path, answers: list[Answer], place: Place) -> None:
    """Each plan three times in one engine: the second and third find earlier pages."""
    driver = Driver(tiny_folder, **place, page_size=PAGE_SIZE, kv_pages=4000)
    for plan, answer in zip(PLANS, answers, strict=True):
        for run in (run_by_state, run_at_once, run_by_state):
            driver.logits.clear()
            before = driver.core.store.stats().tokens_reused
            assert_same(run(driver, plan), driver.logits, answer)
        assert driver.core.store.stats().tokens_reused > before
    driver.release_all()


def test_pages_computed_at_another_position(tiny_folder: Path, place: Place) -> None:
    """A fragment's pages serve an equal fragment whose own start differs; what it samples must not."""
    fragment = list(range(30, 47))

    def answer(driver: Driver, name: str, own_start: int) -> tuple[tuple[int, ...], int]:
        choice = driver.choice(
            request(name, fragment, 5, position="explicit", options={"own_start": own_start}, keep=False)
        )
        return choice.token_ids, choice.dag.reused

    cold, warm = (Driver(tiny_folder, **place, page_size=PAGE_SIZE, kv_pages=100) for _ in range(2))
    expected, none = answer(cold, "cold", 500)
    assert none == 0
    driver_first, _ = answer(warm, "first", 3)
    found, reused = answer(warm, "second", 500)
    assert reused == 16
    assert found == expected == driver_first
    worst = max(
        float((warm.logits["second"][offset] - logits).abs().max())
        for offset, logits in cold.logits["cold"].items()
    )
    assert worst <= BAR


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 0, 3, 1), (3, 2, 1, 0)])
def test_shuffled_references_under_native(tiny_folder: Path, order: tuple[int, ...], place: Place) -> None:
    """`native` numbers nothing by the order of references. (`linear` does, and its logits say so.)"""
    driver = Driver(tiny_folder, **place, page_size=3, kv_pages=200)
    root = driver.choice(request("root", [1, 2, 3, 4])).dag.state
    refs = []
    for i in range(4):
        context = [ContextRef(state=root)] if i % 2 else []
        node = request(f"branch{i}", range(20 * i, 20 * i + 5 + i), 3, context=context, position="native")
        refs.append(ContextRef(state=driver.choice(node).dag.state))

    def ask(name: str, chosen: list[ContextRef], position: str) -> tuple[tuple[int, ...], Tensor]:
        choice = driver.choice(request(name, [90, 91, 92], 12, context=chosen, position=position, keep=False))
        return choice.token_ids, driver.logits[name][2]

    shuffled = [refs[i] for i in order]
    given, other = ask("given", refs, "native"), ask("shuffled", shuffled, "native")
    assert given[0] == other[0]
    assert float((given[1] - other[1]).abs().max()) <= BAR
    if order != (0, 1, 2, 3):
        straight, turned = ask("straight", refs, "linear"), ask("turned", shuffled, "linear")
        assert float((straight[1] - turned[1]).abs().max()) > 10 * BAR


def test_32_readers_of_a_long_state_hold_one_copy_and_their_own_tails(tmp_path: Path, place: Place) -> None:
    num_tokens, page_size, readers, tail = 4096, 16, 32, 9
    save_tiny_llama(tmp_path, seed=4, max_position_embeddings=8192)
    driver = Driver(tmp_path, **place, page_size=page_size, kv_pages=600, max_num_batched_tokens=1024)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 101, (num_tokens,), generator=generator).tolist()
    state = driver.choice(request("document", text)).dag.state
    pages = num_tokens // page_size
    assert driver.core.store.stats().pages_live == pages
    driver.core.submit_group(
        [
            request(f"reader{i}", [i, i + 1, i + 2], tail - 3, context=[ContextRef(state=state)])
            for i in range(readers)
        ]
    )
    while driver.core.has_work:
        driver.core.step()
        stats = driver.core.store.stats()
        assert stats.pages_live <= pages + readers
    assert driver.core.stats.last_batch == readers
    stats = driver.core.store.stats()
    assert stats.states == readers + 1
    assert stats.pages_live == pages + readers * -(-tail // page_size)
    driver.release_all()


def test_plans_hold_what_they_are_meant_to_hold() -> None:
    nodes: list[Node] = [node for plan in PLANS for node in plan]
    assert {ref.mode for node in nodes for ref in node.refs} == {"inherit", "digest", "artifact"}
    assert {node.policy for node in nodes} == {"linear", "native", "explicit"}
    assert any(ref.at is not None for node in nodes for ref in node.refs)
