"""Bytes and order of TorchTransfer: on the CPU, on a simulated device that runs what it may in any order, on a GPU."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from kvstore_helpers import refused

torch = pytest.importorskip("torch")

from dagengine_kvstore import Completion, Copy, torch_transfer  # noqa: E402
from dagengine_kvstore.conformance import TransferContentsConformance  # noqa: E402
from dagengine_kvstore.extents import Method  # noqa: E402
from dagengine_kvstore.host_arena import HostArena  # noqa: E402
from dagengine_kvstore.torch_arena import TorchArena  # noqa: E402
from dagengine_kvstore.torch_copies import CpuCopies  # noqa: E402
from dagengine_kvstore.torch_transfer import TorchTransfer  # noqa: E402

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))
DEVICES = ("cpu", pytest.param("cuda", marks=GPU))
METHODS = (None, *Method)
SPIN_CYCLES = 200_000_000  # about 0.1 s


def arena(device: str = "cpu", pages: int = 12, **shape: Any) -> TorchArena:
    """An arena of random bytes."""
    sizes = {"num_layers": 3, "page_size": 4, "num_kv_heads": 2, "head_dim": 8, "dtype": torch.float16}
    made = TorchArena(num_pages=pages, device=device, **(sizes | shape))
    for layer in range(made.num_layers):
        raw(made, layer).copy_(torch.randint(0, 256, raw(made, layer).shape, dtype=torch.uint8))
    return made


def raw(arena: TorchArena, layer: int) -> Any:
    """The bytes of a layer, [num_pages, bytes]."""
    return arena.layer(layer).view(torch.uint8).view(arena.num_pages, -1)


def content(arena: TorchArena, page: int) -> bytes:
    return b"".join(bytes(raw(arena, layer)[page].tolist()) for layer in range(arena.num_layers))


def fill(arena: TorchArena, page: int, value: int) -> None:
    for layer in range(arena.num_layers):
        raw(arena, layer)[page].fill_(value)


def on_gpu(method: Method | None = None, **options: Any) -> Callable[[TorchArena, HostArena], Any]:
    from dagengine_kvstore.cuda_copies import CudaCopies

    return lambda arena, host: CudaCopies(arena, host, method=method, **options)


def finish(transfer: TorchTransfer, *tickets: int) -> None:
    """Poll until these tickets, and no others, were reported."""
    left = set(tickets)
    give_up = time.monotonic() + 60
    while left and time.monotonic() < give_up:
        for completion in transfer.poll():
            assert completion.error is None, completion.error
            left.remove(completion.ticket)
    assert not left


class TestOnTheCpu(TransferContentsConformance):
    device = "cpu"

    def make(self) -> TorchTransfer:
        self.arena = arena(self.device)
        return TorchTransfer(self.arena, 4)

    def fill(self, transfer: Any, page: int, value: int) -> None:
        fill(self.arena, page, value)

    def contents(self, transfer: Any, page: int) -> object:
        return content(self.arena, page)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
class TestOnAGpu(TestOnTheCpu):
    device = "cuda"

    def fill(self, transfer: Any, page: int, value: int) -> None:
        super().fill(transfer, page, value)
        torch.cuda.synchronize()  # the kit loads into pages that it has filled


CASES = [("cpu", None), *(pytest.param("cuda", method, marks=GPU) for method in METHODS)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("layers", "page_size", "head_dim"), [(1, 16, 64), (3, 4, 8), (2, 3, 5), (5, 16, 128)]
)
@pytest.mark.parametrize(("device", "method"), CASES)
def test_pages_come_back_as_they_were_and_no_other_page_changes(
    device: str, method: Method | None, layers: int, page_size: int, head_dim: int, dtype: str
) -> None:
    shape = {
        "num_layers": layers,
        "page_size": page_size,
        "head_dim": head_dim,
        "dtype": getattr(torch, dtype),
    }
    pages = arena(device, **shape)
    options = {"copies": on_gpu(method, staging_bytes=3 * pages.page_bytes)} if device == "cuda" else {}
    transfer = TorchTransfer(pages, 20, chunk_bytes=7 * pages.page_bytes, **options)
    before = [content(pages, page) for page in range(12)]
    moved = [3, 4, 5, 9, 0, 11, 2]
    hosts = [4, 5, 6, 7, 19, 18, 0]
    finish(transfer, transfer.submit(Copy("store", tuple(zip(moved, hosts, strict=True)))))
    assert [bytes(transfer.host.page(host)) for host in hosts] == [before[page] for page in moved]
    assert not any(transfer.host.page(1)) and not any(transfer.host.page(8))
    for page in moved:
        fill(pages, page, 0xEE)
    targets = [*reversed(moved)]
    if device == "cuda":
        torch.cuda.synchronize()
    finish(transfer, transfer.submit(Copy("load", tuple(zip(targets, hosts, strict=True)))))
    for page in range(12):
        expected = before[moved[targets.index(page)]] if page in moved else before[page]
        assert content(pages, page) == expected
    transfer.close()


@pytest.mark.parametrize("device", DEVICES)
def test_what_is_not_a_copy_of_pages_that_are_there_is_refused_before_anything_moves(device: str) -> None:
    transfer = TorchTransfer(arena(device), 4)
    for pages, code in (
        (((12, 0),), "capacity"),
        (((-1, 0),), "capacity"),
        (((0, 4),), "capacity"),
        (((0, 1), (0, 2)), "invalid_pages"),
        (((1, 0), (2, 0)), "invalid_pages"),
    ):
        for kind in ("store", "load"):
            with refused(code, "pages"):
                transfer.submit(Copy(kind, pages))
    assert transfer.poll() == () and transfer.host.num_bytes == 0
    finish(transfer, transfer.submit(Copy("store", ())))
    transfer.close()
    with refused("transfer_closed"):
        transfer.submit(Copy("store", ()))
    with refused("invalid_size", "store_bytes_per_s"):
        TorchTransfer(arena(), 4, store_bytes_per_s=0)


@pytest.mark.parametrize("many", [1, 1000])
def test_a_refused_copy_is_refused_however_many_pages_it_has(
    monkeypatch: pytest.MonkeyPatch, many: int
) -> None:
    monkeypatch.setattr(torch_transfer, "MANY_PAGES", many)
    transfer = TorchTransfer(arena(), 12)
    rng = random.Random(0)
    for _ in range(40):
        sides = [rng.sample(range(12), 6) for _ in range(2)]
        finish(transfer, transfer.submit(Copy("store", tuple(zip(*sides, strict=True)))))
        side, at, wrong = rng.randrange(2), rng.randrange(6), rng.choice((-1, 12, 1 << 40, None))
        code = "invalid_pages" if wrong is None else "capacity"
        sides[side][at] = sides[side][at - 1] if wrong is None else wrong
        with refused(code, "pages"):
            transfer.submit(Copy("load", tuple(zip(*sides, strict=True))))
    assert transfer.poll() == ()


class Work:
    """Something queued on a simulated device."""

    def __init__(self, run: Callable[[], None], after: Sequence[Work]) -> None:
        self.run, self.after, self.done = run, list(after), False

    def query(self) -> bool:
        return self.done


class SimulatedCopies(CpuCopies):
    """Copies that are done when `step` picks them: any whose `after` is done. Writes of the compute stream likewise."""

    edges = True

    def __init__(self, arena: TorchArena, host: HostArena) -> None:
        super().__init__(arena, host)
        self.queued: list[Work] = []
        self.compute = Work(lambda: None, ())
        self.compute.done = True

    def mark(self) -> Work:
        return self.compute

    def write(self, run: Callable[[], None]) -> None:
        self.compute = Work(run, [self.compute])
        self.queued.append(self.compute)

    def issue(self, kind: Any, pages: Any, after: Sequence[Any]) -> Work:
        copy = super().issue
        work = Work(lambda: copy(kind, pages, ()), after if self.edges else ())
        self.queued.append(work)
        return work

    def step(self, rng: random.Random) -> None:
        ready = [work for work in self.queued if all(before.done for before in work.after)]
        if ready:
            work = rng.choice(ready)
            work.run()
            work.done = True
            self.queued.remove(work)

    def wait(self) -> None:
        rng = random.Random(0)
        while self.queued:
            self.step(rng)

    def close(self) -> None:
        self.wait()


def schedule(seed: int, copies: type[SimulatedCopies]) -> bool:
    """Random stores, loads and writes, in whatever order a device may run them. Whether everything is as in order."""
    rng = random.Random(seed)
    pages = arena(pages=6, num_layers=1, page_size=1, num_kv_heads=1, head_dim=1)
    rate = rng.choice((None, 1.0))
    clock = iter(range(10**9))
    transfer = TorchTransfer(pages, 5, copies=copies, store_bytes_per_s=rate, clock=lambda: 0.5 * next(clock))
    device: SimulatedCopies = transfer._copies  # type: ignore[assignment]
    near = [content(pages, page) for page in range(6)]
    far = [bytes(4)] * 5
    open_tickets: dict[int, Copy] = {}

    def poll() -> None:
        for completion in transfer.poll():
            assert completion.error is None
            del open_tickets[completion.ticket]

    for value in range(60):
        for _ in range(rng.randint(0, 3)):
            device.step(rng)
        if rng.random() < 0.5:
            poll()
        kind = rng.choice(("store", "load", "write"))
        if kind == "write":  # a step writes only pages under no ticket
            busy = {page for copy in open_tickets.values() for page, _ in copy.pages}
            free = [page for page in range(6) if page not in busy]
            if free:
                page = rng.choice(free)
                device.write(lambda page=page, value=value: fill(pages, page, value))
                near[page] = bytes([value] * 4)
            continue
        count = rng.randint(1, 3)
        pairs = tuple(zip(rng.sample(range(6), count), rng.sample(range(5), count), strict=True))
        # A load goes to pages that no queued write touches.
        if kind == "load" and not device.compute.done:
            continue
        open_tickets[transfer.submit(Copy(kind, pairs))] = Copy(kind, pairs)
        for page, host in pairs:
            if kind == "store":
                far[host] = near[page]
            else:
                near[page] = far[host]
    for _ in range(10_000):
        device.step(rng)
        poll()
        if not open_tickets and not device.queued:
            break
    assert not open_tickets
    return [content(pages, page) for page in range(6)] == near and [
        bytes(transfer.host.page(page)) for page in range(5)
    ] == far


@pytest.mark.parametrize("seed", range(60))
def test_any_order_that_a_device_may_choose_gives_what_the_order_of_submits_gives(seed: int) -> None:
    assert schedule(seed, SimulatedCopies)


def test_without_the_edges_between_copies_and_writes_bytes_differ() -> None:
    class NoEdges(SimulatedCopies):
        edges = False

    assert not all(schedule(seed, NoEdges) for seed in range(10))


def test_tickets_over_one_page_wait_for_each_other_and_others_do_not() -> None:
    seen: list[tuple[str, list[Any]]] = []

    class Watched(SimulatedCopies):
        def issue(self, kind: Any, pages: Any, after: Sequence[Any]) -> Work:
            work = super().issue(kind, pages, after)
            seen.append((work, list(after)))  # type: ignore[arg-type]
            return work

    transfer = TorchTransfer(arena(), 8, copies=Watched)
    transfer.submit(Copy("load", ((0, 0), (1, 1))))
    transfer.submit(Copy("load", ((2, 2),)))
    transfer.submit(Copy("store", ((0, 3),)))  # the device page of the first
    transfer.submit(Copy("load", ((5, 3),)))  # the host page of the third
    transfer.submit(Copy("load", ((6, 6),)))
    (first, a), (_, b), (third, c), (_, d), (_, e) = seen
    compute = transfer._copies.compute  # type: ignore[attr-defined]
    assert (a, b, c, d, e) == ([], [], [first, compute], [third], [])


def test_a_store_rate_holds_stores_back_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_transfer, "PACED_BYTES", 16)
    now = [0.0]
    pages = arena(num_layers=1, page_size=1, num_kv_heads=1, head_dim=2)  # 8 bytes a page
    issued: list[tuple[str, int]] = []

    class Watched(CpuCopies):
        def issue(self, kind: Any, pages: Any, after: Sequence[Any]) -> Any:
            issued.append((kind, pages.shape[1]))
            return super().issue(kind, pages, after)

    transfer = TorchTransfer(pages, 8, copies=Watched, store_bytes_per_s=16, clock=lambda: now[0])
    stored = transfer.submit(Copy("store", ((0, 0), (1, 1), (2, 2), (3, 3), (4, 4))))
    loaded = transfer.submit(Copy("load", ((9, 7),)))
    behind = transfer.submit(
        Copy("load", ((8, 0),))
    )  # what the store has written, but the store is not issued
    assert issued == [("store", 2), ("load", 1)]
    assert transfer.poll() == (Completion(loaded),)
    now[0] = 1.1
    assert transfer.poll() == ()
    assert issued[2:] == [("store", 2)]
    now[0] = 2.2
    assert transfer.poll() == (Completion(stored), Completion(behind))
    assert issued[3:] == [("store", 1), ("load", 1)]
    assert content(pages, 8) == content(pages, 0)


def test_a_load_behind_a_store_that_the_rate_holds_back_holds_no_other_load_back() -> None:
    transfer = TorchTransfer(arena(), 8, copies=SimulatedCopies, store_bytes_per_s=1.0, clock=lambda: 0.0)
    device: SimulatedCopies = transfer._copies  # type: ignore[assignment]
    running = transfer.submit(Copy("store", ((0, 0),)))
    waiting = transfer.submit(Copy("store", ((1, 1),)))
    behind = transfer.submit(Copy("load", ((2, 1),)))
    free = transfer.submit(Copy("load", ((3, 5),)))
    after_both = transfer.submit(Copy("load", ((3, 1),)))
    device.wait()
    assert sorted(done.ticket for done in transfer.poll()) == [running, free]
    assert {waiting, behind, after_both} == set(transfer._open)


def test_an_abort_takes_back_what_is_not_issued_and_waits_for_what_is() -> None:
    transfer = TorchTransfer(arena(), 8, copies=SimulatedCopies, store_bytes_per_s=1.0, clock=lambda: 0.0)
    device: SimulatedCopies = transfer._copies  # type: ignore[assignment]
    running = transfer.submit(Copy("store", ((0, 0),)))
    waiting = transfer.submit(Copy("store", ((1, 1),)))
    behind = transfer.submit(Copy("load", ((2, 1),)))
    assert transfer.abort(99) and not transfer.abort(running)
    assert transfer.abort(waiting)
    assert [done.ticket for done in transfer.poll() if done.error] == [waiting]
    device.wait()
    assert transfer.abort(running)
    assert sorted(done.ticket for done in transfer.poll()) == [running, behind]
    assert transfer.abort(running) and transfer.abort(waiting)
    assert not any(transfer.host.page(1))


def test_what_ran_behind_an_aborted_ticket_runs_behind_what_that_has_waited_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_transfer, "PACED_BYTES", 16)
    now = [0.0]
    issued: list[Any] = []

    class Watched(SimulatedCopies):
        def issue(self, kind: Any, pages: Any, after: Sequence[Any]) -> Work:
            issued.append((kind, *pages.T.tolist()))
            return super().issue(kind, pages, after)

    pages = arena(num_layers=1, page_size=1, num_kv_heads=1, head_dim=4)  # 16 bytes a page
    transfer = TorchTransfer(pages, 8, copies=Watched, store_bytes_per_s=16, clock=lambda: now[0])
    transfer.submit(Copy("store", ((0, 0), (1, 1))))  # its second page is not issued yet
    aborted = [transfer.submit(Copy("load", ((page, 1),))) for page in (2, 3)]
    transfer.submit(Copy("load", ((4, 1),)))
    assert transfer.abort(aborted[1]) and transfer.abort(aborted[0])
    transfer.submit(Copy("load", ((2, 5),)))
    transfer.submit(Copy("load", ((5, 1),)))
    assert sorted(done.ticket for done in transfer.poll()) == aborted
    transfer.submit(Copy("load", ((6, 1),)))
    assert issued == [("store", [0, 0])]
    now[0] = 1.5
    transfer.poll()
    assert issued[1:] == [("store", [1, 1])] + [("load", pair) for pair in ([4, 1], [2, 5], [5, 1], [6, 1])]


def test_a_store_rate_saves_nothing_up_while_nothing_waits_and_issues_what_is_due_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_transfer, "PACED_BYTES", 16)
    now = [0.0]
    issued: list[int] = []

    class Watched(CpuCopies):
        def issue(self, kind: Any, pages: Any, after: Sequence[Any]) -> Any:
            issued.append(pages.shape[1])
            return super().issue(kind, pages, after)

    pages = arena(pages=40, num_layers=1, page_size=1, num_kv_heads=1, head_dim=1)  # 4 bytes a page
    transfer = TorchTransfer(pages, 40, copies=Watched, store_bytes_per_s=1024, clock=lambda: now[0])
    now[0] = 10.0
    transfer.submit(Copy("store", tuple((page, page) for page in range(40))))
    assert issued == [4]
    now[0] = 10.0 + 40 / 1024  # 24 bytes are due beyond the 16 that were issued
    transfer.poll()
    assert issued == [4, 6, 4]
    now[0] = 11.0
    transfer.poll()
    assert issued == [4, 6, 4, 12, 4]


def test_a_fault_of_the_device_is_the_error_of_its_ticket() -> None:
    class Faulty(CpuCopies):
        def issue(self, kind: Any, pages: Any, after: Sequence[Any]) -> Any:
            if kind == "load":
                raise RuntimeError("no")
            return super().issue(kind, pages, after)

        def wait(self) -> None:
            waited.append(1)

    waited: list[int] = []
    transfer = TorchTransfer(arena(), 8, copies=Faulty)
    tickets = [transfer.submit(Copy(kind, ((0, 0),))) for kind in ("store", "load", "store")]
    assert transfer.poll() == (
        Completion(tickets[0]),
        Completion(tickets[1], "RuntimeError: no"),
        Completion(tickets[2]),
    )
    assert waited == [1], "what it had begun has ended before the error is told"


def test_a_ticket_whose_submit_was_interrupted_is_still_run_ahead_of_later_ones() -> None:
    class Interrupted(SimulatedCopies):
        interrupt = True

        def issue(self, kind: Any, pages: Any, after: Sequence[Any]) -> Work:
            if self.interrupt:
                raise KeyboardInterrupt
            return super().issue(kind, pages, after)

    pages = arena()
    transfer = TorchTransfer(pages, 8, copies=Interrupted)
    device: Interrupted = transfer._copies  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        transfer.submit(Copy("store", ((0, 1),)))
    device.interrupt = False
    transfer.submit(Copy("load", ((2, 1),)))
    assert [len(work.after) for work in device.queued] == [1, 1]
    assert device.queued[1].after == [device.queued[0]]
    device.wait()
    assert len(transfer.poll()) == 2 and content(pages, 2) == content(pages, 0)


@pytest.mark.parametrize("how", ["close", "forget"])
def test_closing_waits_for_what_runs_and_reports_every_ticket(how: str) -> None:
    transfer = TorchTransfer(arena(), 8, copies=SimulatedCopies, store_bytes_per_s=1.0, clock=lambda: 0.0)
    device: SimulatedCopies = transfer._copies  # type: ignore[assignment]
    running = transfer.submit(Copy("store", ((0, 0),)))
    waiting = transfer.submit(Copy("store", ((1, 1),)))
    if how == "close":
        transfer.close()
        transfer.close()
        assert [(done.ticket, done.error is None) for done in transfer.poll()] == [
            (running, True),
            (waiting, False),
        ]
        assert transfer.poll() == ()
    else:
        del transfer
        gc.collect()
    assert device.queued == []


def test_the_kernel_copies_what_it_should_under_the_interpreter() -> None:
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", KERNEL_CHECK],
        env=dict(os.environ) | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


KERNEL_CHECK = """
import torch
from dagengine_kvstore.page_kernel import copy_pages

