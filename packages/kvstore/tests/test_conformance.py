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
    NextUse,
    NoTransfer,
    Transfer,
)
from dagengine_kvstore.conformance import (
    EvictionPolicyConformance,
    TransferConformance,
    TransferContentsConformance,
)
from dagengine_kvstore.fake_transfer import FakeTransfer
from dagengine_kvstore.tiers import TRANSITIONS, Tier


class TestLeastRecentlyUsed(EvictionPolicyConformance):
    def make(self) -> LeastRecentlyUsed:
        return LeastRecentlyUsed()


class TestNextUse(EvictionPolicyConformance):
    def make(self) -> NextUse:
        return NextUse()


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


class EndedTransfer(LateTransfer):
    """What it is given has ended at once, which `abort` finds out before `poll` does."""

    def abort(self, ticket: int) -> bool:
        return True


class TestEndedTransfer(TransferConformance):
    def make(self) -> Transfer:
        return EndedTransfer()


class TestFakeTransfer(TransferContentsConformance):
    def make(self) -> FakeTransfer:
        self.device: list[object] = [None] * 16
        return FakeTransfer(self.device, 5, rows=2, delay=(1, 4))

    def fill(self, transfer: Transfer, page: int, value: int) -> None:
        self.device[2 * page : 2 * page + 2] = [value, -value - 1]

    def contents(self, transfer: Transfer, page: int) -> object:
        return self.device[2 * page : 2 * page + 2]


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
    with pytest.raises(AssertionError):
        transfers.test_what_is_aborted_is_confirmed_or_reported()
    with pytest.raises(AssertionError):
        transfers.test_a_store_over_it_stays_whole_and_brings_everything_back()

    class Twice(EndedTransfer):
        def poll(self) -> Sequence[Completion]:
            return [*super().poll()] * 2

    transfers.make = Twice  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        transfers.test_what_is_aborted_is_confirmed_or_reported()

    class Mixes(FakeTransfer):
        def submit(self, copy: Copy) -> int:
            return super().submit(Copy(copy.kind, tuple((device, 0) for device, _ in copy.pages)))

    contents = TestFakeTransfer()
    contents.device = [None] * 16
    contents.make = lambda: Mixes(contents.device, 5, rows=2)  # type: ignore[method-assign]
    for test in (
        contents.test_what_comes_back_is_what_went_whatever_the_device_pages_hold_meanwhile,
        contents.test_copies_submitted_together_do_not_mix,
    ):
        with pytest.raises(AssertionError):
            test()

    class Confirms(FakeTransfer):
        def abort(self, ticket: int) -> bool:
            return True

    contents.make = lambda: Confirms(contents.device, 5, rows=2, delay=(2, 4))  # type: ignore[method-assign]
    with pytest.raises(AssertionError):
        contents.test_what_is_confirmed_touches_its_pages_no_more()


def test_every_tier_leads_back_to_the_device() -> None:
    assert set(TRANSITIONS) == set(Tier)
    reached = {Tier.DEVICE}
    while more := {tier for tier, following in TRANSITIONS.items() if reached & set(following)} - reached:
        reached |= more
    assert reached == set(Tier)


def test_next_use_evicts_what_nobody_reads_then_what_is_read_last() -> None:
    candidates = [
        Candidate(1, 1, 1, 0, last_used=9, next_use=0),
        Candidate(2, 1, 1, 0, last_used=1, next_use=7),
        Candidate(3, 1, 1, 0, last_used=8, next_use=None),
        Candidate(4, 1, 1, 0, last_used=2, next_use=None),
        Candidate(5, 1, 1, 0, last_used=2, next_use=None),
        Candidate(6, 1, 1, 0, last_used=0, next_use=7),
    ]
    assert list(NextUse().order(candidates)) == [5, 4, 3, 6, 2, 1]
