"""Two tiers under the real engine: what was offloaded, loaded, lost or failed changes no token, and nothing stays.

See `simulator` for what a run is and `fake_host` for the host tier under it.
"""

from __future__ import annotations

import logging
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from fake_host import CoinCosts, Host
from scripted_model import scripted_core
from simulator import MAX_STEPS_WITHOUT_END, Mismatch, Settings, World, draw_host, run_world

from dagengine import ContextRef, DagError, Keep, SamplingParams
from dagengine.core import EngineCore
from dagengine.recalling import Recalling
from dagengine.request import FinishedEvent, Request
from dagengine_kvstore import Copy, NodeRecord, Tier
from dagengine_kvstore.fake_transfer import FakeTransfer
from dagengine_kvstore.persistent import Recalled
from dagengine_kvstore.recall import Recalls

SIZE = 4
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)
WORLDS = 26
SEEDS = 6
FAILING = {"fail": 0.3, "duplicate": 0.3, "refuse": 0.3}
LOSING = {"lose": 0.3, "duplicate": 0.1, "confirm": 0.2}


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """pytest keeps log records, and a record of a failed step keeps its frames and their nodes."""
    monkeypatch.setattr(logging.getLogger("dagengine"), "disabled", True)


def world(pages: int, host: int = 200, *, eviction: str = "lru", share: float = 1.0, **rates: Any) -> World:
    settings = Settings(SIZE, pages, 64, 8, Host(host, **rates), eviction)
    run = World(0, settings)
    run.core.store._pressure._costs = CoinCosts(share)
    return run


def keep(run: World, name: str, pages: int, *context: str) -> None:
    """A state of so many pages."""
    first = 100 * (1 + len(run.handles))
    refs = tuple(ContextRef(state=run.handle(parent).id) for parent in context)
    run.submit(Request(name, tuple(range(first, first + pages * SIZE)), None, refs, keep=Keep()))
    run.run()


def ask(run: World, name: str, *states: str, own: int = 1, **options: Any) -> Request:
    """Submit a question over states; `own` input tokens."""
    refs = tuple(ContextRef(state=run.handle(state).id) for state in states)
    request = Request(name, tuple(range(7, 7 + own)), options.pop("sampling", GREEDY), refs, **options)
    run.submit(request)
    return request


def offload(run: World, *names: str) -> None:
    """Offload states, and let nothing of them stay on the device."""
    for name in names:
        run.core.offload_state(run.handle(name).id)
    for _ in range(20):
        run.step()
    assert all(tier(run, name) is Tier.HOST for name in names)
    free_cached(run)


def free_cached(run: World) -> None:
    """Use every unused page once."""
    store = run.core.store
    writer = store.begin([], [], 0, signature={})
    writer.reserve(store.num_unused * SIZE)
    writer.abort()


def node(run: World, name: str) -> NodeRecord:
    return run.core.store.resolve(run.handle(name).id)[0]


def tier(run: World, name: str) -> Tier:
    return run.core.store.tier(node(run, name))


def loads(run: World) -> int:
    return sum(copy.kind == "load" for copy in run.transfer.copies)


def answered(run: World, *names: str) -> None:
    for name in names:
        assert run.ends[name].error is None, run.ends[name].error


