"""What the store tells about itself. Frozen snapshots; nothing here changes anything."""

from __future__ import annotations

from dataclasses import dataclass

from dagengine_kvstore.tiers import Tier


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