for size in (3, 24, 64, 20480):
    layers = [torch.randint(0, 256, (6, size), dtype=torch.uint8) for _ in range(3)]
    before = [layer.clone() for layer in layers]
    other = torch.zeros(4, 3 * size, dtype=torch.uint8)
    addresses = torch.tensor([layer.data_ptr() for layer in layers])
    near, far = (5, 0, 3), (2, 0, 1)
    targets = torch.tensor([other[page].data_ptr() for page in far])
    copy_pages(addresses, torch.tensor(near), targets, size, store=True, num_programs=2)
    for page, host in zip(near, far):
        assert torch.equal(other[host], torch.cat([layer[page] for layer in layers])), size
    assert not other[3].any()
    for layer in layers:
        layer[list(near)] = 7
    copy_pages(addresses, torch.tensor(near), targets, size, store=False, num_programs=64)
    assert all(map(torch.equal, layers, before)), size
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("edge", [True, False])
def test_no_store_overtakes_the_write_of_a_page(method: Method | None, edge: bool) -> None:
    """Pages are written behind a kernel that spins. Without the edge to the compute stream old bytes are stored."""
    pages = arena("cuda", num_layers=2, page_size=64, num_kv_heads=8, head_dim=128)
    for page in range(12):
        fill(pages, page, 1)
    transfer = TorchTransfer(pages, 12, copies=on_gpu(method))
    transfer.host.prepare(12)
    finish(transfer, transfer.submit(Copy("store", ((0, 0),))))
    torch.cuda.synchronize()
    if not edge:
        idle = torch.cuda.Event()
        idle.record(torch.cuda.Stream())
        transfer._copies.mark = lambda: idle  # type: ignore[method-assign]
    torch.cuda._sleep(SPIN_CYCLES)
    for page in range(12):
        fill(pages, page, 2)
    ticket = transfer.submit(Copy("store", tuple((page, page) for page in range(12))))
    assert not edge or transfer.poll() == (), "submit and poll do not wait"
    finish(transfer, ticket)
    stored = {bytes(transfer.host.page(page)) for page in range(12)}
    torch.cuda.synchronize()
    assert stored == {bytes([2 if edge else 1]) * pages.page_bytes}
    transfer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("seed", range(40))
