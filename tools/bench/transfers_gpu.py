"""Measures copies of KV pages on a GPU: checks the bytes, then times ways to copy, and a memory-bound step beside them.

A case is an arena and one ticket of scattered pages: no two are neighbours on the host, so an extent of the host is a
page. `rate` is by a wall clock, from before the submit until the end is known, and so counts the host's work;
`device rate` is by events, of copies that were all queued before the first could begin.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.kernels_record import Figure
from bench.transfers_report import BACKGROUND, CEILINGS, CHOSEN, DEVICE_RATE, LARGE_BYTES, RATE, STEPS, SUBMIT
from dagengine_kvstore import Copy
from dagengine_kvstore.cuda_copies import CudaCopies
from dagengine_kvstore.extents import Method
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_kvstore.torch_copies import Direction, page_rows
from dagengine_kvstore.torch_transfer import BACKGROUND_BYTES_PER_S, TorchTransfer

ONE_CALL_EACH = "direct, one call per extent"

PEAK = "one pinned copy"
DIRECTIONS: tuple[Direction, ...] = ("store", "load")
MOST_PAGES = 4096
LEAST_APART = 32 << 10  # bytes of an extent; below, the copy engine is far behind on a page of many layers
STEP_BYTES = 8 << 30
PARTS = 4
BESIDE_S = 0.12
BESIDE_TURNS = 3
CYCLES_PER_S = 2e9
DEVICE_TURNS = 3


@dataclass(frozen=True)
class Case:
    """Pages of `num_layers` layers with `layer_bytes` bytes in each."""

    name: str
    num_layers: int
    layer_bytes: int

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.layer_bytes


def named(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def kv(name: str, layers: int, kv_heads: int, head_dim: int, page_size: int) -> Case:
    """The pages of a model in a dtype of two bytes."""
    return Case(f"{name}, page size {page_size}", layers, 2 * kv_heads * page_size * head_dim * 2)


EXTENTS = tuple(
    Case(f"extents of {named(size)}", 1, size) for size in (1 << shift for shift in range(12, 27))
)
SHAPES = (
    kv("8B", 32, 8, 128, 64),
    kv("8B", 32, 8, 128, 16),
    kv("Qwen3-0.6B", 28, 8, 128, 64),
    kv("SmolLM2-135M", 30, 3, 64, 64),
    kv("SmolLM2-135M", 30, 3, 64, 16),
    kv("SmolLM2-135M", 30, 3, 64, 1),
)
QUICK = (*EXTENTS[::4], SHAPES[0], SHAPES[4])


@dataclass
class Run:
    """What a run has measured, and what was wrong."""

    begin: float
    seconds: float
    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(replace(figure, bench="transfers"))

    def has_time(self, what: str) -> bool:
        """Whether there is time for `what`; a note says that there was not."""
        passed = time.monotonic() - self.begin
        print(f"{passed:5.1f} s  {what}", file=sys.stderr)
        if passed < self.seconds:
            return True
        self.notes.append(f"Left out for want of time: {what}.")
        return False


def contenders(case: Case) -> tuple[str, ...]:
    """What TorchTransfer is compared with: what it could have chosen instead, as far as that makes a difference."""
    if case.num_layers > 1:
        slow = {Method.DIRECT} if case.layer_bytes < LEAST_APART else set()
        return tuple(method.value for method in Method if method not in slow)
    if case.page_bytes > LARGE_BYTES:
        return (Method.DIRECT.value,)
    # No two pages are neighbours, so a buffer gains nothing.
    ways = (Method.DIRECT.value, Method.KERNEL.value)
    return (ONE_CALL_EACH, *ways) if case.page_bytes == LARGE_BYTES else ways


class Bench:
    """One case: its arena, the pages of its ticket, and the ways to copy them, all over one host memory.

    Args:
        ways: CHOSEN, ONE_CALL_EACH or a method, each with copies of its own.
        options: of TorchTransfer.
    """

    def __init__(self, case: Case, num_bytes: int, ways: Sequence[str] = (), **options: Any) -> None:
        self.case = case
        count = max(2, min(MOST_PAGES, num_bytes // case.page_bytes))
        self.arena = TorchArena(case.num_layers, 2 * count, 1, 1, case.layer_bytes // 4, torch.int16, "cuda")
        rng = random.Random(case.name)
        devices = rng.sample(range(2 * count), count)
        hosts = [2 * page for page in range(count)]
        rng.shuffle(hosts)
        self.pages = tuple(zip(devices, hosts, strict=True))
        self.num_bytes = count * case.page_bytes
        self.transfer = TorchTransfer(self.arena, 2 * count, **options)
        self.transfer.host.prepare(2 * count)
        self.copies = {way: self._copies(way) for way in ways}

    def close(self) -> None:
        self.transfer.close()

    def _copies(self, way: str) -> CudaCopies:
        pin = self.transfer.host.pin
        method = {CHOSEN: None, ONE_CALL_EACH: Method.DIRECT}
        made = CudaCopies(
            self.arena,
            self.transfer.host,
            method=method[way] if way in method else Method(way),
            batch=way != ONE_CALL_EACH,
        )
        self.transfer.host.pin = pin  # everything is pinned already, by the transfer
        return made

    def run(self, way: str, kind: Direction) -> tuple[float, float]:
        """Seconds until the copy has ended, and of them until its submit returned."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        if way == CHOSEN:
            self.transfer.submit(Copy(kind, self.pages))
            submitted = time.perf_counter()
            while not (done := self.transfer.poll()):
                pass
            if done[0].error is not None:
                raise RuntimeError(done[0].error)
        else:
            copies = self.copies[way]
            end = copies.issue(kind, page_rows(self.pages), [copies.mark()])
            submitted = time.perf_counter()
            while not end.query():
                pass
        return time.perf_counter() - begin, submitted - begin

    def device_seconds(self, way: str, kind: Direction, spin_s: float) -> float:
        """Seconds of the copy alone: it is queued behind a kernel that spins for `spin_s`."""
        copies = self.copies[way]
        watch = torch.cuda.Stream()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        torch.cuda._sleep(int(spin_s * CYCLES_PER_S))
        start.record()
        watch.wait_event(copies.issue(kind, page_rows(self.pages), [copies.mark()]))
        end.record(watch)
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def fault(self, way: str) -> str | None:
        """What is wrong with a round trip of random bytes, with the pages overwritten in between."""
        before: list[torch.Tensor] = []
        rows = torch.tensor([device for device, _ in self.pages], device="cuda")
        for layer in range(self.case.num_layers):
            pages = self.arena.layer(layer)
            pages.random_(-32768, 32767)
            before.append(pages.clone())
        for _, host in self.pages:
            self.transfer.host.page(host)[:1] = b"\xee"
        self.run(way, "store")
        for layer in range(self.case.num_layers):
            self.arena.layer(layer)[rows] = -7
        self.run(way, "load")
        torch.cuda.synchronize()
        for layer, pages in enumerate(before):
            if not torch.equal(self.arena.layer(layer), pages):
                return f"{self.case.name}: {way}: layer {layer} differs after a round trip"
        return None


