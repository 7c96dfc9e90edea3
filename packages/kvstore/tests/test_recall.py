from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from kvstore_disk import BytesTransfer
from kvstore_helpers import SIGNATURE, Clock, refused

from dagengine_kvstore import KVStore, NodeRecord, Parent, Read, Writer
from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.persistent import PersistentTransfer
from dagengine_kvstore.recall import Finished, Recalls
from dagengine_kvstore.writer import PageWriter

PAGE_SIZE, PAGE_BYTES = 4, 64


class Life:
    """A store over a directory, as one process has it. A page's bytes are its tokens and where they were computed."""

    def __init__(self, path: Path, num_pages: int = 16, **options: object) -> None:
        self.device = [bytes(PAGE_BYTES)] * num_pages
        self.inner = BytesTransfer(self.device, 20, PAGE_BYTES)
        self.directory = PageDirectory(path, PAGE_BYTES, 10**6, layout={})
        self.transfer = PersistentTransfer(self.inner, self.inner.host, self.directory, num_spare=2)
        self.store = KVStore(num_pages, PAGE_SIZE, transfer=self.transfer, **options)  # type: ignore[arg-type]
        self.recalls = Recalls(self.store, self.transfer)
        self.computed = 0

    def begin(self, own_start: int = 0, *, parents: Sequence[NodeRecord] = (), salt: str = "") -> Writer:
        reads = [Read(parent, 0, parent.length, -parent.own_start) for parent in parents]
        given = [Parent.inherit(parent) for parent in parents]
        return self.store.begin(given, reads, own_start, signature=SIGNATURE, salt=salt)

    def compute(self, writer: PageWriter, tokens: Sequence[int]) -> None:
        writer.reserve(len(tokens) - (writer.capacity - writer.num_tokens))
        fence = self.store.begin_step()
        slots = writer.append(tokens)
        for slot in slots:
            page = slot // PAGE_SIZE
            base = self.store._books.pool.base[page]
            self.device[page] = f"{base} {writer.node.salt}".encode().ljust(PAGE_BYTES, b".")
        self.store.end_step(fence)
        writer.commit(len(tokens))
        self.computed += len(tokens)

    def until(self, condition: Callable[[], object]) -> None:
        give_up = time.monotonic() + 30
        while not condition():
            self.store.pump()
            self.store.check()
            assert time.monotonic() < give_up

    def finished(self) -> Finished:
        found: list[Finished] = []
        self.until(lambda: found.extend(self.recalls.finish()) or found)
        (one,) = found
        return one

    def write(self, tokens: list[int], own_start: int = 0, **options: object) -> NodeRecord:
        """A sealed node; recalled as far as it is there."""
        writer = self.begin(own_start, **options)  # type: ignore[arg-type]
        if self.recalls.start(writer, tokens):
            assert self.finished().writer is writer
        self.compute(writer, tokens[writer.num_tokens :])
        return writer.seal()

    def keep(self, *nodes: NodeRecord) -> None:
        """Store nodes on the host and in the directory."""
        for node in nodes:
            self.store.offload(node)
        self.until(lambda: not self.store.num_in_flight)

    def end(self) -> None:
        self.store.check()
        self.transfer.close()


def test_what_another_life_computed_is_not_computed_again(tmp_path: Path) -> None:
    first = Life(tmp_path)
    node = first.write(list(range(18)), own_start=100)
    before = [first.device[page] for page in node.pages if page is not None]
    first.keep(node)
    first.end()
    second = Life(tmp_path)
    again = second.write(list(range(18)), own_start=7)
    assert second.computed == 2, "the last page is not full"
    assert [second.device[page] for page in again.pages[:4] if page is not None] == before[:4]
    with second.store.lease([Read(again, 0, 18)]) as lease:
        assert [extent.stored for extent in lease.extents(0)] == [100, 104, 108, 112, 23]
    assert second.store.stats().tokens_recalled == 16
    third = second.begin()
    assert third.match(list(range(18))) == 16, "what was recalled is found like what was computed"
    third.abort()
    second.end()


def test_only_the_same_content_is_recalled(tmp_path: Path) -> None:
    first = Life(tmp_path)
    parent = first.write([1, 2, 3, 4])
    child = first.write([5, 6, 7, 8], 4, parents=[parent])
    secret = first.write([9, 9, 9, 9], salt="tenant")
    first.keep(parent, child, secret)
    first.end()
    second = Life(tmp_path)
    assert second.recalls.start(second.begin(), [5, 6, 7, 8]) == 0, "without its parent"
    assert second.recalls.start(second.begin(), [9, 9, 9, 9]) == 0, "without its salt"
    assert second.recalls.start(second.begin(), [1, 2, 3]) == 0, "less than a page"
    parent = second.write([1, 2, 3, 4])
    second.write([5, 6, 7, 8], 4, parents=[parent])
    second.write([9, 9, 9, 9], salt="tenant")
    assert second.computed == 0
    second.end()


