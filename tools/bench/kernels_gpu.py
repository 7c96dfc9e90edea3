"""The GPU's matrix: for every case the product, its control paths and its baselines, captured and raced in turns.

Knows backends through the package's public API only. The input sets of a case are stretches of one large random
memory: K is random, so a truth in float64 reads what the kernels read.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench import kernels_baselines as rivals
from bench import kernels_cases as cases
from bench import kernels_checks as checks
from bench import kernels_merge as merging
from bench import kernels_timing as timing
from bench.kernels_cases import L2_BYTES, Case, Heads, longest_view, work_of
from bench.kernels_ceilings import Ceilings, measure
from bench.kernels_journal import Journal
from bench.kernels_record import TIME, WARM, Figure
from bench.kernels_tables import BATCHES
from dagengine_kernels import (
    AttentionBackend,
    AttentionShape,
    KernelError,
    Plan,
    RotaryTable,
    SegmentTable,
    build_table,
    get_backend,
)

MEMORY_BYTES = 24 << 30
MOST_SETS = 24
ERROR_BOUND = 2e-2
DEVICE = "cuda"
TRITON_CASES = (*cases.GRAPHS, *cases.BARE, "prefill 8192", "prefill 64 over 32x2857")
"""Where the readable implementation runs beside the others; alone it runs everywhere."""

FAILURES = 2
MERGE_CASES = ("own-order", "decode 1x91424", "decode 32x8192")


@dataclass
class Settings:
    """What the command line asks for: implementations, fewer repeats, seconds left."""

    implementations: tuple[str, ...]
    quick: bool
    stop: float
    every_check: bool = False

    @property
    def replays(self) -> int:
        return 7 if self.quick else 15

    def left(self) -> float:
        return self.stop - time.monotonic()


@dataclass(eq=False)
class Contender:
    """Something that computes a case. name: as figures call it."""

    name: str
    run: Callable[[int], Tensor]
    backend: AttentionBackend | None = None
    plan: Plan | None = None


@dataclass(eq=False)
class Bench:
    """What lasts for a whole run."""

    journal: Journal
    settings: Settings
    memory: Tensor
    workspace: Tensor
    ceilings: Ceilings
    rotaries: dict[tuple[int, int], RotaryTable]

    def rotary(self, heads: Heads, length: int) -> RotaryTable:
        """Llama-3's frequencies, a table of at least `length` positions."""
        rounded = 1 << max(14, (length - 1).bit_length())
        key = (heads.dim, rounded)
        if key not in self.rotaries:
            inv_freq = [500000.0 ** (-2 * i / heads.dim) for i in range(heads.dim // 2)]
            self.rotaries[key] = build_table(inv_freq, 1.0, rounded, device=DEVICE)
        return self.rotaries[key]


def begin(journal: Journal, settings: Settings, workspace_bytes: int) -> Bench:
    """Allocate, and measure the ceilings unless the journal has them."""
    memory = torch.empty(MEMORY_BYTES // 2, dtype=torch.bfloat16, device=DEVICE)
    generator = torch.Generator(device=DEVICE).manual_seed(0)
    for piece in memory.split(1 << 28):
        piece.normal_(generator=generator)
    known = journal.values("ceilings")
    if known:
        ceilings = Ceilings(**known[0], samples={})
    else:
        with journal.step("ceilings"):
            ceilings = measure(memory[: 4 << 30])
            journal.add(ceilings={"copy": ceilings.copy, "read": ceilings.read, "matmul": ceilings.matmul})
            for name, value, unit in (
                ("copy, read and written", ceilings.copy / 1e12, "TB/s"),
                ("read", ceilings.read / 1e12, "TB/s"),
                ("bf16 matmul", ceilings.matmul / 1e12, "TFLOP/s"),
            ):
                journal.figure(Figure.count("ceilings", "torch and triton", name, value, unit))
        memory[: 4 << 30].normal_(generator=generator)
    workspace = torch.zeros(workspace_bytes, dtype=torch.uint8, device=DEVICE)
    return Bench(journal, settings, memory, workspace, ceilings, {})


def check_implementations(bench: Bench, names: Sequence[str]) -> None:
    """All adversarial batches for each implementation, one step per config, within a share of the time for each."""
    dtypes = (torch.bfloat16, torch.float16)
    listed = checks.configs(dtypes, every=bench.settings.every_check)
    if bench.settings.quick:
        listed = listed[:1]
    most = bench.settings.left() * (0.8 if bench.settings.every_check else 0.35) / max(1, len(names))
    spent = dict.fromkeys(names, 0.0)
    for config in listed:
        for name in names:
            step = f"checks of {name}: {config}"
            if step in bench.journal.ended() or dropped(bench.journal, name):
                continue
            if spent[name] > most:
                bench.journal.note(f"Not run, {name} had spent its time for checks: {config}.")
                continue
            make, start = partial(make_backend, name), time.monotonic()
            with bench.journal.step(step):
                for batch in BATCHES:
                    result = checks.check(make, batch, config, DEVICE)
                    bench.journal.add(checked=checks.as_row(result, make().implementation))
            spent[name] += time.monotonic() - start


def make_backend(name: str) -> AttentionBackend:
    """An implementation of `fused` (cuda, tilelang, triton, with `, keys` for the ablation), or a control path."""
    if name in ("packed", "segmented"):
        return get_backend(name)
    implementation, _, turned = name.partition(", ")
    options = {"turn": turned} if turned else {}
    return get_backend("fused", implementation=implementation, **options)


def available(names: Iterable[str], journal: Journal) -> list[str]:
    """Those that can be made here; the others are noted with their reason."""
    able = []
    for name in names:
        try:
            make_backend(name)
        except Exception as error:  # a plug-in may fail in any way; the report says so
            journal.note(f"{name} is absent: {type(error).__name__}: {str(error)[:300]}")
        else:
            able.append(name)
    return able


def run_case(bench: Bench, case: Case, names: Sequence[str]) -> None:
    """Everything of one case: figures into the journal."""
    journal, heads = bench.journal, case.heads
    table = case.build(case.page_size)
    work = work_of(table)
    size = table.num_pages * 2 * heads.kv * table.page_size * heads.dim
    sets = max(1, min(MOST_SETS, -(-4 * L2_BYTES // (2 * size)), bench.memory.numel() // size))
    if size > bench.memory.numel():
        journal.note(f"{case.name} does not fit the {MEMORY_BYTES >> 30} GiB of inputs and was left out.")
        return
    pools = [
        bench.memory[i * size : (i + 1) * size].view(-1, 2, heads.kv, table.page_size, heads.dim)
        for i in range(sets)
    ]
    q = torch.randn(table.num_rows, heads.query, heads.dim, device=DEVICE).bfloat16()
    rotary = bench.rotary(heads, longest_view(table))
    shape = AttentionShape(heads.query, heads.kv, heads.dim, heads.dim**-0.5)
    floor = bench.ceilings.floor_us(work.bytes(heads), work.flops(heads))
    counts = (
        ("floor", floor, "us"),
        ("fewest bytes", work.bytes(heads) / 1e6, "MB"),
        ("bytes without sharing", work.unshared_bytes(heads) / 1e6, "MB"),
        ("operations", work.flops(heads) / 1e9, "GFLOP"),
    )
    for metric, value, unit in counts:
        journal.figure(Figure.count(case.name, "", metric, value, unit))

    truth = None
    cold: dict[str, timing.Captured] = {}
    warm: dict[str, timing.Captured] = {}
    wanted = [n for n in names if n != "triton" or len(names) == 1 or case.name in TRITON_CASES]
    wanted += ("triton, keys", "packed", "segmented") if case.controls else ()
    for name, make in (
        *((name, partial(own, bench, name, table, shape, rotary, q, pools, case)) for name in wanted),
        *baselines(bench, case, table, q, pools),
    ):
        step = f"{case.name}: {name}"
        if step in journal.failed() or dropped(journal, name):
            continue
        with journal.step(step):
            try:
                contender = make()
                out = contender.run(0)
                if truth is None:
                    truth = checks.truth_of(table, shape, rotary, q, pools[0])
                if contender.backend is not None:
                    note_error(journal, case, contender, out, truth)
                    note_memory(journal, case, contender)
                calls = [partial(contender.run, i) for i in range(sets)]
                try:
                    cold[contender.name] = timing.capture(calls, sets)
                    if sets > 1:
                        warm[contender.name] = timing.capture(calls[:1], 1)
                except RuntimeError as error:
                    if "captur" not in str(error).lower():
                        raise
                    torch.cuda.synchronize()
                    journal.note(f"{case.name}, {contender.name}: no graph holds it; timed with launches.")
                    samples = timing.eager(calls[0], bench.settings.replays)
                    journal.figure(Figure.of(case.name, contender.name, TIME, samples, "us"))
                if case.name in MERGE_CASES and name == "cuda":
                    note_merge(bench, case, contender, calls)
            except rivals.NotInstalled as error:
                journal.note(str(error))
            except rivals.Absent as error:
                journal.note(f"{case.name}, {name}: {error}")
            except torch.OutOfMemoryError:
                journal.note(f"{case.name}, {name}: out of memory; left out.")
            except KernelError as error:
                journal.note(f"{name}: {case.name} refused: {error}")
            except Exception as error:  # a kernel may fail in any way; the others still run
                journal.note(f"{name}: {case.name} failed: {type(error).__name__}: {str(error)[:400]}")
                journal.add(raised=step)
                torch.cuda.synchronize()
    with journal.step(f"{case.name}: race"):
        timing.race(cold, bench.settings.replays)
        timing.race(warm, bench.settings.replays)
        for suffix, found in (("", cold), (WARM, warm)):
            for name, captured in found.items():
                figure = Figure.of(case.name, name, f"{TIME}{suffix}", captured.samples, "us")
                journal.figure(figure.against("floor", floor))
    cold.clear()
    warm.clear()
    gc.collect()
    torch.cuda.empty_cache()


def own(
    bench: Bench,
    name: str,
    table: SegmentTable,
    shape: AttentionShape,
    rotary: RotaryTable,
    q: Tensor,
    pools: Sequence[Tensor],
    case: Case,
) -> Contender:
    """Plan with a backend of ours; its figures of planning go to the journal. Raises: KernelError."""
    backend = make_backend(name)
    backend.capabilities.check(backend.name, table, shape, DEVICE, q.dtype)
    samples = []
    for _ in range(4):
        torch.cuda.synchronize()
        start = time.perf_counter()
        plan = backend.plan(table, shape, rotary, device=DEVICE, dtype=q.dtype)
        samples.append((time.perf_counter() - start) * 1e6)
    shown = backend.implementation + (", keys turned" if name.endswith(", keys") else "")
    if name in ("packed", "segmented"):
        shown = f"{name}, {backend.implementation}"
    figure = partial(Figure.count, case.name, shown)
    bench.journal.figure(Figure.of(case.name, shown, "plan and load", samples[1:], "us"))
    arrays = getattr(plan, "arrays", None)
    if arrays is not None:
        bench.journal.figure(figure("read ratio", arrays.read_ratio, "x"))
        bench.journal.figure(figure("partial rows", arrays.num_parts * shape.group, ""))
    backend.reset_stats()

    def run(i: int) -> Tensor:
        if name == "packed":
            for sequence in table.sequence_ids:
                backend.forget(sequence)
        out = backend.run(plan, i, q, pools[i])
        assert isinstance(out, Tensor)
        return out

    return Contender(shown, run, backend, plan)


def baselines(
    bench: Bench, case: Case, table: SegmentTable, q: Tensor, pools: Sequence[Tensor]
) -> list[tuple[str, Callable[[], Contender]]]:
    """Makers of the case's rivals."""
    paged, heads = rivals.Paged.of(table), case.heads
    makers: list[tuple[str, Callable[[], rivals.Baseline]]] = []
    if cases.FA3 in case.rivals:
        makers.append(("fa3", partial(rivals.fa3, paged, heads, q, pools, metadata=False)))
        makers.append(("fa3, metadata ahead", partial(rivals.fa3, paged, heads, q, pools, metadata=True)))
        if max(paged.rows) > 1:
            makers.append(("fa3, contiguous", partial(rivals.fa3_contiguous, paged, heads, q, pools)))
    if cases.FLASHINFER in case.rivals:
        make = partial(rivals.flashinfer, paged, heads, q, pools, bench.workspace)
        makers.append((cases.FLASHINFER, make))
    if cases.CASCADE in case.rivals:
        make = partial(rivals.flashinfer_cascade, paged, heads, q, pools, bench.workspace)
        makers.append((cases.CASCADE, make))
    if cases.SDPA in case.rivals:
        for which in ("cudnn", "flash"):
            makers.append((f"sdpa, {which}", partial(rivals.sdpa, paged, heads, q, pools, which)))

    def contender(make: Callable[[], rivals.Baseline]) -> Contender:
        made = make()
        return Contender(made.name, made.run)

    return [(name, partial(contender, make)) for name, make in makers]


def note_error(
    journal: Journal, case: Case, contender: Contender, out: Tensor, truth: dict[int, Tensor]
) -> None:
    error = checks.error_of(out, truth)
    if not error <= ERROR_BOUND:
        journal.note(f"WRONG RESULT: {case.name}, {contender.name}: error {error:.3g} against float64.")
    shown = error if error == error else 1e9
    journal.figure(Figure.count(case.name, contender.name, "error against float64", shown, ""))


def note_memory(journal: Journal, case: Case, contender: Contender) -> None:
    assert contender.backend is not None
    figure = Figure.count(case.name, contender.name, "temporary", contender.backend.temp_bytes / 1e6, "MB")
    journal.figure(figure)


def note_merge(bench: Bench, case: Case, contender: Contender, calls: Sequence[timing.Call]) -> None:
    """The share of the merge and of the partial results in a call of the CUDA executor; `calls[i]` runs on set i."""
    arrays = getattr(contender.plan, "arrays", None)
    if arrays is None:
        return
    if arrays.num_parts:
        whole, rest = merging.measure(calls, len(calls), bench.settings.replays)
        heads = case.heads
        written = arrays.num_parts * (heads.query // heads.kv) * (heads.dim + 1) * 4
        found = merging.figures(case.name, contender.name, whole, rest, written, bench.ceilings.copy)
    else:
        found = merging.no_parts(case.name, contender.name)
    for figure in found:
        bench.journal.figure(figure)


def dropped(journal: Journal, name: str) -> bool:
    """Whether a contender has failed, or ended the process, too often to be tried again; it is noted then."""
    steps = [*journal.failed(), *journal.values("raised")]
    mine = [s for s in steps if s.endswith(f": {name}") or s.startswith(f"checks of {name}:")]
    if len(mine) < FAILURES:
        return False
    journal.note(f"{name} is left out from here on: it failed in {', '.join(sorted(set(mine)))}.")
    return True


def run_matrix(bench: Bench, listed: Sequence[Case], names: Sequence[str]) -> None:
    """The cases in order until the time is up; what was not run is noted."""
    skipped = []
    for case in listed:
        done = {f"case {case.name}", f"{case.name}: race"} & bench.journal.ended()
        if done:
            continue
        if bench.settings.left() < 12:
            skipped.append(case.name)
            continue
        run_case(bench, case, names)
        bench.journal.add(end=f"case {case.name}")
    if skipped:
        bench.journal.note(f"Not run, the budget was spent: {', '.join(skipped)}.")
