"""Short ways to states for the tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from dagengine_kvstore import Completion, Copy, KVStore, KVStoreError, NodeRecord, Parent, Read, Tier

SIGNATURE = {"weights": "w1", "dtype": "float32"}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_store(num_pages: int = 16, page_size: int = 4, **options: object) -> KVStore:
    ids = iter(f"st_{count}" for count in range(10**6))
    return KVStore(num_pages, page_size, new_id=ids.__next__, **options)  # type: ignore[arg-type]


def write(
    store: KVStore,
    tokens: Sequence[int],
    parents: Sequence[Parent] = (),
    reads: Sequence[Read] = (),
    own_start: int = 0,
    *,
    signature: Mapping[str, str] = SIGNATURE,
    salt: str = "",
    match: bool = False,
) -> NodeRecord:
    """A sealed node with these tokens, held once."""
    writer = store.begin(parents, reads, own_start, signature=signature, salt=salt)
    reused = writer.match(tokens, whole=True) if match else 0
    writer.reserve(len(tokens) - reused)
    writer.append(tokens[reused:])
    writer.commit(len(tokens) - reused)
    return writer.seal()


def child(store: KVStore, parent: NodeRecord, tokens: Sequence[int], mode: str = "inherit") -> NodeRecord:
    """A node that reads all of its parent's own tokens, right behind them."""
    read = Read(parent, 0, parent.length, -parent.own_start)
    parents = [Parent(parent, mode, 0, parent.length)]  # type: ignore[arg-type]
    return write(store, tokens, parents, [read], parent.length)


@contextmanager
def refused(code: str, field: str | None = None) -> Iterator[None]:
    with pytest.raises(KVStoreError) as caught:
        yield
    assert caught.value.code == code
    if field is not None:
        assert caught.value.field == field


def assert_all_pages_back(store: KVStore) -> None:
    store.check()
    stats = store.stats()
    assert stats.pages_free + stats.pages_cached == stats.pages_total


class ByHand:
    """A transfer whose copies end when and how the test says."""

    name = "by_hand"

    def __init__(self, num_host_pages: int = 16) -> None:
        self.num_host_pages = num_host_pages
        self.copies: list[Copy] = []
        self.reports: list[Completion] = []
        self.confirms: set[int] = set()
        self.refuses = False

    def submit(self, copy: Copy) -> int:
        if self.refuses:
            raise RuntimeError("no")
        self.copies.append(copy)
        return len(self.copies)

    def poll(self) -> Sequence[Completion]:
        reports, self.reports = self.reports, []
        return reports

    def abort(self, ticket: int) -> bool:
        return ticket in self.confirms

    def end(self, *tickets: int, error: str | None = None) -> None:
        """Report these tickets at the next poll."""
        self.reports += [Completion(ticket, error) for ticket in tickets]


def setup(num_pages: int = 8, num_host_pages: int = 16, **options: object) -> tuple[KVStore, ByHand]:
    transfer = ByHand(num_host_pages)
    return make_store(num_pages, transfer=transfer, **options), transfer


def offload(store: KVStore, transfer: ByHand, *nodes: NodeRecord) -> None:
    for node in nodes:
        store.offload(node)
    transfer.end(*range(1, len(transfer.copies) + 1))
    store.pump()
    store.check()
    assert all(store.tier(node) is Tier.HOST for node in nodes)


def read(node: NodeRecord) -> Read:
    return Read(node, 0, node.length)


def balanced(store: KVStore) -> None:
    store.check()
    s = store.stats()
    device = s.pages_free + s.pages_cached + s.pages_live + s.pages_waiting + s.pages_moving
    assert device == s.pages_total and s.host_free + s.host_live + s.host_moving == s.host_total


def use_all_pages(store: KVStore) -> None:
    """What was only cached is gone afterwards."""
    writer = store.begin([], [], 0, signature={})
    writer.reserve(store.num_unused * store.page_size, evict=False)
    writer.abort()


class Costs:
    def __init__(self, recompute: int, reload: int) -> None:
        self._recompute, self._reload = recompute, reload

    def recompute(self, node: NodeRecord) -> int:
        return self._recompute * node.length

    def reload(self, num_pages: int) -> int:
        return self._reload * num_pages
