"""What every eviction policy and every transfer must do, as pytest classes to inherit.

    from dagengine_kvstore.conformance import EvictionPolicyConformance

    class TestMine(EvictionPolicyConformance):
        def make(self):
            return MyPolicy()

The only module of this package that needs pytest.
"""

from __future__ import annotations

import contextlib
import random
import time
from typing import Literal

import pytest

from dagengine_kvstore.errors import KVStoreError, NotResident, OutOfHostPages, OutOfPages
from dagengine_kvstore.eviction import Candidate, EvictionPolicy
from dagengine_kvstore.fake_transfer import FakeTransfer
from dagengine_kvstore.references import Read
from dagengine_kvstore.store import KVStore
from dagengine_kvstore.tiers import Copy, Tier, Transfer


class EvictionPolicyConformance:
    """Override `make`."""

    def make(self) -> EvictionPolicy:
        raise NotImplementedError("return the policy under test")

    def candidates(self, seed: int, count: int = 20) -> list[Candidate]:
        rng = random.Random(seed)
        return [
            Candidate(
                uid,
                num_pages=rng.randint(1, 9),
                num_tokens=rng.randint(1, 99),
                num_read=rng.randint(0, 999),
                last_used=rng.randint(0, 50),
                next_use=rng.choice([None, 0, rng.randint(1, 9)]),
                num_clean=rng.randint(0, 1),
                recompute_us=rng.choice([None, rng.randint(1, 10**6)]),
                reload_us=rng.choice([None, rng.randint(1, 10**6)]),
            )
            for uid in range(1, count + 1)
        ]

    def test_has_a_name(self) -> None:
        name = self.make().name
        assert isinstance(name, str) and name

    @pytest.mark.parametrize("seed", range(5))
    def test_orders_candidates_each_at_most_once_and_nothing_else(self, seed: int) -> None:
        candidates = self.candidates(seed)
        order = list(self.make().order(candidates))
        assert len(order) == len(set(order))
        assert set(order) <= {candidate.uid for candidate in candidates}

    @pytest.mark.parametrize("seed", range(5))
    def test_gives_the_same_order_for_the_same_candidates(self, seed: int) -> None:
        first, second = self.make(), self.make()
        assert list(first.order(self.candidates(seed))) == list(second.order(self.candidates(seed)))

    def test_leaves_the_list_it_is_given_alone(self) -> None:
        candidates = self.candidates(0)
        self.make().order(tuple(candidates))
        assert candidates == self.candidates(0)

    def test_has_nothing_to_evict_when_nothing_is_offered(self) -> None:
        assert list(self.make().order([])) == []

    def test_a_store_under_pressure_stays_whole(self) -> None:
        store = KVStore(8, 2, eviction=self.make())
        handles: list[str] = []
        for token in range(12):
            writer = store.begin([], [], 0, signature={})
            try:
                writer.reserve(3)
            except OutOfPages:
                writer.abort()
                store.check()
                store.release(handles.pop(0))
                continue
            writer.append([token] * 3)
            writer.commit(3)
            node = writer.seal()
            handles.append(store.name(node))
            store.unhold(node)
            store.check()
        for handle in handles:
            store.release(handle)
        store.check()
        assert store.available() == 8

    @pytest.mark.parametrize("num_host_pages", [3, 32])
    def test_a_store_of_two_tiers_under_pressure_stays_whole(self, num_host_pages: int) -> None:
        device: list[object] = [None] * 8
        transfer = FakeTransfer(device, num_host_pages, seed=1)
        store = KVStore(8, 2, eviction=self.make(), transfer=transfer)
        handles: list[str] = []
        for token in range(12):
            writer = store.begin([], [], 0, signature={})
            for _ in range(20):
                try:
                    writer.reserve(4)
                    break
                except OutOfPages as error:
                    if not error.moving:
                        store.release(handles.pop(0))
                    store.pump()
                    store.check()
            for slot in writer.append([token] * 4):
                device[slot // 2] = token
            writer.commit(4)
            node = writer.seal()
            handles.append(store.name(node))
            store.unhold(node)
            store.check()
        for handle in handles:
            node, _ = store.resolve(handle)
            if store.tier(node) is Tier.NOWHERE:
                continue
            for _ in range(20):
                try:
                    with store.lease([Read(node, 0, 4)]):
                        assert {device[page] for page in node.pages if page is not None} == {node.tokens[0]}
                    break
                except NotResident:
                    with contextlib.suppress(OutOfPages):  # others are being stored for it
                        store.load(node)
                    store.pump()
            else:
                raise AssertionError(f"{node} does not come back")
        for handle in handles:
            store.release(handle)
        for _ in range(20):
            store.pump()
        store.check()
        assert store.available() == 8 and store.stats().host_free == num_host_pages


class TransferConformance:
    """Override `make`; its host tier may have any number of pages, also none. Device pages 0 to 7 must exist."""

    patience_s = 10.0

    def make(self) -> Transfer:
        raise NotImplementedError("return the transfer under test")

    def drain(self, transfer: Transfer, count: int) -> list[int]:
        """Tickets of `count` completions, or of as many as come while patience lasts."""
        tickets: list[int] = []
        give_up = time.monotonic() + self.patience_s
        while len(tickets) < count and time.monotonic() < give_up:
            for completion in transfer.poll():
                assert completion.error is None, completion.error
                tickets.append(completion.ticket)
        return tickets

    def test_has_a_name(self) -> None:
        name = self.make().name
        assert isinstance(name, str) and name

    def test_an_idle_transfer_completes_nothing(self) -> None:
        assert list(self.make().poll()) == []

    def test_refuses_host_pages_it_does_not_have(self) -> None:
        transfer = self.make()
        for page in (-1, transfer.num_host_pages):
            with pytest.raises(KVStoreError) as caught:
                transfer.submit(Copy("store", ((0, page),)))
            assert caught.value.code == "capacity"
        assert list(transfer.poll()) == []

    def test_every_ticket_is_new_and_completes_exactly_once(self) -> None:
        transfer = self.make()
        pages = range(min(3, transfer.num_host_pages))
        copies = [Copy("store", ((page, page),)) for page in pages]
        tickets = [transfer.submit(copy) for copy in copies]
        assert len(set(tickets)) == len(tickets)
        assert sorted(self.drain(transfer, len(tickets))) == sorted(tickets)
        again = [transfer.submit(Copy("load", ((page, page),))) for page in pages]
        assert not set(again) & set(tickets)
        assert sorted(self.drain(transfer, len(again))) == sorted(again)
        assert list(transfer.poll()) == []

    def test_a_ticket_that_never_was_or_has_ended_touches_nothing(self) -> None:
        transfer = self.make()
        assert transfer.abort(10**9)
        for page in range(min(1, transfer.num_host_pages)):
            ticket = transfer.submit(Copy("store", ((0, page),)))
            assert self.drain(transfer, 1) == [ticket]
            assert transfer.abort(ticket)
        assert list(transfer.poll()) == []

    def test_what_is_aborted_is_confirmed_or_reported(self) -> None:
        """Reported once, if it was not confirmed; else once or not at all, with an error or without."""
        transfer = self.make()
        given: list[int] = []
        unconfirmed: set[int] = set()
        for page in range(min(3, transfer.num_host_pages)):
            ticket = transfer.submit(Copy("store", ((page, page),)))
            given.append(ticket)
            if not transfer.abort(ticket):
                unconfirmed.add(ticket)
        reported = self.reported(transfer, unconfirmed)
        assert len(set(reported)) == len(reported) and unconfirmed <= set(reported) <= set(given)
        again = [transfer.submit(Copy("store", ((page, page),))) for page in range(len(given))]
        reported += self.reported(transfer, set(again))
        assert len(set(reported)) == len(reported), "a ticket is reported twice"
        assert set(again) <= set(reported) <= {*given, *again}

    def reported(self, transfer: Transfer, wanted: set[int]) -> list[int]:
        """Tickets reported until the wanted ones were, or patience is over, whether they failed or not."""
        tickets: list[int] = []
        give_up = time.monotonic() + self.patience_s
        while not wanted <= set(tickets) and time.monotonic() < give_up:
            tickets += [completion.ticket for completion in transfer.poll()]
        return tickets

    def test_a_store_over_it_stays_whole_and_brings_everything_back(self) -> None:
        """Also with no host page at all: then nothing leaves the device."""
        store = KVStore(8, 2, transfer=self.make())
        nodes = []
        for token in range(2):
            writer = store.begin([], [], 0, signature={})
            writer.reserve(4)
            writer.append([token] * 4)
            writer.commit(4)
            nodes.append(writer.seal())
        for node in nodes:
            try:
                store.offload(node)
            except OutOfHostPages:
                continue
            self.pump_until_idle(store)
            assert store.tier(node) is Tier.HOST
        for node in nodes:
            store.load(node)
            self.pump_until_idle(store)
            store.lease([Read(node, 0, 4)]).release()
            store.unhold(node)
        stats = store.stats()
        assert stats.pages_free + stats.pages_cached == 8 and stats.host_free == stats.host_total

    def pump_until_idle(self, store: KVStore) -> None:
        give_up = time.monotonic() + self.patience_s
        store.check()
        store.pump()
        while store.num_in_flight:
            assert time.monotonic() < give_up, "a copy does not end"
            store.pump()
            store.check()


class TransferContentsConformance(TransferConformance):
    """Override `fill` and `contents`, too. The host tier must have at least 4 pages, the device 8."""

    def fill(self, transfer: Transfer, page: int, value: int) -> None:
        """Make a device page hold something that is different for each value."""
        raise NotImplementedError("write to the device page")

    def contents(self, transfer: Transfer, page: int) -> object:
        """What a device page holds, as something that can be compared."""
        raise NotImplementedError("read the device page")

    def copy(self, transfer: Transfer, kind: Literal["store", "load"], *pages: tuple[int, int]) -> None:
        ticket = transfer.submit(Copy(kind, pages))
        assert self.drain(transfer, 1) == [ticket]

    def test_what_comes_back_is_what_went_whatever_the_device_pages_hold_meanwhile(self) -> None:
        transfer = self.make()
        for page in range(4):
            self.fill(transfer, page, page)
        before = [self.contents(transfer, page) for page in range(4)]
        assert len({repr(content) for content in before}) == 4, "the four are different"
        self.copy(transfer, "store", *((page, 3 - page) for page in range(4)))
        for page in range(4):
            self.fill(transfer, page, 9)
        self.copy(transfer, "load", *((4 + page, 3 - page) for page in range(4)))
        assert [self.contents(transfer, 4 + page) for page in range(4)] == before
        self.copy(transfer, "load", (0, 2), (7, 1))
        assert [self.contents(transfer, page) for page in (0, 7)] == [before[1], before[2]]
        self.fill(transfer, 1, 9)
        assert self.contents(transfer, 2) == self.contents(transfer, 1), "nothing else was written"

    def test_what_is_confirmed_touches_its_pages_no_more(self) -> None:
        transfer = self.make()
        for page in range(4):
            self.fill(transfer, page, page)
        self.copy(transfer, "store", *((page, page) for page in range(4)))
        tickets = [transfer.submit(Copy("load", ((4 + page, page),))) for page in range(4)]
        confirmed = [page for page, ticket in enumerate(tickets) if transfer.abort(ticket)]
        for page in confirmed:
            self.fill(transfer, 4 + page, 9)
        after = [self.contents(transfer, 4 + page) for page in confirmed]
        late = {ticket for page, ticket in enumerate(tickets) if page not in confirmed}
        late.add(transfer.submit(Copy("load", ((0, 3),))))
        assert late <= set(self.reported(transfer, late))
        assert [self.contents(transfer, 4 + page) for page in confirmed] == after

    def test_copies_submitted_together_do_not_mix(self) -> None:
        transfer = self.make()
        for page in range(4):
            self.fill(transfer, page, page)
        before = [self.contents(transfer, page) for page in range(4)]
        tickets = [transfer.submit(Copy("store", ((page, page),))) for page in range(4)]
        assert sorted(self.drain(transfer, 4)) == sorted(tickets)
        tickets = [transfer.submit(Copy("load", ((7 - page, page),))) for page in range(4)]
        assert sorted(self.drain(transfer, 4)) == sorted(tickets)
        assert [self.contents(transfer, 7 - page) for page in range(4)] == before
