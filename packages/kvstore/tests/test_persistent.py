from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kvstore_disk import BytesTransfer, base, content, directory, get, key, put, tokens
from kvstore_helpers import refused

from dagengine_kvstore import Completion, Copy
from dagengine_kvstore.conformance import TransferContentsConformance
from dagengine_kvstore.directory import PageDirectory
from dagengine_kvstore.directory_worker import Wanted
from dagengine_kvstore.persistent import PersistentTransfer, Recalled


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
        keys=tuple(key(number) for number in numbers),
        tokens=tuple(tokens(number) for number in numbers),
        bases=tuple(base(number) for number in numbers),
    )


def wanted(*pairs: tuple[int, int]) -> list[Wanted]:
    """(device page, number) each."""
    return [Wanted(page, key(number), tokens(number)) for page, number in pairs]


def recall(transfer: PersistentTransfer, asked: list[Wanted]) -> tuple[int, ...]:
    """Bases of what came."""
    number = transfer.recall(asked)
    ended: list[Recalled] = []
    wait(lambda: transfer.poll() or ended.extend(transfer.recalled()) or ended)
    (recalled,) = ended
    assert recalled.recall == number
    return recalled.bases


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
    path: Path, *, gated: bool = False, host: int = 8, **options: Any
) -> tuple[PersistentTransfer, BytesTransfer, Any]:
    inner = BytesTransfer([content(number) for number in range(8)], host)
    pages: Any = Gate(directory(path)) if gated else directory(path)
    return PersistentTransfer(inner, inner.host, pages, **({"num_spare": 2} | options)), inner, pages


class TestAsATransfer(TransferContentsConformance):
    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = tmp_path

    def make(self) -> PersistentTransfer:
        self.made, self.inner, _ = make(self.path)
        return self.made

    def fill(self, transfer: Any, page: int, value: int) -> None:
        self.inner.device[page] = content(value)

    def contents(self, transfer: Any, page: int) -> object:
        return self.inner.device[page]


def test_what_is_stored_comes_back_by_content_in_another_process_life(tmp_path: Path) -> None:
    transfer, inner, _ = make(tmp_path)
    assert transfer.num_host_pages == 6
    assert until(transfer, transfer.submit(store({3: 0, 5: 1, 6: 2}, [3, 5, 6]))) is None
    transfer.close()
    assert transfer.stats.pages_written == 3
    again, inner, _ = make(tmp_path)
    assert again.holds(key(5)) and not again.holds(key(4))
    assert recall(again, wanted((0, 6), (7, 3), (1, 5))) == (base(6), base(3), base(5))
    assert [inner.device[page] for page in (0, 7, 1)] == [content(6), content(3), content(5)]
    assert again.stats.pages_recalled == 3
    again.close()


def test_a_recall_ends_at_the_first_page_that_is_not_there_whole(tmp_path: Path) -> None:
    transfer, inner, pages = make(tmp_path)
    for number in (1, 2, 3, 4):
        put(pages, number)
    (file,) = [file for file in tmp_path.glob("??/*.page") if content(2) in file.read_bytes()]
    file.write_bytes(file.read_bytes()[:-1])
    before = list(inner.device)
    assert recall(transfer, wanted((0, 3), (5, 4), (6, 1), (7, 9), (2, 1))) == (base(3), base(4), base(1))
    before[0], before[5], before[6] = content(3), content(4), content(1)
    for asked in (wanted((7, 9)), wanted((7, 2)), [Wanted(7, key(1), (99,))], []):
        assert recall(transfer, asked) == ()
    assert inner.device == before
    transfer.close()


def test_recalls_of_many_pages_go_through_the_spare_ones_in_order(tmp_path: Path) -> None:
    transfer, inner, pages = make(tmp_path)
    for number in range(8):
        put(pages, number)
    first = transfer.recall(wanted(*((page, 7 - page) for page in range(5))))
    second = transfer.recall(wanted((5, 5), (6, 6)))
    ended: list[Recalled] = []
    wait(lambda: transfer.poll() or ended.extend(transfer.recalled()) or len(ended) == 2)
    assert ended == [
        Recalled(first, tuple(base(7 - page) for page in range(5))),
        Recalled(second, (base(5), base(6))),
    ]
    assert inner.device[:7] == [content(number) for number in (7, 6, 5, 4, 3, 5, 6)]
    transfer.close()


@pytest.mark.parametrize("how", ["refused", "failed"])
def test_what_cannot_be_loaded_does_not_come(tmp_path: Path, how: str) -> None:
    transfer, inner, pages = make(tmp_path)
    put(pages, 1)
    put(pages, 2)
    submit = inner.submit

    def fails(copy: Copy) -> int:
        if how == "refused":
            raise RuntimeError("no")
        ticket = submit(copy)
        inner.done[-1] = Completion(ticket, "no")
        return ticket

    inner.submit = fails  # type: ignore[method-assign]
    assert recall(transfer, wanted((0, 1), (1, 2))) == ()
    assert transfer.stats.pages_failed == 2
    inner.submit = submit  # type: ignore[method-assign]
    assert recall(transfer, wanted((0, 1), (1, 2))) == (base(1), base(2))
    transfer.close()


