"""Two tiers under the real engine: what was offloaded and loaded changes no token, and nothing stays.

See `simulator` for what a run is and `fake_host` for the host tier under it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from fake_host import CoinCosts, Host
from scripted_model import scripted_core
from scripted_tiers import (
    GREEDY,
    SIZE,
    answered,
    ask,
    free_cached,
    keep,
    loads,
    many_readers,
    node,
    offload,
    tier,
    world,
)
from simulator import MAX_STEPS_WITHOUT_END, Settings, draw_host, run_world

from dagengine import ContextRef, DagError, Keep, SamplingParams
from dagengine.core import EngineCore
from dagengine.request import FinishedEvent, Request
from dagengine_kvstore import Tier

pytestmark = pytest.mark.usefixtures("quiet")

WORLDS, MOST_WORLDS = 26, 60
"""Of a part: at least so many; more, until everything has happened."""
PARTS = [("at once", part) for part in range(4)] + [("late", part) for part in range(4, 6)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "part"), PARTS)
def test_random_graphs_over_two_tiers_equal_the_definition(mode: str, part: int) -> None:
    happening = ("answers", "stores", "loads", "offloads", "reloaded tokens")
    counts: Counter[str] = Counter()
    for seed in range(part * MOST_WORLDS, (part + 1) * MOST_WORLDS):
        if seed >= part * MOST_WORLDS + WORLDS and all(counts[happened] for happened in happening):
            break
        settings = draw_host(Settings.draw(random.Random(seed)), seed)
        counts += run_world(seed, 1, settings, mode)
    for happened in happening:
        assert counts[happened], f"no {happened} in {counts}"


class Asker:
    """Random questions over random states of one engine; the answers by question."""

    def __init__(self, core: EngineCore, rng: random.Random, documents: int, pages: int) -> None:
        self.core, self.rng = core, rng
        self.states: list[str] = []
        self.answers: dict[str, tuple[int, ...]] = {}
        for number in range(documents):
            tokens = tuple(rng.randrange(4096) for _ in range(pages * SIZE))
            core.submit(Request(f"d{number}", tokens, None, keep=Keep()))
            (ended,) = self.until(f"d{number}")
            state = ended.choices[0].dag.state
            assert state is not None
            self.states.append(state)

    def until(self, *names: str) -> list[FinishedEvent]:
        ended: dict[str, FinishedEvent] = {}
        for _ in range(MAX_STEPS_WITHOUT_END):
            for event in self.core.step():
                if isinstance(event, FinishedEvent):
                    assert event.error is None, event.error
                    ended[event.request_id] = event
            stats = self.core.store.stats()
            pages = stats.pages_free + stats.pages_cached + stats.pages_live + stats.pages_waiting
            assert pages + stats.pages_moving == stats.pages_total
            if not set(names) - ended.keys():
                return [ended[name] for name in names]
        raise AssertionError(f"not all of {names} ended: {stats}")

    def ask(self, rounds: int, at_once: int) -> None:
        for number in range(rounds):
            names = []
            for index in range(at_once):
                read = self.rng.sample(self.states, self.rng.randint(1, 2))
                refs = tuple(ContextRef(state=state) for state in read)
                names.append(f"q{number}.{index}")
                self.core.submit(Request(names[-1], (7, index), GREEDY, refs))
            for ended in self.until(*names):
                self.answers[ended.request_id] = ended.choices[0].token_ids


@pytest.mark.parametrize("eviction", ["lru", "next_use"])
def test_a_working_set_of_four_pools_is_served_as_from_one_that_holds_it(eviction: str) -> None:
    def answers(pages: int, **options: Any) -> tuple[Asker, dict[str, tuple[int, ...]]]:
        core = scripted_core(pages=pages, page_size=SIZE, max_num_seqs=4, mode="overlap", **options)
        asker = Asker(core, random.Random(5), 16, 6)
        asker.ask(12, 6)
        return asker, asker.answers

    _, expected = answers(200)
    small, found = answers(
        24, transfer=lambda arena: Host(120).transfer(arena), costs=CoinCosts(1.0), eviction=eviction
    )
    assert found == expected
    stats = small.core.store.stats()
    assert stats.loads and stats.evictions and not small.core.stats.restored_tokens
    assert stats.stores <= 16 + 12 * 6, "what the host has already is not stored again"


def test_many_readers_of_an_offloaded_state_load_it_once() -> None:
    run = many_readers()
    assert loads(run) == 1 and run.core.store.stats().pages_loaded == 5
    first = run.ends["reader 0"].choices[0].dag
    assert (first.reloaded, first.computed, first.reused) == (5 * SIZE, 1, 5 * SIZE)
    run.clean_up()


def test_who_does_not_read_it_does_not_wait_for_a_load() -> None:
    run = world(32, delay=(8, 8))
    keep(run, "state", 5)
    offload(run, "state")
    ask(run, "running", own=3, sampling=SamplingParams(max_tokens=6, min_tokens=6, temperature=0.0))
    run.step()
    ask(run, "reader", "state")
    while "running" not in run.ends:
        run.step()
    assert loads(run) == 1 and run.core.store.num_in_flight, "it decodes while the state is loaded"
    run.run()
    answered(run, "running", "reader")


def test_who_waits_behind_a_load_and_has_all_it_reads_runs() -> None:
    run = world(32, delay=(9, 9))
    keep(run, "state", 5)
    keep(run, "other", 2)
    offload(run, "state")
    ask(run, "first", "state")
    run.step()
    ask(run, "same", "state")
    ask(run, "behind", "other", own=3)
    while "behind" not in run.ends:
        assert run.core.store.num_in_flight
        run.step()
    run.run()
    answered(run, "first", "same", "behind")
    assert loads(run) == 1
    run.clean_up()


def test_nobody_is_preempted_while_a_store_brings_enough_pages() -> None:
    """Two sequences grow in a pool that a state fills; its pages are stored, and both wait for that."""
    run = world(12, delay=(4, 4))
    keep(run, "state", 8)
    for name in ("a", "b"):
        ask(run, name, own=6, sampling=SamplingParams(max_tokens=14, min_tokens=14, temperature=0.0))
    waited = 0
    while run.core.has_work:
        run.step()
        waited += not run.core.progressed
    answered(run, "a", "b")
    stats = run.core.store.stats()
    assert waited and stats.stores == 1 and not run.core.num_preemptions
    assert tier(run, "state") in (Tier.HOST, Tier.NOWHERE)


def test_a_preempted_sequences_context_comes_back() -> None:
    """A later, long one loses its pages to the one before it, while what it reads is being stored."""
    run = world(13, delay=(3, 3))
    keep(run, "state", 5)
    long = SamplingParams(max_tokens=18, min_tokens=18, temperature=0.0)
    ask(run, "first", own=16, sampling=long)
    ask(run, "second", "state", own=8, sampling=long)
    run.step()
    run.core.offload_state(run.handle("state").id)
    run.run()
    answered(run, "first", "second")
    assert run.core.num_preemptions and loads(run)
    run.clean_up()


@pytest.mark.parametrize("order", [("a", "b"), ("b", "a"), ("a", "b", "c")])
@pytest.mark.parametrize("moved", [(), ("a",), ("b",), ("a", "b"), ("a", "b", "c")])
def test_an_exact_fit_neither_hangs_nor_thrashes(order: Sequence[str], moved: Sequence[str]) -> None:
    """Nine pages are read and one is written, of ten; what is where does not matter."""
    run = world(10)
    for name in ("a", "b", "c"):
        keep(run, name, 3)
    offload(run, *moved)
    ask(run, "ask", *order, own=2 if len(order) == 3 else 14, sampling=SamplingParams(max_tokens=2))
    run.run(200)
    answered(run, "ask")
    assert loads(run) <= len(order) and not run.core.stats.restored_tokens
    run.clean_up()


@pytest.mark.parametrize("moved", [("base",), ("digest",), ("base", "digest")])
def test_what_is_computed_again_reads_what_was_loaded_for_it(moved: Sequence[str]) -> None:
    """The middle one is nowhere, and read what the host has."""
    run = world(16)
    keep(run, "base", 4)
    run.submit(
        Request(
            "digest", (5,) * 6, None, (ContextRef(state=run.handle("base").id, mode="digest"),), keep=Keep()
        )
    )
    run.run()
    keep(run, "top", 2, "digest")
    offload(run, *moved)
    run.core.store.evict(node(run, "top"))
    free_cached(run)
    ask(run, "ask", "top", "digest")
    run.run()
    answered(run, "ask")
    assert run.core.stats.restored_tokens >= 2 * SIZE
    run.clean_up()


def test_what_costs_less_to_compute_is_computed() -> None:
    run = world(32, share=0.0)
    keep(run, "state", 3)
    offload(run, "state")
    ask(run, "ask", "state")
    run.run()
    answered(run, "ask")
    stats, dag = run.core.stats, run.ends["ask"].choices[0].dag
    assert (stats.recomputes_chosen, stats.reloads_chosen, loads(run)) == (1, 0, 0)
    assert (dag.reloaded, dag.reused, dag.computed) == (0, 0, 3 * SIZE + 1)
    run.clean_up()


def test_a_state_in_use_leaves_when_its_reader_ends() -> None:
    run = world(24)
    keep(run, "state", 4)
    ask(run, "reader", "state", sampling=SamplingParams(max_tokens=12, min_tokens=12, temperature=0.0))
    run.step()
    run.core.offload_state(run.handle("state").id)
    for _ in range(6):
        run.step()
    assert tier(run, "state") is Tier.DEVICE and node(run, "state").leases
    run.run()
    for _ in range(4):
        run.core.pump()
    assert tier(run, "state") is Tier.HOST and run.core.stats.offloads == 1
    run.clean_up()


@pytest.mark.parametrize("move", ["offload_state", "prefetch_state"])
def test_without_a_host_tier_moving_is_refused(move: str) -> None:
    core = scripted_core()
    with pytest.raises(DagError) as error:
        getattr(core, move)("st_any")
    assert (error.value.code, error.value.field) == ("unsupported", "state")
