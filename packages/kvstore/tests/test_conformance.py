"""The kits, on the built-ins and on stand-ins for what others would write; and that the kits can fail."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from dagengine_kvstore import (
    Candidate,
    Completion,
    Copy,
    KVStoreError,
    LeastRecentlyUsed,
    NoTransfer,
    Transfer,
)
from dagengine_kvstore.conformance import EvictionPolicyConformance, TransferConformance
from dagengine_kvstore.tiers import TRANSITIONS, Tier


class TestLeastRecentlyUsed(EvictionPolicyConformance):
    def make(self) -> LeastRecentlyUsed:
        return LeastRecentlyUsed()


class CheapestFirst:
    name = "cheapest"

    def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
        return [c.uid for c in sorted(candidates, key=lambda c: (c.num_tokens + c.num_read, c.uid))]


class TestCheapestFirst(EvictionPolicyConformance):
    def make(self) -> CheapestFirst:
        return CheapestFirst()


class TestNoTransfer(TransferConformance):
    def make(self) -> Transfer:
        return NoTransfer()


class LateTransfer:
    """Completes what was submitted last first, one per poll."""

    name = "late"
    num_host_pages = 4

    def __init__(self) -> None:
        self.tickets: list[int] = []
        self.given = 0

    def submit(self, copy: Copy) -> int:
        if any(not 0 <= host < self.num_host_pages for _, host in copy.pages):
            raise KVStoreError("capacity", "no such host page", field="pages")
        self.given += 1
        self.tickets.append(self.given)
        return self.given

    def poll(self) -> Sequence[Completion]:
        return (Completion(self.tickets.pop()),) if self.tickets else ()

    def abort(self, ticket: int) -> bool:
        return ticket not in self.tickets


class TestLateTransfer(TransferConformance):
    def make(self) -> Transfer:
        return LateTransfer()


def test_the_kits_notice_faults() -> None:
    class Repeats(LeastRecentlyUsed):
        def order(self, candidates: Sequence[Candidate]) -> Sequence[int]:
            return [candidate.uid for candidate in candidates] * 2

    class Forgets(LateTransfer):
        def poll(self) -> Sequence[Completion]:
            return super().poll()[:0]

    policies, transfers = EvictionPolicyConformance(), TransferConformance()
    policies.make = Repeats  # type: ignore[method-assign]
    transfers.make = Forgets  # type: ignore[method-assign]
    transfers.patience_s = 0.0
    with pytest.raises(AssertionError):
        policies.test_orders_candidates_each_at_most_once_and_nothing_else(0)
    with pytest.raises(KVStoreError):
        policies.test_a_store_under_pressure_stays_whole()
    with pytest.raises(AssertionError):
        transfers.test_every_ticket_is_new_and_completes_exactly_once()


def test_every_tier_leads_back_to_the_device() -> None:
    assert set(TRANSITIONS) == set(Tier)
    reached = {Tier.DEVICE}
    while more := {tier for tier, following in TRANSITIONS.items() if reached & set(following)} - reached:
        reached |= more
    assert reached == set(Tier)