def test_pages_without_a_key_are_not_written(tmp_path: Path) -> None:
    transfer, _, pages = make(tmp_path)
    copy = Copy("store", ((0, 0), (1, 1)), (b"", key(1)), ((), tokens(1)), (0, base(1)))
    assert until(transfer, transfer.submit(copy)) is None
    assert until(transfer, transfer.submit(Copy("store", ((2, 2),)))) is None
    assert until(transfer, transfer.submit(Copy("load", ((2, 2),), (key(2),), (tokens(2),), (0,)))) is None
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
    for options, field in (
        ({"max_queued": 0}, "max_queued"),
        ({"num_spare": 0}, "num_spare"),
        ({"num_spare": 9}, "num_spare"),
        ({"close_timeout_s": 0.0}, "close_timeout_s"),
        ({"close_timeout_s": float("nan")}, "close_timeout_s"),
    ):
        with refused("invalid_size", field):
            make(tmp_path, **options)


def test_an_abort_takes_back_what_is_held(tmp_path: Path) -> None:
    transfer, inner, gate = make(tmp_path, gated=True)
    assert until(transfer, transfer.submit(store({1: 3}, [1]))) is None
    gate.begun.acquire()
    held = transfer.submit(store({2: 3}, [2]))
    assert transfer.abort(held) and until(transfer, held) == "aborted"
    assert transfer.abort(held) and transfer.abort(99)
    gate.open.release(9)
    transfer.close()
    assert bytes(inner.host.page(3)) == content(1)


def test_what_was_aborted_after_it_ended_is_not_written_from_a_page_that_is_used_again(
    tmp_path: Path,
) -> None:
    transfer, inner, pages = make(tmp_path)
    first = transfer.submit(store({1: 3}, [1]))
    assert transfer.abort(first)
    second = transfer.submit(store({2: 3}, [2]))
    assert until(transfer, second) is None
    transfer.close()
    assert [number for number in range(8) if get(pages, number)] == [2]
    assert bytes(inner.host.page(3)) == content(2)


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
    assert recall(transfer, wanted((2, 1), (3, 2))) == ()
    transfer.close()
    assert transfer.stats.pages_failed == 3


def test_a_fault_of_the_thread_is_raised_where_somebody_polls() -> None:
    class Broken:
        def get(self, *_: Any) -> int | None:
            raise ZeroDivisionError("a bug")

    inner = BytesTransfer([], 6)
    transfer = PersistentTransfer(inner, inner.host, Broken())  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        recall(transfer, wanted((2, 1)))
    transfer.close()


@pytest.mark.parametrize("hangs", ["write", "read"])
def test_closing_waits_for_a_disk_that_does_not_answer_only_so_long(
    tmp_path: Path, hangs: str, caplog: pytest.LogCaptureFixture
) -> None:
    transfer, _, gate = make(tmp_path, gated=True, close_timeout_s=0.05)
    if hangs == "read":
        transfer.recall(wanted((7, 6)))
    else:
        assert until(transfer, transfer.submit(store({6: 4}, [6]))) is None
    gate.begun.acquire()
    assert until(transfer, transfer.submit(store({number: number for number in range(3)}, [0, 1, 2]))) is None
    transfer.close()
    assert transfer.stats.pages_given_up == 3
    (record,) = caplog.records
    assert record.levelname == "WARNING" and "3 pages are not written" in record.getMessage()
    transfer.close()
    gate.open.release(9)
    wait(lambda: not transfer._worker._thread.is_alive())
    assert [number for number in range(8) if get(gate.pages, number)] == ([] if hangs == "read" else [6])


def test_the_spare_pages_are_not_the_stores(tmp_path: Path) -> None:
    transfer, _, _ = make(tmp_path)
    for page in (-1, 6):
        with refused("capacity", "pages"):
            transfer.submit(store({0: page}, [0]))
    assert transfer.poll() == []
    transfer.close()


@pytest.mark.parametrize("seed", range(5))
def test_random_stores_and_recalls_never_give_wrong_bytes(tmp_path: Path, seed: int) -> None:
    """Host pages change hands while files are written from them; what comes back is what its content says."""
    rng = random.Random(seed)
    transfer, inner, pages = make(tmp_path)
    inner.device.extend(inner.device[:4])  # recalls go to the last 4
    running: dict[int, list[int]] = {}
    recalls: dict[int, list[int]] = {}
    aborted: set[int] = set()
    came = 0

    def poll() -> None:
        nonlocal came
        for completion in transfer.poll():
            if completion.ticket not in aborted:
                assert completion.error is None
                del running[completion.ticket]
        for recalled in transfer.recalled():
            numbers = recalls.pop(recalled.recall)
            for place, got in enumerate(recalled.bases):
                assert got == base(numbers[place]) and inner.device[8 + place] == content(numbers[place])
            came += len(recalled.bases)

    for _ in range(400):
        poll()
        if rng.random() < 0.3:
            time.sleep(0.001)
        if running and rng.random() < 0.1:
            aborted.add(ticket := rng.choice([*running]))
            assert transfer.abort(ticket)
            del running[ticket]
        busy = {page for hosts in running.values() for page in hosts}
        free = [page for page in range(6) if page not in busy]
        chosen = rng.sample(free, min(len(free), rng.randint(1, 2)))
        numbers = rng.sample(range(30), len(chosen))
        if not chosen:
            time.sleep(0.0005)
        elif rng.random() < 0.6:
            for page, number in zip(chosen, numbers, strict=True):
                inner.device[page] = content(number)
            running[transfer.submit(store({page: page for page in chosen}, numbers))] = chosen
        elif not recalls:
            numbers = rng.sample(range(30), rng.randint(1, 4))
            recalls[transfer.recall(wanted(*((8 + i, number) for i, number in enumerate(numbers))))] = numbers
            if rng.random() < 0.2:
                wait(lambda: poll() or not recalls)
    wait(lambda: poll() or not (running or recalls))
    transfer.close()
    assert sum(get(pages, number) is not None for number in range(30)) == pages.num_pages > 10
    assert came > 10
