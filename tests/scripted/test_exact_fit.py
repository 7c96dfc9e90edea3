"""A request that fits runs, whatever of what it reads happens to be resident. See `simulator`."""

from __future__ import annotations

from itertools import product

import pytest
from simulator import Settings, World

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.request import Request

PAGES, SIZE = 10, 4
GREEDY = SamplingParams(max_tokens=3, temperature=0.0)
pytestmark = pytest.mark.usefixtures("step_mode")


def world() -> World:
    return World(0, Settings(SIZE, PAGES, 64, 8))


def keep(run: World, name: str, pages: int, digested: str | None = None) -> None:
    """A state of so many pages; what it digests is released."""
    first = 100 * (1 + len(run.handles))
    context = () if digested is None else (ContextRef(state=run.handle(digested).id, mode="digest"),)
    ids = tuple(range(first, first + pages * SIZE))
    run.submit(Request(name, ids, None, context, keep=Keep()))
    run.run()
    if digested is not None:
        run.core.release_state(run.handle(digested).id)
        run.handles.remove(run.handle(digested))


def ask(run: World, *names: str) -> None:
    """Ask over states; the answer must come."""
    refs = tuple(ContextRef(state=run.handle(name).id) for name in names)
    run.submit(Request("ask", (7,), GREEDY, refs))
    run.run(200)
    assert run.ends["ask"].error is None, run.ends["ask"].error
    run.clean_up()


def evict(run: World, *names: str, cached: int) -> None:
    """Drop the pages of states, and use all free and cached pages once but the `cached` last ones."""
    store = run.core.store
    for name in names:
        store.evict(store.resolve(run.handle(name).id)[0])
    stats = store.stats()
    writer = store.begin([], [], 0, signature={})
    writer.reserve(max(0, stats.pages_free + stats.pages_cached - cached) * SIZE)
    writer.abort()


@pytest.mark.parametrize("order", [("digest", "other"), ("other", "digest")])
@pytest.mark.parametrize("evicted", [(), ("digest",), ("other",), ("digest", "other"), ("other", "digest")])
def test_what_stays_resident_makes_room_for_the_restore(
    order: tuple[str, ...], evicted: tuple[str, ...]
) -> None:
    """Six pages to compute the digest's three again; four of the other state stand in the way."""
    for cached in range(5):
        run = world()
        keep(run, "source", 6)
        keep(run, "digest", 3, "source")
        evict(run, cached=0)
        keep(run, "other", 4)
        evict(run, *evicted, cached=cached)
        ask(run, *order)


@pytest.mark.parametrize("cached", range(10))
def test_pages_found_of_a_later_restore_make_room_for_an_earlier_one(cached: int) -> None:
    """Five and five pages to compute the source again; the pages found of its reader stand in the way."""
    run = world()
    keep(run, "origin", 5)
    keep(run, "source", 5, "origin")
    evict(run, "source", cached=0)
    keep(run, "reader", 2, "source")
    evict(run, "reader", cached=cached)
    ask(run, "reader")


@pytest.mark.parametrize("evicted", [False, True])
@pytest.mark.parametrize("start", range(0, 21, 5))
def test_what_is_not_read_of_a_state_makes_room(start: int, evicted: bool) -> None:
    """At most two of the state's six pages are read; eight are written."""
    run = world()
    keep(run, "state", 6)
    if evicted:
        run.overwrite()
    span = ContextRef(state=run.handle("state").id, mode="artifact", span=(start, start + 4))
    run.submit(Request("ask", tuple(range(29)), GREEDY, (span,)))
    run.run(200)
    assert run.ends["ask"].error is None, run.ends["ask"].error
    run.submit(Request("whole", (7,), GREEDY, (ContextRef(state=run.handle("state").id),)))
    run.run(200)
    assert run.ends["whole"].error is None, run.ends["whole"].error
    run.clean_up()


@pytest.mark.parametrize("order", list(product(("a", "b"), repeat=2)))
def test_what_can_never_be_resident_together_comes_to_an_end(order: tuple[str, ...]) -> None:
    """Each takes the whole pool to compute; only what was computed before and stayed can be read together."""
    run = world()
    for name in ("a", "b"):
        keep(run, f"source of {name}", 6)
        keep(run, name, 4, f"source of {name}")
        run.overwrite()
    refs = tuple(ContextRef(state=run.handle(name).id) for name in order)
    run.submit(Request("ask", (7,), GREEDY, refs))
    run.run(200)
    error = run.ends["ask"].error
    assert (error and error.code) == (None if order[0] == order[1] else "capacity")
    run.clean_up()
