from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvstore_disk import PAGE_BYTES, BytesTransfer, base, content, directory, get, key, put, tokens
from kvstore_helpers import refused

from dagengine_kvstore import Completion, Copy
from dagengine_kvstore.conformance import TransferConformance
from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.persistent import PersistentTransfer


def wait(condition: Callable[[], object]) -> None:
    give_up = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < give_up
        time.sleep(0.001)


def until(transfer: PersistentTransfer, ticket: int) -> str | None:
    """Poll until the ticket, and no other, is reported; its error."""
    done: list[Completion] = []
    wait(lambda: done.extend(transfer.poll()) or done)
    (completion,) = done
    assert completion.ticket == ticket
    return completion.error


def store(pairs: dict[int, int], numbers: list[int]) -> Copy:
    """The pages of `numbers` from device pages to host pages."""
    return Copy(
        "store",
        tuple(pairs.items()),
        tuple(key(number) for number in numbers),
        tuple(base(number) for number in numbers),
        tuple(tokens(number) for number in numbers),
    )


def wanted(*pairs: tuple[int, int]) -> tuple[tuple[int, bytes, tuple[int, ...]], ...]:
    return tuple((host, key(number), tokens(number)) for host, number in pairs)


class Gate:
    """A directory whose reads and writes wait until they are let through."""

    def __init__(self, pages: PageDirectory) -> None:
        self.pages = pages
        self.begun, self.open = threading.Semaphore(0), threading.Semaphore(0)

    def put(self, *arguments: Any, **options: Any) -> bool:
        self.begun.release()
        self.open.acquire()
        return self.pages.put(*arguments, **options)

    def get(self, *arguments: Any) -> int | None:
        self.begun.release()
        self.open.acquire()
        return self.pages.get(*arguments)


def make(
    path: Path, *, gated: bool = False, host: int = 6, **options: Any
) -> tuple[PersistentTransfer, BytesTransfer, Any]:
    inner = BytesTransfer([content(number) for number in range(8)], host)
    pages: Any = Gate(directory(path)) if gated else directory(path)
    return PersistentTransfer(inner, inner.host, pages, **options), inner, pages


class TestAsATransfer(TransferConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self) -> PersistentTransfer:
        return make(self.path)[0]


def test_what_is_stored_comes_back_by_content_in_another_process_life(tmp_path: Path) -> None:
    transfer, inner, _ = make(tmp_path)
    assert until(transfer, transfer.submit(store({3: 0, 5: 1, 6: 2}, [3, 5, 6]))) is None
    transfer.close()
    assert transfer.stats.pages_written == 3
    again, inner, _ = make(tmp_path)
    assert again.holds(key(5)) and not again.holds(key(4))
    ticket = again.fetch(wanted((4, 6), (0, 3)))
    assert until(again, ticket) is None
    assert again.fetched(ticket) == (base(6), base(3))
    assert bytes(inner.host.page(4)) == content(6) and bytes(inner.host.page(0)) == content(3)
    with refused("unknown_ticket", "ticket"):
        again.fetched(ticket)
    assert until(again, again.submit(Copy("load", ((1, 4),)))) is None
    assert inner.device[1] == content(6)
    again.close()


def test_a_fetch_of_something_that_is_not_there_whole_is_absent(tmp_path: Path) -> None:
    transfer, _, pages = make(tmp_path)
    put(pages, 1)
    put(pages, 2)
    (file,) = [file for file in tmp_path.glob("??/*.page") if content(2) in file.read_bytes()]
    file.write_bytes(file.read_bytes()[:-1])
    for asked in (wanted((0, 1), (1, 9)), wanted((0, 2)), ((0, key(1), (99,)),)):
        ticket = transfer.fetch(asked)
        assert until(transfer, ticket) == "absent"
        with refused("unknown_ticket"):
            transfer.fetched(ticket)
    assert until(transfer, empty := transfer.fetch(())) is None and transfer.fetched(empty) == ()
    assert (transfer.stats.pages_fetched, transfer.stats.pages_absent) == (0, 3)
    transfer.close()


def test_pages_without_a_key_are_not_written(tmp_path: Path) -> None:
    transfer, _, pages = make(tmp_path)
    copy = Copy("store", ((0, 0), (1, 1)), (b"", key(1)), (0, base(1)), ((), tokens(1)))
    assert until(transfer, transfer.submit(copy)) is None
    assert until(transfer, transfer.submit(Copy("store", ((2, 2),)))) is None
    assert until(transfer, transfer.submit(Copy("load", ((2, 2),), (key(2),), (0,), (tokens(2),)))) is None
    transfer.close()
    assert pages.num_pages == 1 and get(pages, 1)


def test_a_host_page_is_not_overwritten_while_a_file_is_written_from_it(tmp_path: Path) -> None:
    transfer, inner, gate = make(tmp_path, gated=True)
    assert until(transfer, transfer.submit(store({1: 0, 2: 1}, [1, 2]))) is None
    gate.begun.acquire()  # page 1 is being written, page 2 waits for it
    behind = transfer.submit(store({3: 0}, [3]))
    after = transfer.submit(Copy("load", ((7, 0),)))
    assert until(transfer, transfer.submit(store({4: 1}, [4]))) is None  # page 2 is given up
    assert transfer.poll() == [] and bytes(inner.host.page(0)) == content(1)
    gate.open.release(9)
    done: list[Completion] = []
    wait(lambda: done.extend(transfer.poll()) or len(done) == 2)
    assert [completion.ticket for completion in done] == [behind, after]
    assert inner.device[7] == content(3)
    transfer.close()
    assert [number for number in range(8) if get(gate.pages, number)] == [1, 3, 4]
    assert transfer.stats.pages_given_up == 1


