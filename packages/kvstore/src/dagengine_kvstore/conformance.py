"""What every eviction policy and every transfer must do, as pytest classes to inherit.

    from dagengine_kvstore.conformance import EvictionPolicyConformance

    class TestMine(EvictionPolicyConformance):
        def make(self):
            return MyPolicy()

The only module of this package that needs pytest.
"""

from __future__ import annotations

import random
import time

import pytest

from dagengine_kvstore.errors import KVStoreError, OutOfPages
from dagengine_kvstore.eviction import Candidate, EvictionPolicy
from dagengine_kvstore.store import KVStore
from dagengine_kvstore.tiers import Copy, Transfer


class EvictionPolicyConformance:
    """Override `make`."""

    def make(self) -> EvictionPolicy:
        raise NotImplementedError("return the policy under test")

    def candidates(self, seed: int, count: int = 20) -> list[Candidate]:
        rng = random.Random(seed)
        return [
            Candidate(uid, rng.randint(1, 9), rng.randint(1, 99), rng.randint(0, 999), rng.randint(0, 50))
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


class TransferConformance:
    """Override `make`; its host tier may have any number of pages, also none."""

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
