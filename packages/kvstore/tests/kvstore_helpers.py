"""Short ways to states for the tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import pytest

from dagengine_kvstore import KVStore, KVStoreError, NodeRecord, Parent, Read

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
