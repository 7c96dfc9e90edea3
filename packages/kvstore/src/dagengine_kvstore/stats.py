"""What the store tells about itself. Frozen snapshots; nothing here changes anything."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dagengine_kvstore.residency import copy_of
from dagengine_kvstore.tiers import Tier

if TYPE_CHECKING:
    from dagengine_kvstore.books import Books
    from dagengine_kvstore.states import Handle
    from dagengine_kvstore.transfers import Transfers


@dataclass(frozen=True, slots=True)
class StoreStats:
    """Counters only grow. Always:

    pages_total == pages_free + pages_cached + pages_live + pages_waiting + pages_moving
    host_total  == host_free + host_live + host_moving
    """

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_live: int
    pages_waiting: int
    pages_moving: int  # under a transfer's ticket, lost ones too
    pages_shared: int  # live pages that several nodes or writers refer to
    open_fences: int
    writers: int
    restores: int
    leases: int
    handles: int
    states: int  # sealed nodes that something holds
    states_resident: int  # wholly on the device
    states_on_host: int  # not wholly on the device; what is missing, the host has, or it is on its way
    tokens_written: int  # counter: committed by writers
    tokens_reused: int  # counter: matched instead
    tokens_recalled: int  # counter: brought from a persistent tier instead
    evictions: int  # counter: nodes that left the device
    host_total: int
    host_free: int
    host_live: int
    host_moving: int
    host_evictions: int  # counter: nodes that left the host
    tickets_in_flight: int
    tickets_lost: int  # now; what they may touch is not used
    pages_stored: int  # counter: arrived on the host
    pages_loaded: int  # counter: arrived on the device
    stores: int  # counter: tickets, as the following
    loads: int
    stores_failed: int
    loads_failed: int
    stores_lost: int
    loads_lost: int
    completions_late: int
    completions_duplicate: int
    completions_unknown: int


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One handle. `pages` counts those on the device of its first `at` tokens, `host_pages` those that the
    host has or is getting, `readers` the leases
    on the node, `holders` everything that keeps what the node passes on. `expires_s` is from now.
    """

    id: str
    name: str | None
    node: int
    at: int
    own_start: int
    context_tokens: int
    pages: int
    host_pages: int
    tier: Tier
    readers: int
    holders: int
    pinned: bool
    expires_s: float | None
    salt: str
    signature: tuple[tuple[str, str], ...]
    spans: tuple[tuple[str, tuple[int, int]], ...]


def store_stats(books: Books, transfers: Transfers) -> StoreStats:
    """Everything counted now."""
    pool, counts = books.pool, transfers.counts
    nodes = books.nodes()
    owners = Counter(page for node in nodes for page in node.pages if page is not None)
    for writer in (*books.writers.values(), *books.restores.values()):
        owners.update(writer.pages)
    tiers = Counter(books.tier(node) for node in nodes if node.sealed and node.held)
    return StoreStats(
        pages_total=pool.num_pages,
        pages_free=pool.num_free,
        pages_cached=pool.num_cached,
        pages_live=pool.num_live,
        pages_waiting=pool.num_waiting,
        pages_moving=pool.num_moving,
        pages_shared=sum(count > 1 for count in owners.values()),
        open_fences=pool.num_fences,
        writers=len(books.writers),
        restores=len(books.restores),
        leases=len(books.leases),
        handles=len(books.handles),
        states=tiers.total(),
        states_resident=tiers[Tier.DEVICE] + tiers[Tier.STORING],
        states_on_host=tiers[Tier.HOST] + tiers[Tier.LOADING],
        tokens_written=books.tokens_written,
        tokens_reused=books.tokens_reused,
        tokens_recalled=books.tokens_recalled,
        evictions=books.evictions,
        host_total=books.host.num_pages,
        host_free=books.host.num_free,
        host_live=books.host.num_live,
        host_moving=books.host.num_moving,
        host_evictions=books.host_evictions,
        tickets_in_flight=transfers.tickets.num_in_flight,
        tickets_lost=transfers.tickets.num_lost,
        pages_stored=counts["pages_store"],
        pages_loaded=counts["pages_load"],
        stores=counts["store"],
        loads=counts["load"],
        stores_failed=counts["store_failed"],
        loads_failed=counts["load_failed"],
        stores_lost=counts["store_lost"],
        loads_lost=counts["load_lost"],
        completions_late=counts["completion_late"],
        completions_duplicate=counts["completion_duplicate"],
        completions_unknown=counts["completion_unknown"],
    )


def state_info(books: Books, handle: Handle, now: float) -> StateInfo:
    """What a handle names.

    Args:
        now: seconds of the store's clock.
    """
    node = handle.node
    span = books.holds.page_range(0, handle.at)
    return StateInfo(
        id=handle.id,
        name=handle.name,
        node=node.uid,
        at=handle.at,
        own_start=node.own_start,
        context_tokens=sum(read.stop - read.start for read in node.reads),
        pages=sum(page is not None for page in node.pages[: span.stop]),
        host_pages=sum(copy_of(node, index) is not None for index in span),
        tier=books.tier(node),
        readers=sum(node.leases.values()),
        holders=node.root.refs,
        pinned=handle.pinned,
        expires_s=None if handle.deadline is None else max(0.0, handle.deadline - now),
        salt=node.salt,
        signature=node.signature,
        spans=tuple(node.spans.items()),
    )
