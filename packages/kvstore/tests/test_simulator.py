"""100,000 random operations over two tiers in all; a failure names the seed and the operation.

KVSTORE_SIMULATION_SEEDS=first:last runs other seeds, each of 5,000 operations.
"""

from __future__ import annotations

import os

import pytest
from kvstore_simulator import Simulator, make_simulator

SEEDS = range(*map(int, os.environ.get("KVSTORE_SIMULATION_SEEDS", "0:20").split(":")))
OPERATIONS = 5000


@pytest.mark.parametrize("seed", SEEDS)
def test_any_order_of_operations_and_completions_keeps_every_page_and_every_byte(seed: int) -> None:
    simulator = make_simulator(seed, audit_every=4)
    simulator.run(OPERATIONS)
    assert simulator.done.total() == OPERATIONS
    assert simulator.done.keys() == {op.__name__ for op in simulator.ops}


def test_a_simulation_meets_everything_that_can_happen() -> None:
    faults = {"lose": 0.05, "fail": 0.3, "duplicate": 0.2, "refuse": 0.05, "confirm": 0.02}
    simulator = Simulator(1, num_host_pages=8, faults=faults, pin_budget=3, max_failures=2, audit_every=8)
    simulator.run(OPERATIONS)
    kinds = (
        "stored loaded offloaded evict host_evict load_failed store_failed load_lost store_lost completion_late "
        "completion_duplicate quarantine_over given_up offload_failed offload_cancelled out_of_pages "
        "waits_for_transfers load_out_of_pages out_of_host_pages pin_refused brought_back"
    )
    assert [kind for kind in kinds.split() if not simulator.seen[kind]] == []


def test_the_same_seed_does_the_same() -> None:
    def trace() -> list[object]:
        simulator = make_simulator(7)
        simulator.run(600)
        return [simulator.seen, list(simulator.store.events), simulator.transfer.copies]

    assert trace() == trace()


def free_under_a_ticket(simulator: Simulator) -> None:
    pool = simulator.books.pool

    def begin_move(page: int) -> None:
        pool._moving.add(page)
        pool._moving.discard(page)

    pool.begin_move = begin_move  # type: ignore[method-assign]
    pool.end_move = lambda page: None  # type: ignore[method-assign]


def trust_a_failed_load(simulator: Simulator) -> None:
    transfers = simulator.store._transfers
    transfers._load_failed = lambda ticket, error: transfers._loaded(ticket)  # type: ignore[method-assign]


def forget_the_salt(simulator: Simulator) -> None:
    find = simulator.books.contents.context
    simulator.books.contents.context = (  # type: ignore[method-assign]
        lambda signature, salt, reads, own_start: find(signature, "", reads, own_start)
    )


def use_what_was_lost(simulator: Simulator) -> None:
    simulator.transfer.lose, simulator.transfer.confirm = 0.2, 0.0
    transfers = simulator.store._transfers
    lose = transfers._lose

    def lose_and_free(ticket: object) -> None:
        lose(ticket)  # type: ignore[arg-type]
        transfers._end_quarantine(ticket)  # type: ignore[arg-type]

    transfers._lose = lose_and_free  # type: ignore[method-assign]


def store_before_it_is_written(simulator: Simulator) -> None:
    simulator.books.pool.expect_write = lambda page: None  # type: ignore[method-assign]
    simulator.ops += [simulator.seal_early, simulator.offload, simulator.load] * 20


@pytest.mark.parametrize(
    "break_it",
    [
        trust_a_failed_load,
        forget_the_salt,
        use_what_was_lost,
        free_under_a_ticket,
        store_before_it_is_written,
    ],
)
def test_the_simulation_notices_a_store_that_is_wrong(break_it: object) -> None:
    def broken_runs() -> None:
        for seed in range(6):
            simulator = make_simulator(seed)
            break_it(simulator)  # type: ignore[operator]
            simulator.run(1500)

    with pytest.raises(Exception) as caught:
        broken_runs()
    assert any(note.startswith("seed ") for note in caught.value.__notes__)