def test_more_pages_than_may_wait_give_up_the_oldest(tmp_path: Path) -> None:
    transfer, _, gate = make(tmp_path, gated=True, max_queued=2)
    copy = store({number: number for number in range(5)}, list(range(5)))
    assert until(transfer, transfer.submit(store({5: 5}, [5]))) is None
    gate.begun.acquire()
    assert until(transfer, transfer.submit(copy)) is None
    gate.open.release(9)
    transfer.close()
    assert [number for number in range(8) if get(gate.pages, number)] == [3, 4, 5]
    with refused("invalid_size", "max_queued"):
        make(tmp_path, max_queued=0)


def test_an_abort_takes_back_what_has_not_begun(tmp_path: Path) -> None:
    transfer, inner, gate = make(tmp_path, gated=True)
    put(gate.pages, 1)
    put(gate.pages, 2)
    running = transfer.fetch(wanted((0, 1)))
    gate.begun.acquire()
    waiting = transfer.fetch(wanted((1, 2)))
    assert not transfer.abort(running) and transfer.abort(waiting)
    assert until(transfer, waiting) == "absent"
    gate.open.release(9)
    assert until(transfer, running) is None
    assert transfer.abort(running) and transfer.abort(waiting) and transfer.abort(99)
    assert not any(inner.host.page(1))
    while gate.open.acquire(blocking=False):
        pass
    while gate.begun.acquire(blocking=False):
        pass
    assert until(transfer, transfer.submit(store({1: 3}, [4]))) is None
    gate.begun.acquire()
    held = transfer.submit(store({2: 3}, [5]))
    assert transfer.abort(held) and until(transfer, held) == "aborted"
    gate.open.release(9)
    transfer.close()
    assert bytes(inner.host.page(3)) == content(1)


def test_a_disk_that_fails_makes_pages_absent_and_nothing_else(tmp_path: Path) -> None:
    class Full:
        def put(self, *_: Any, consumed: Callable[[], None]) -> bool:
            consumed()
            raise OSError(28, "No space left on device")

        def get(self, *_: Any) -> int | None:
            raise OSError(5, "Input/output error")

    inner = BytesTransfer([content(number) for number in range(8)], 6)
    transfer = PersistentTransfer(inner, inner.host, Full())  # type: ignore[arg-type]
    assert until(transfer, transfer.submit(store({1: 0, 2: 1}, [1, 2]))) is None
    assert until(transfer, transfer.fetch(wanted((2, 1)))) == "absent"
    transfer.close()
    assert transfer.stats.pages_failed == 3


def test_a_fault_of_the_thread_is_raised_where_somebody_polls() -> None:
    class Broken:
        def get(self, *_: Any) -> int | None:
            raise ZeroDivisionError("a bug")

    inner = BytesTransfer([], 6)
    transfer = PersistentTransfer(inner, inner.host, Broken())  # type: ignore[arg-type]
    ticket = transfer.fetch(wanted((2, 1)))
    with pytest.raises(ZeroDivisionError):
        until(transfer, ticket)
    transfer.close()


def test_host_pages_that_are_not_there_are_refused(tmp_path: Path) -> None:
    transfer, _, _ = make(tmp_path)
    for page in (-1, 6):
        with refused("capacity", "pages"):
            transfer.fetch(wanted((page, 1)))
    assert transfer.poll() == []
    transfer.close()


@pytest.mark.parametrize("seed", range(5))
def test_random_stores_loads_and_fetches_never_give_wrong_bytes(tmp_path: Path, seed: int) -> None:
    """Host pages change hands while files are written from them and read into them; what is known of a page is true."""
    rng = random.Random(seed)
    transfer, inner, pages = make(tmp_path)
    host: dict[int, int | None] = {}  # host page -> number of its content
    running: dict[int, tuple[str, tuple[tuple[int, int], ...]]] = {}

    def poll() -> None:
        for completion in transfer.poll():
            kind, pairs = running.pop(completion.ticket)
            if kind == "fetch":
                for page, number in pairs:
                    host[page] = number if completion.error is None else None
                if completion.error is None:
                    assert transfer.fetched(completion.ticket) == tuple(base(number) for _, number in pairs)
            for page, number in pairs:
                if host.get(page) is not None:
                    assert bytes(inner.host.page(page)) == content(number), (kind, page, number)

    for _ in range(400):
        poll()
        if rng.random() < 0.3:
            time.sleep(0.001)
        busy = {page for _, pairs in running.values() for page, _ in pairs}
        free = [page for page in range(6) if page not in busy]
        chosen = rng.sample(free, min(len(free), rng.randint(1, 2)))
        if not chosen:
            time.sleep(0.0005)
            continue
        numbers = rng.sample(range(30), len(chosen))
        pairs = tuple(zip(chosen, numbers, strict=True))
        if rng.random() < 0.6:
            for page, number in pairs:
                inner.device[page] = content(number)
                host[page] = number
            running[transfer.submit(store({page: page for page in chosen}, numbers))] = "store", pairs
        else:
            for page in chosen:
                host[page] = None
            running[transfer.fetch(wanted(*pairs))] = "fetch", pairs
    wait(lambda: poll() or not running)
    transfer.close()
    assert sum(get(pages, number) is not None for number in range(30)) == pages.num_pages > 10
    assert transfer.stats.pages_fetched > 0 and PAGE_BYTES == len(inner.host.page(0))
