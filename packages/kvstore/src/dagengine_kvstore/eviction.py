"""Which states to drop first when pages are short. Knows numbers about candidates; touches nothing itself.

The store offers only nodes that may be dropped (sealed, not pinned; of what is leased or about to be read, the
other pages) and evicts them in the order given until there are enough pages. A dropped node keeps its recipe
and its handles.
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
    """A node that may be evicted.

    `num_tokens` and `num_read` (tokens of its context) say what computing it again costs; `last_used` counts
    the store's operations, so larger is more recent.
    """

    uid: int
    num_pages: int
    num_tokens: int
    num_read: int
    last_used: int


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