def measure(num_bytes: int, repeats: int, *, quick: bool, seconds: float) -> Run:
    """Check every way of a case, then time it, in turns; what has a bar goes first. A wrong byte ends the run, and no
    further case is timed when `seconds` have passed.
    """
    run = Run(time.monotonic(), seconds)
    peaks = ceilings(run, num_bytes, repeats)
    beside(run, num_bytes, BARS)
    for case in QUICK if quick else (*EXTENTS, *SHAPES):
        if not run.has_time(case.name):
            continue
        bench = Bench(case, num_bytes, (CHOSEN, *contenders(case)))
        run.faults += [fault for way in bench.copies if (fault := bench.fault(way)) is not None]
        if run.faults:
            return run
        for kind in DIRECTIONS:
            rates(run, bench, kind, repeats, peaks[kind])
        bench.close()
    if not quick:
        beside(run, num_bytes, OTHERS)
    return run


def ceilings(run: Run, num_bytes: int, repeats: int) -> dict[Direction, float]:
    """Bytes per second of one copy of pinned memory in each direction, by device events."""
    device = torch.empty(num_bytes, dtype=torch.uint8, device="cuda").random_(0, 255)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    found: dict[Direction, float] = {}
    for kind in DIRECTIONS:
        target, source = (host, device) if kind == "store" else (device, host)
        samples = []
        for turn in range(repeats + 2):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
            if turn > 1:
                samples.append(num_bytes / start.elapsed_time(end) / 1e6)
        figure = Figure.of(CEILINGS, PEAK, kind, samples, "GB/s")
        run.add(figure)
        found[kind] = figure.value * 1e9
    return found


def rates(run: Run, bench: Bench, kind: Direction, repeats: int, peak: float) -> None:
    """The rate of every way, in turns, and how long a submit takes."""
    ways = tuple(bench.copies)
    samples: dict[str, list[float]] = {way: [] for way in ways}
    submits: dict[str, list[float]] = {way: [] for way in ways}
    alone: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(repeats + 1):
        first = turn % len(ways)
        order = (*ways[first:], *ways[:first])
        if turn // len(ways) % 2:  # no way always finds what the same other one has left in the host's caches
            order = order[::-1]
        for way in order:
            seconds, submitted = bench.run(way, kind)
            if turn:
                samples[way].append(bench.num_bytes / seconds / 1e9)
                submits[way].append(submitted * 1e6)
            if 0 < turn <= DEVICE_TURNS:
                on_device = bench.device_seconds(way, kind, 2 * submitted)
                alone[way].append(bench.num_bytes / on_device / 1e9)
    for way in ways:
        case = f"{bench.case.name}, {kind}"
        run.add(Figure.of(case, way, RATE, samples[way], "GB/s").against(PEAK, peak / 1e9))
        run.add(Figure.of(case, way, DEVICE_RATE, alone[way], "GB/s").against(PEAK, peak / 1e9))
        run.add(Figure.of(case, way, SUBMIT, submits[way], "µs"))


