"""The CPU's matrix: the product, its control paths and torch's SDPA on SmolLM2's heads, by the wall clock, in turns.

Knows backends through the package's public API only. One process has one number of threads.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench import kernels_checks as checks
from bench import kernels_timing as timing
from bench.kernels_bars import cpu_case
from bench.kernels_cases import SMOLLM2, Arena, decode, fan_out, longest_view, one_row, prefill, work_of
from bench.kernels_journal import Journal
from bench.kernels_record import TIME, Figure
from bench.kernels_tables import BATCHES
from dagengine_kernels import (
    AttentionBackend,
    AttentionShape,
    KernelError,
    SegmentTable,
    build_table,
    get_backend,
)

PAGE_SIZE = 16
BACKENDS = ("fused", "segmented", "packed", "reference")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
CASE_SECONDS = 1.6
SHARED, SEPARATE = "fan-out 8 of 4096", "decode 8x4352"


def own_order(readers: int, documents: int, length: int) -> Callable[[int], SegmentTable]:
    """Readers of the same documents, each in its own order, with 32 tokens of their own."""

    def build(page_size: int) -> SegmentTable:
        arena, r = Arena(page_size), random.Random(0)
        nodes = [arena.node(length) for _ in range(documents)]
        sequences = []
        for b in range(readers):
            placed = [
                e for i, node in enumerate(r.sample(nodes, documents)) for e in node.seen_at(i * length)
            ]
            end = documents * length
            sequences.append(one_row(end + 32, [*placed, *arena.node(32, end).seen_at(end)], b))
        return arena.table(sequences)

    return build


@dataclass(frozen=True)
class CpuCase:
    """sdpa: torch's SDPA over contiguous K and V of the same lengths runs too. reference: the truth is timed."""

    name: str
    build: Callable[[int], SegmentTable]
    sdpa: bool = False
    reference: bool = False


CASES = (
    CpuCase(SEPARATE, decode([4352] * 8), sdpa=True),
    CpuCase(SHARED, fan_out(8, 4096)),
    CpuCase("own-order 8 of 16x256", own_order(8, 16, 256)),
    CpuCase("decode 1x4096", decode([4096]), sdpa=True, reference=True),
    CpuCase("prefill 512", prefill(512), sdpa=True),
    CpuCase("prefill 64 over 16x256", prefill(64, 16, 256)),
    CpuCase("prefill 64 over 1x4096", prefill(64, 16, 256, contiguous=True)),
)


def available(journal: Journal) -> list[str]:
    """Backends that can be made here; `fused` only where it is the C++ path."""
    able = []
    for name in BACKENDS:
        try:
            make(name)
        except Exception as error:  # a plug-in may fail in any way; the report says so
            journal.note(f"{name} is absent: {type(error).__name__}: {str(error)[:300]}")
        else:
            able.append(name)
    return able


def make(name: str) -> AttentionBackend:
    return get_backend("fused", implementation="cpu") if name == "fused" else get_backend(name)


def chosen(wanted: Sequence[str]) -> tuple[CpuCase, ...]:
    """The cases that are named (all by default). Raises: ValueError for a name that is none, nor checks or data."""
    names = [case.name for case in CASES]
    unknown = [name for name in wanted if name not in (*names, "checks", "data")]
    if unknown:
        raise ValueError(
            f"no case is called {', '.join(unknown)}; there are: {', '.join(names)}, checks, data"
        )
    return tuple(case for case in CASES if not wanted or case.name in wanted)


def run(
    journal: Journal,
    cases: Sequence[CpuCase],
    threads: int,
    stop: float,
    *,
    quick: bool,
    check: bool,
) -> None:
    """The cases in both dtypes with the threads that this process has, until the time is up."""
    torch.set_num_threads(threads)
    names = available(journal)
    if check and threads == 1 and "fused" in names:
        check_fused(journal, quick=quick)
    for case in cases:
        for dtype in DTYPES:
            name = cpu_case(case.name, dtype, threads)
            if name in journal.ended():
                continue
            if time.monotonic() > stop - 5:
                journal.note(f"Not run, the budget was spent: {name}.")
                continue
            with journal.step(name):
                _run_case(journal, case, name, DTYPES[dtype], names, quick=quick)