def test_random_schedules_on_a_gpu_give_what_the_order_of_submits_gives(seed: int) -> None:
    """Writes behind spinning kernels, stores, loads, and chains of them over the same pages, without waiting."""
    rng = random.Random(seed)
    shape = rng.choice(
        (
            {"num_layers": 1, "page_size": 16, "num_kv_heads": 2, "head_dim": 64},
            {"num_layers": 4, "page_size": 16, "num_kv_heads": 8, "head_dim": 128},
            {"num_layers": 3, "page_size": 5, "num_kv_heads": 1, "head_dim": 3},
        )
    )
    pages = arena("cuda", pages=16, **shape)
    method = rng.choice(METHODS)
    transfer = TorchTransfer(
        pages,
        12,
        chunk_bytes=5 * pages.page_bytes,
        store_bytes_per_s=rng.choice((None, None, 4e9)),
        copies=on_gpu(method, staging_bytes=2 * pages.page_bytes, batch=rng.random() < 0.7),
    )
    transfer.host.prepare(12)
    near = [content(pages, page) for page in range(16)]
    far = [bytes(pages.page_bytes)] * 12
    open_tickets: dict[int, Copy] = {}

    def poll() -> None:
        for completion in transfer.poll():
            assert completion.error is None, completion.error
            del open_tickets[completion.ticket]

    for value in range(60):
        poll()
        kind = rng.choice(("store", "load", "write", "write"))
        busy = {page for copy in open_tickets.values() for page, _ in copy.pages}
        if kind == "write":
            if rng.random() < 0.3:
                torch.cuda._sleep(rng.randint(1, SPIN_CYCLES // 100))
            free = [page for page in range(16) if page not in busy]
            for page in rng.sample(free, min(2, len(free))):
                fill(pages, page, value)
                near[page] = bytes([value]) * pages.page_bytes
            continue
        if kind == "load":
            torch.cuda.current_stream().synchronize()  # no step may touch where a load goes
        count = rng.randint(1, 6)
        pairs = tuple(zip(rng.sample(range(16), count), rng.sample(range(12), count), strict=True))
        open_tickets[transfer.submit(Copy(kind, pairs))] = Copy(kind, pairs)
        for page, host in pairs:
            if kind == "store":
                far[host] = near[page]
            else:
                near[page] = far[host]
    while open_tickets:
        poll()
    torch.cuda.synchronize()
    assert [content(pages, page) for page in range(16)] == near, method
    assert [bytes(transfer.host.page(page)) for page in range(12)] == far, method
    transfer.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
def test_pinned_memory_is_given_up_and_tickets_survive_the_close() -> None:
    pages = arena("cuda")
    transfer = TorchTransfer(pages, 8)
    torch.cuda._sleep(SPIN_CYCLES)
    ticket = transfer.submit(Copy("store", ((0, 5),)))
    transfer.close()
    assert transfer.poll() == (Completion(ticket),)
    assert bytes(transfer.host.page(5)) == content(pages, 0)
    driver = transfer._copies._driver  # type: ignore[attr-defined]
    with refused("device_error"):
        driver.unpin(transfer.host.address(0))