class Steps:
    """A stand-in for decoding: a graph that reads STEP_BYTES of weights by products with one vector."""

    def __init__(self) -> None:
        rows, columns = 8192, 8192
        count = STEP_BYTES // (2 * rows * columns)
        self.weights = [torch.randn(rows, columns, dtype=torch.bfloat16, device="cuda") for _ in range(count)]
        self.x = torch.randn(columns, dtype=torch.bfloat16, device="cuda")
        self.y = torch.empty(rows, dtype=torch.bfloat16, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            torch.mv(self.weights[0], self.x, out=self.y)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            for weight in self.weights:
                torch.mv(weight, self.x, out=self.y)

    def per_second(self, seconds: float, between: Callable[[], None]) -> float:
        """Steps per second, two queued at a time, with `between` called while they run."""
        ends = [torch.cuda.Event(), torch.cuda.Event()]
        torch.cuda.synchronize()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < seconds:
            end = ends[count % 2]
            if count > 1:
                while not end.query():
                    between()
            self.graph.replay()
            end.record()
            count += 1
        torch.cuda.synchronize()
        return count / (time.perf_counter() - begin)


class Background:
    """Copies of one direction that never end: PARTS tickets over different pages are always submitted."""

    def __init__(self, transfer: TorchTransfer, pages: Sequence[tuple[int, int]], kind: Direction) -> None:
        size = -(-len(pages) // PARTS)
        self._transfer, self._page_bytes = transfer, transfer.host.page_bytes
        self._parts = [Copy(kind, tuple(pages[i : i + size])) for i in range(0, len(pages), size)]
        self._open = {transfer.submit(part): part for part in self._parts}
        self.num_bytes = 0  # of tickets that have ended

    def go_on(self) -> None:
        """Submit what has ended again."""
        for completion in self._transfer.poll():
            if completion.error is not None:
                raise RuntimeError(completion.error)
            part = self._open.pop(completion.ticket)
            self.num_bytes += len(part.pages) * self._page_bytes
            self._open[self._transfer.submit(part)] = part

    def stop(self) -> None:
        """Wait for what is submitted."""
        while self._open:
            for completion in self._transfer.poll():
                del self._open[completion.ticket]


@dataclass(frozen=True)
class Beside:
    """A way to copy pages of `case` while steps run; the defaults are TorchTransfer's own."""

    case: Case
    method: Method | None = None
    rate: float | None = None  # of stores, bytes per second

    @property
    def name(self) -> str:
        if self.rate == BACKGROUND_BYTES_PER_S:
            return BACKGROUND
        name = CHOSEN if self.method is None else self.method.value
        return name if self.rate is None else f"{name}, {self.rate / 1e9:.0f} GB/s"


BARS = tuple(Beside(case, rate=BACKGROUND_BYTES_PER_S) for case in SHAPES[:2])
OTHERS = (
    Beside(SHAPES[0]),
    Beside(SHAPES[1]),
    Beside(SHAPES[0], rate=25e9),
    Beside(SHAPES[1], rate=25e9),
    Beside(SHAPES[0], Method.STAGED),
    Beside(SHAPES[0], Method.KERNEL),
    Beside(SHAPES[1], Method.DIRECT),
)


def beside(run: Run, num_bytes: int, ways: Sequence[Beside]) -> None:
    """Steps per second while pages are copied all the time, beside the same steps alone."""
    steps = Steps()
    for way in ways:
        if not run.has_time(f"steps beside {way.case.name}, {way.name}"):
            continue
        copies = partial(CudaCopies, method=way.method)
        bench = Bench(way.case, 2 * num_bytes, store_bytes_per_s=way.rate, copies=copies)
        for kind in DIRECTIONS if way.rate is None else DIRECTIONS[:1]:
            _beside(run, steps, bench, kind, way.name)
        bench.close()


def _beside(run: Run, steps: Steps, bench: Bench, kind: Direction, way: str) -> None:
    """In turns: steps alone, steps with copies."""
    alone: list[float] = []
    copying: list[float] = []
    rates: list[float] = []
    for _ in range(BESIDE_TURNS):
        alone.append(steps.per_second(BESIDE_S, lambda: None))
        background = Background(bench.transfer, bench.pages, kind)
        begin = time.perf_counter()
        copying.append(steps.per_second(BESIDE_S, background.go_on))
        rates.append(background.num_bytes / (time.perf_counter() - begin) / 1e9)
        background.stop()
    case = f"{bench.case.name}, {kind} beside steps"
    run.add(Figure.of(case, way, STEPS, copying, "1/s").against("steps alone", median(alone)))
    run.add(Figure.of(case, way, RATE, rates, "GB/s"))
