"""Short ways to states of two tiers, and to questions over them, in a `simulator.World`."""

from __future__ import annotations

from typing import Any

from fake_host import CoinCosts, Host
from simulator import Settings, World

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.request import Request
from dagengine_kvstore import NodeRecord, Tier

SIZE = 4
GREEDY = SamplingParams(max_tokens=4, temperature=0.0)


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


def many_readers() -> World:
    """A run in which a state of five pages was offloaded, and five that read it were answered."""
    run = world(32)
    keep(run, "state", 5)
    offload(run, "state")
    names = [f"reader {index}" for index in range(5)]
    for name in names:
        ask(run, name, "state")
    run.run()
    answered(run, *names)
    return run