PARTS = [("at once", part) for part in range(4)] + [("late", part) for part in range(4, 6)]


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "part"), PARTS)
def test_random_graphs_over_two_tiers_equal_the_definition(mode: str, part: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(part * WORLDS, (part + 1) * WORLDS):
        settings = draw_host(Settings.draw(random.Random(seed)), seed)
        counts += run_world(seed, 1, settings, mode)
    for happened in ("answers", "stores", "loads", "offloads", "reloaded tokens"):
        assert counts[happened], f"no {happened} in {counts}"


@pytest.mark.parametrize("mode", ["at once", "late"])
@pytest.mark.parametrize(
    ("rates", "happening"),
    [
        (FAILING, ("stores_failed", "loads_failed", "duplicates", "reloaded tokens")),
        (LOSING, ("stores_lost", "loads_lost", "late")),
    ],
)
def test_transfers_that_fail_in_every_way_change_no_token(
    rates: dict[str, float], happening: Sequence[str], mode: str
) -> None:
    counts: Counter[str] = Counter()
    for seed in range(SEEDS):
        counts += run_world(seed, 2, Settings(3, 22, 16, 8, Host(80, **rates), "next_use"), mode)
    for happened in happening:
        assert counts[happened], f"no {happened} in {counts}"


def test_a_page_that_is_loaded_from_the_wrong_place_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The run of many readers, with the first page of each load taken from the host page of its last."""

    def submit(self: FakeTransfer, copy: Copy) -> int:
        if copy.kind == "load":
            (first, _), *others = copy.pages
            copy = replace(copy, pages=((first, copy.pages[-1][1]), *others))
        return plain(self, copy)

    plain = FakeTransfer.submit
    test_many_readers_of_an_offloaded_state_load_it_once()
    monkeypatch.setattr(FakeTransfer, "submit", submit)
    with pytest.raises(Mismatch):
        test_many_readers_of_an_offloaded_state_load_it_once()


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
    run = world(32)
    keep(run, "state", 5)
    offload(run, "state")
    names = [f"reader {index}" for index in range(5)]
    for name in names:
        ask(run, name, "state")
    run.run()
    answered(run, *names)
    assert loads(run) == 1 and run.core.store.stats().pages_loaded == 5
    first = run.ends[names[0]].choices[0].dag
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


@pytest.mark.parametrize("mode", ["at once", "late"])
@pytest.mark.parametrize("moment", range(14))
def test_abort_at_every_point_of_stores_and_loads_gives_everything_back(
    moment: int, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("scripted_model.default_mode", mode)
    run = world(12, delay=(2, 3))
    keep(run, "a", 5)
    keep(run, "b", 5)
    run.core.offload_state(run.handle("a").id)
    ask(run, "first", "a", own=3)
    ask(run, "second", "b", "a", own=2)
    for _ in range(moment):
        run.step()
    for name in ("first", "second"):
        run.abort(name)
    run.run()
    ask(run, "later", "a", "b")
    run.run()
    answered(run, "later")
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


LOADS_NEVER = {
    "fail": {"fail": 1.0},
    "are refused": {"refuse": 1.0},
    "are lost": {"lose": 1.0},
    "are lost and given up": {"lose": 1.0, "confirm": 1.0},
}


@pytest.mark.parametrize("recomputable", [True, False])
@pytest.mark.parametrize("reads", ["state", "top"])
@pytest.mark.parametrize("fault", LOADS_NEVER)
def test_whose_loads_never_succeed_ends_by_computing_again_or_with_an_error(
    fault: str, reads: str, recomputable: bool
) -> None:
    """Read itself, or by what is computed again; in time, and also by who comes later."""
    run = world(32, delay=(1, 1), confirm=0.0)
    keep(run, "state", 5)
    keep(run, "top", 2, "state")
    keep(run, "other", 2)
    offload(run, "state")
    run.core.store.evict(node(run, "top"))
    free_cached(run)
    node(run, "state").recomputable = recomputable
    for rate, value in LOADS_NEVER[fault].items():
        setattr(run.transfer, rate, value)
    run.expected_errors = frozenset({"state_unavailable"})
    for names in (["first", "second"], ["later"]):
        for name in names:
            ask(run, name, reads)
        ask(run, f"beside {names[0]}", "other")
        for _ in range(30):
            run.now += run.core.store.transfer_timeout_s / 3
            if run.core.has_work:
                run.step()
        answered(run, f"beside {names[0]}")
        for name in names:
            error = run.ends[name].error
            if recomputable:
                assert error is None, error
            else:
                assert error is not None and (error.code, error.field) == ("state_unavailable", "context")
    if not recomputable:
        run.transfer.fail = run.transfer.refuse = run.transfer.lose = 0.0
        run.transfer.release_lost()
        run.core.pump()
        ask(run, "at last", reads)
        run.run()
        answered(run, "at last")
    node(run, "state").recomputable = True
    run.clean_up()


def test_who_reads_other_pages_than_those_whose_loads_are_lost_is_answered() -> None:
    """Of one state that cannot be computed again: what was lost is nobody's but who reads it, resident or not."""
    run = world(32, delay=(1, 1), confirm=0.0)
    keep(run, "state", 4)
    keep(run, "other", 2)
    offload(run, "state", "other")
    node(run, "state").recomputable = False
    run.expected_errors = frozenset({"state_unavailable"})

    def ask_for(name: str, first: int, *more: str) -> None:
        span = (first * SIZE, (first + 2) * SIZE)
        parts = [ContextRef(state=run.handle("state").id, mode="artifact", span=span)]
        parts += [ContextRef(state=run.handle(state).id) for state in more]
        run.submit(Request(name, (7, 8), GREEDY, tuple(parts)))
        for _ in range(10):
            run.now += run.core.store.transfer_timeout_s / 3
            if run.core.has_work:
                run.step()

    run.transfer.lose = 1.0
    ask_for("lost", 2)
    run.transfer.lose = 0.0
    ask_for("from the host", 0)
    ask_for("resident, beside a load", 0, "other")
    ask_for("lost again", 1)
    for name, code in (("lost", "state_unavailable"), ("lost again", "state_unavailable")):
        error = run.ends[name].error
        assert error is not None and error.code == code
    answered(run, "from the host", "resident, beside a load")
    run.transfer.release_lost()
    run.core.pump()
    node(run, "state").recomputable = True
    run.clean_up()


def test_who_waits_prefetches_and_what_it_reads_leaves_last() -> None:
    """One runs at a time. While it does, what the second reads comes back, and stays though the third is older."""
    run = world(24, eviction="next_use")
    run.core._scheduler._config = run.core.config.__class__(max_num_seqs=1, max_num_batched_tokens=64)
    keep(run, "read", 4)
    keep(run, "unread", 4)
    offload(run, "read")
    ask(run, "running", own=3, sampling=SamplingParams(max_tokens=8, min_tokens=8, temperature=0.0))
    run.step()
    ask(run, "waiting", "read")
    while tier(run, "read") is not Tier.DEVICE:
        assert "running" not in run.ends
        run.step()
    assert run.core.stats.prefetches == 1
    assert (
        run.core._upcoming(node(run, "read")) is not None and run.core._upcoming(node(run, "unread")) is None
    )
    run.run()
    answered(run, "waiting")
    assert run.ends["waiting"].choices[0].dag.reloaded == 4 * SIZE


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


class LateDirectory:
    """Seems to hold every page; says that none came, when it is told to answer."""

    def __init__(self) -> None:
        self.asked = 0
        self.answers: list[Recalled] = []

    def holds(self, key: bytes) -> bool:
        return True

    def recall(self, pages: Sequence[object]) -> int:
        self.asked += 1
        return self.asked

    def recalled(self) -> list[Recalled]:
        answers, self.answers = self.answers, []
        return answers

    def answer(self) -> None:
        self.answers += [Recalled(number + 1, ()) for number in range(self.asked)]
        self.asked = 0


def with_late_directory(run: World) -> tuple[LateDirectory, Recalls]:
    directory = LateDirectory()
    recalls = Recalls(run.core.store, directory)  # type: ignore[arg-type]
    run.core._scheduler.queues.recalling = Recalling(recalls)
    return directory, recalls


def running(run: World, count: int, most: int) -> list[str]:
    """So many sequences that run, none of whose pages is in a directory."""
    names = [f"running {index}" for index in range(count)]
    for index, name in enumerate(names):
        sampling = replace(GREEDY, max_tokens=most, min_tokens=most)
        run.submit(Request(name, tuple(range(100 * index, 100 * index + 4)), sampling))
    for _ in range(3):
        run.step()
    assert run.core.num_running == count
    return names


def test_pages_of_a_recall_that_gave_way_are_waited_for_and_nobody_is_preempted() -> None:
    run = world(17)
    names = running(run, 4, 12)
    directory, recalls = with_late_directory(run)
    run.submit(Request("recalled", tuple(range(700, 717)), GREEDY))
    for _ in range(12):
        run.step()
    assert recalls.num_open == 1 and run.core.store.stats().pages_waiting >= 4, "it gave way"
    assert run.core._scheduler.num_preemptions == 0
    directory.answer()
    run.run()
    answered(run, *names, "recalled")
    assert run.core._scheduler.num_preemptions <= 1


def test_a_directory_that_does_not_answer_stops_neither_who_waits_for_it_nor_those_behind() -> None:
    run = world(40)
    directory, recalls = with_late_directory(run)
    run.submit(Request("recalled", tuple(range(700, 717)), GREEDY))
    run.step()
    assert recalls.num_open == 1
    run.submit(Request("behind", tuple(range(800, 817)), GREEDY))
    for _ in range(8):
        run.step()
    assert set(run.ends) == {"behind"}
    run.now += run.core.store.transfer_timeout_s
    run.run()
    answered(run, "recalled", "behind")
    assert run.ends["recalled"].choices[0].dag.computed == 17
    stats = run.core.store.stats()
    assert (recalls.num_lost, stats.open_fences, stats.pages_moving) == (1, 0, 4)
    directory.answer()
    run.step()
    stats = run.core.store.stats()
    assert (recalls.num_lost, stats.pages_moving, stats.pages_live) == (0, 0, 0)