def check_fused(journal: Journal, *, quick: bool) -> None:
    """The adversarial batches in both dtypes."""
    listed = [
        checks.Config(dtype, dim, group, size)
        for dtype in DTYPES.values()
        for dim, group, size in ((64, 3, 16), (128, 4, 64), (64, 8, 64), (128, 1, 16))
    ]
    for config in listed[:: 4 if quick else 1]:
        step = f"checks of fused: {config}"
        if step in journal.ended():
            continue
        with journal.step(step):
            for batch in BATCHES:
                result = checks.check(partial(make, "fused"), batch, config, "cpu")
                journal.add(checked=checks.as_row(result, make("fused").implementation))


def _run_case(
    journal: Journal, case: CpuCase, name: str, dtype: torch.dtype, names: list[str], *, quick: bool
) -> None:
    heads, table = SMOLLM2, case.build(PAGE_SIZE)
    work = work_of(table)
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(table.num_rows, heads.query, heads.dim, generator=generator).to(dtype)
    pages = torch.randn(table.num_pages, 2, heads.kv, table.page_size, heads.dim, generator=generator).to(
        dtype
    )
    inv_freq = [100000.0 ** (-2 * i / heads.dim) for i in range(heads.dim // 2)]
    rotary = build_table(inv_freq, 1.0, longest_view(table))
    shape = AttentionShape(heads.query, heads.kv, heads.dim, heads.dim**-0.5)
    truth = checks.truth_of(table, shape, rotary, q, pages)
    for metric, value, unit in (
        ("fewest bytes", work.bytes(heads, dtype.itemsize) / 1e6, "MB"),
        ("operations", work.flops(heads) / 1e9, "GFLOP"),
    ):
        journal.figure(Figure.count(name, "", metric, value, unit))
    calls: dict[str, timing.Call] = {}
    for backend_name in names:
        if backend_name == "reference" and not case.reference:
            continue
        try:
            backend = make(backend_name)
            plan = backend.plan(table, shape, rotary, device="cpu", dtype=dtype)
        except KernelError as error:
            journal.note(f"{backend_name}: {name} refused: {error}")
            continue
        shown = backend.implementation
        if backend_name != "fused":
            shown = f"{backend_name}, {shown}"
        out = backend.run(plan, 0, q, pages)
        assert isinstance(out, Tensor)
        error = checks.error_of(out, truth)
        if not error <= 2e-2:
            journal.note(f"WRONG RESULT: {name}, {shown}: error {error:.3g} against float64.")
        figure = partial(Figure.count, name, shown)
        journal.figure(figure("error against float64", error if error == error else 1e9, ""))
        journal.figure(figure("temporary", backend.temp_bytes / 1e6, "MB"))
        arrays = getattr(plan, "arrays", None)
        if arrays is not None:
            journal.figure(figure("read ratio", arrays.read_ratio, "x"))
        planned = timing.wall(
            {shown: partial(backend.plan, table, shape, rotary, device="cpu", dtype=dtype)}, 0.1, 3
        )
        journal.figure(Figure.of(name, shown, "plan and load", planned[shown], "us"))

        def attend(backend: AttentionBackend = backend, plan: object = plan) -> None:
            if backend.name == "packed":
                for sequence in table.sequence_ids:
                    backend.forget(sequence)
            backend.run(plan, 0, q, pages)  # type: ignore[arg-type]

        calls[shown] = attend
    if case.sdpa:
        calls["sdpa, torch, contiguous K and V"] = _sdpa(table, q)
    samples = timing.wall(calls, CASE_SECONDS / (4 if quick else 1), least=3)
    figures = [Figure.of(name, shown, TIME, values, "us") for shown, values in samples.items()]
    rival = next((f for f in figures if f.backend.startswith("segmented")), None)
    for figure in figures:
        journal.figure(figure.against("segmented", rival.value) if rival else figure)


def _sdpa(table: SegmentTable, q: Tensor) -> timing.Call:
    """torch's SDPA over K and V [B, Hkv, L, D] of a batch of equal lengths: decode rows, or one causal prompt."""
    heads, batch = SMOLLM2, table.num_sequences
    length = table.num_tokens // batch
    rows = table.num_rows // batch
    k, v = (torch.randn(batch, heads.kv, length, heads.dim).to(q.dtype) for _ in "kv")
    x = q.view(batch, rows, heads.query, heads.dim).transpose(1, 2).contiguous()

    def call() -> None:
        torch.nn.functional.scaled_dot_product_attention(x, k, v, is_causal=rows > 1, enable_gqa=True)

    return call
