"""Copies between the tiers that fail, are lost, refused, late or given up: no token changes, and nothing stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from fake_host import Host
from scripted_tiers import GREEDY, SIZE, answered, ask, free_cached, keep, many_readers, node, offload, world
from simulator import Mismatch, Settings, run_world

from dagengine import ContextRef
from dagengine.request import Request
from dagengine_kvstore import Copy
from dagengine_kvstore.fake_transfer import FakeTransfer

pytestmark = pytest.mark.usefixtures("quiet")

SEEDS = 6
MOST_SEEDS = 40
"""Until everything has happened."""
FAILING = {"fail": 0.3, "duplicate": 0.3, "refuse": 0.3}
LOSING = {"lose": 0.3, "duplicate": 0.1, "confirm": 0.2}


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
    for seed in range(MOST_SEEDS):
        if seed >= SEEDS and all(counts[happened] for happened in happening):
            break
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
    many_readers()
    monkeypatch.setattr(FakeTransfer, "submit", submit)
    with pytest.raises(Mismatch):
        many_readers()


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
