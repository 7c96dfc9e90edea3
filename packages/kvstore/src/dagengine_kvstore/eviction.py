"""Which states to drop first when pages are short. Knows numbers about candidates; touches nothing itself.

The store offers only nodes that may be dropped (sealed, not pinned; of what is leased or about to be read, the
other pages) and evicts them in the order given until there are enough pages. A dropped node keeps its recipe, its
handles and what another tier has of it. The same policy orders both tiers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, cast

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.registry import EVICTION_POLICIES, load


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node that may be evicted from a tier.

    Attributes:
        num_pages: those that may be dropped there.
        num_tokens, num_read: its own tokens and those of its context.
        last_used: counts the store's operations, so larger is more recent.
        next_use: when somebody who waits or runs will read it, smaller is sooner; None: nobody does, or nobody told.
        num_clean: how many of `num_pages` the other tier has too.
        recompute_us, reload_us: what bringing it back would cost, if the store has a cost model.
    """

    uid: int
    num_pages: int
    num_tokens: int
    num_read: int
    last_used: int
    next_use: int | None = None
    num_clean: int = 0
    recompute_us: int | None = None
    reload_us: int | None = None


class EvictionPolicy(Protocol):
    """Plug-in group `dagengine.eviction_policies`; the entry point is a callable without arguments."""

    @property
    def name(self) -> str: ...

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        """uids in the order of eviction, each at most once; what is left out is never evicted."""
        ...


class LeastRecentlyUsed:
    """Oldest use first; of nodes used together the youngest first, since it depends on the older ones."""

    name = "lru"

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        ranked = sorted(candidates, key=lambda candidate: (candidate.last_used, -candidate.uid))
        return [candidate.uid for candidate in ranked]


class NextUse:
    """What nobody is going to read first, the least recently used of it first; then what is read last."""

    name = "next_use"

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        def rank(candidate: Candidate) -> tuple[bool, int, int, int]:
            next_use = candidate.next_use
            soon = 0 if next_use is None else -next_use
            return next_use is not None, soon, candidate.last_used, -candidate.uid

        return [candidate.uid for candidate in sorted(candidates, key=rank)]


def eviction_policy(policy: str | EvictionPolicy) -> EvictionPolicy:
    """A policy by its registered name, or the object itself.

    Raises KVStoreError `plugin_not_found` or `plugin_broken`.
    """
    if not isinstance(policy, str):
        return policy
    factory = load(EVICTION_POLICIES, policy)
    if not callable(factory):
        raise KVStoreError(
            "plugin_broken", f"{policy!r} of {EVICTION_POLICIES} is not callable", field="eviction"
        )
    return cast(EvictionPolicy, factory())


def freed_pages(owned: Mapping[int, Sequence[int]], refs: Sequence[int]) -> set[int]:
    """Pages that nobody refers to once every node of `owned` (uid -> pages) is evicted; shared ones once."""
    count = Counter(page for pages in owned.values() for page in pages)
    return {page for page, dropped in count.items() if dropped == refs[page]}


def choose(
    order: Sequence[int], owned: Mapping[int, Sequence[int]], refs: Sequence[int], short: int
) -> list[int] | None:
    """The first nodes of `order` that together free `short` pages, without those that free none; None if all
    together do not.
    """
    dropped: Counter[int] = Counter()
    chosen: dict[int, Sequence[int]] = {}
    freed = 0
    for uid in order:
        chosen[uid] = owned[uid]
        for page in owned[uid]:
            dropped[page] += 1
            freed += dropped[page] == refs[page]
        if freed >= short:
            free = freed_pages(chosen, refs)
            return [uid for uid, pages in chosen.items() if free.intersection(pages)]
    return None
