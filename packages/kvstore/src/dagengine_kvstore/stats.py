"""What the store tells about itself. Frozen snapshots; nothing here changes anything."""

from __future__ import annotations

from dataclasses import dataclass

from dagengine_kvstore.tiers import Tier


@dataclass(frozen=True, slots=True)
class StoreStats:
    """`pages_free + pages_cached + pages_live + pages_waiting == pages_total`. Counters only grow."""

    pages_total: int
    pages_free: int
    pages_cached: int
    pages_live: int
    pages_waiting: int
    pages_shared: int  # live pages that several nodes or writers refer to
    open_fences: int
    writers: int
    restores: int
    leases: int
    handles: int
    states: int  # sealed nodes that something holds
    states_resident: int
    tokens_written: int  # counter: committed by writers
    tokens_reused: int  # counter: matched instead
    evictions: int  # counter: nodes


@dataclass(frozen=True, slots=True)
class StateInfo:
    """One handle. `pages` counts the resident ones of its first `at` tokens, `readers` the leases
    on the node, `holders` everything that keeps what the node passes on. `expires_s` is from now.
    """

    id: str
    name: str | None
    node: int
    at: int
    own_start: int
    context_tokens: int
    pages: int
    tier: Tier
    readers: int
    holders: int
    pinned: bool
    expires_s: float | None
    salt: str
    signature: tuple[tuple[str, str], ...]
    spans: tuple[tuple[str, tuple[int, int]], ...]