def test_what_is_missing_from_some_page_on_is_computed(tmp_path: Path) -> None:
    first = Life(tmp_path)
    node = first.write(list(range(16)))
    keys = first.begin().page_keys(list(range(16)))
    first.keep(node)
    first.end()
    second = Life(tmp_path)
    name = second.directory._name(keys[2])
    file = second.directory._file(name)
    file.write_bytes(file.read_bytes()[:-1])
    writer = second.begin()
    assert second.recalls.start(writer, list(range(16))) == 16
    assert second.finished() == Finished(writer, 8)
    second.compute(writer, list(range(8, 16)))
    writer.seal()
    assert second.store.stats().tokens_recalled == second.computed == 8
    second.end()


@pytest.mark.parametrize("how", ["abort", "rollback"])
def test_pages_of_a_writer_that_is_given_up_stay_its_until_the_recall_has_ended(
    tmp_path: Path, how: str
) -> None:
    first = Life(tmp_path)
    first.keep(first.write(list(range(16))))
    first.end()
    second = Life(tmp_path, num_pages=4)
    writer = second.begin()
    assert second.recalls.start(writer, list(range(16))) == 16
    getattr(writer, how)()
    assert second.store.num_unused == 0 and second.store.stats().pages_waiting == 4
    second.until(lambda: second.recalls.finish() == [] and not second.recalls.num_open)
    assert second.store.num_unused == 4
    if how == "rollback":
        assert second.recalls.start(writer, list(range(16))) == 16
        assert second.finished().num_tokens == 16
        writer.abort()
    second.end()


def test_an_evicted_state_is_restored_from_the_directory(tmp_path: Path) -> None:
    life = Life(tmp_path)
    node = life.write(list(range(16)))
    life.keep(node)
    life.until(lambda: life.transfer.stats.pages_written == 4)
    life.store.evict(node)
    life.store.evict_host(node)
    other = life.begin()
    other.reserve(life.store.num_unused * PAGE_SIZE)  # nothing is left in the cache
    other.abort()
    life.computed = 0
    writer = life.store.restore(node)
    assert writer.todo == list(range(16))
    assert life.recalls.start(writer, writer.todo) == 16
    assert life.finished().num_tokens == 16 and writer.todo == []
    assert writer.finish() is node and life.computed == 0
    assert life.store.tier(node) == "device"
    life.end()


def test_adopting_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    life = Life(tmp_path)
    writer = life.begin()
    with refused("invalid_count", "bases"):
        writer.adopt([1, 2, 3], [0])
    with refused("not_reserved"):
        writer.adopt([1, 2, 3, 4], [0])
    life.compute(writer, [1, 2, 3])
    for call in (lambda: writer.page_keys([4]), lambda: writer.adopt([4], [])):
        with refused("match_misaligned"):
            call()
    writer.abort()
    with refused("writer_closed"):
        writer.page_keys([4])
    life.end()


@pytest.mark.parametrize("how", ["waits", "abort"])
def test_a_recall_past_its_deadline_keeps_its_pages_and_nobody_else(tmp_path: Path, how: str) -> None:
    first = Life(tmp_path)
    first.keep(first.write(list(range(16))))
    first.end()
    clock = Clock()
    second = Life(tmp_path, num_pages=12, clock=clock, transfer_timeout_s=5.0)
    writer = second.begin()
    second.compute(writer, [7] * 4)
    writer.rollback()
    assert second.recalls.start(writer, list(range(16))) == 16
    if how == "abort":
        writer.abort()
    clock.now += 5.0
    expected = [Finished(writer, 0)] if how == "waits" else []
    assert second.recalls.finish() == expected, "whatever came was not polled"
    second.store.check()
    assert (second.recalls.num_open, second.recalls.num_lost) == (0, 1)
    stats = second.store.stats()
    assert (stats.open_fences, stats.pages_moving, stats.pages_waiting) == (0, 4, 0)
    assert second.store.num_unused == 8
    other = second.begin()
    assert second.recalls.start(other, list(range(16))) == 0, "it does not answer"
    second.compute(other, list(range(16)))
    other.abort()
    second.until(lambda: second.recalls.finish() == [] and not second.recalls.num_lost)
    assert second.store.num_unused == 12 and second.store.stats().pages_moving == 0
    if how == "waits":
        assert second.recalls.start(writer, list(range(16))) == 16 and second.finished().num_tokens == 16
        writer.abort()
    second.end()
