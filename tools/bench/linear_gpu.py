"""Measures the linear layers on a GPU: checks against float64, layers alone, whole models' products, norm and gate.

Weights are stretches of one large random memory. Contenders of a case are captured as graphs and replayed in turns.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import median

import torch
from torch import Tensor
from torch.nn import functional as F

from bench import kernels_ceilings, kernels_timing
from bench import linear_cases as cases
from bench.kernels_record import TIME, Figure, Table
from bench.linear_cases import Layer
from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.fused.cuda import driver, gemv, products, streamed
from dagengine_kernels.fused.cuda import norm as rms
from dagengine_kernels.norm import rms_norm, silu_mul

EPS = 1e-5
SCALE = 1 / 64
MEMORY_BYTES = 17 << 30
OURS, FEW, STREAMED, CUBLAS, INVARIANT, TORCH = (
    "CudaLinear",
    "CudaLinear, few_rows=8",
    "CudaLinear, streamed_rows=64",
    "CudaLinear, streamed_rows=0",
    "CudaLinear, batch_invariant",
    "torch.mm",
)
READ_KERNEL = "a kernel that only reads"
CEILINGS = "ceilings"
ERROR = "error"
READ, FLOOR = "of the read bandwidth", "of the floor"
WORSE_THAN_TORCH = 1.25
CHAIN_ROWS = (1, 2, 4, 8, 16, 64)


@dataclass
class Run:
    """What a run has measured, and what was wrong."""

    memory: Tensor
    replays: int
    sms: int
    until: float
    ceilings: kernels_ceilings.Ceilings | None = None
    figures: list[Figure] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(self, figure: Figure) -> None:
        self.figures.append(replace(figure, bench="linear"))

    def has_time(self, what: str) -> bool:
        """Whether there is time for `what`; a note says that there was not."""
        if time.monotonic() < self.until:
            return True
        self.notes.append(f"Left out for want of time: {what}.")
        return False

    def weights(self, layer: Layer, copies: int, first: int = 0) -> list[Tensor]:
        """`copies` weights of a layer, one after another in the memory from element `first` on."""
        size = layer.weight_rows * layer.inputs
        return [
            self.memory[first + i * size : first + (i + 1) * size].view(layer.weight_rows, layer.inputs)
            for i in range(copies)
        ]


def measure(
    layers: Sequence[Layer], rows: Sequence[int], *, quick: bool, sweep: Sequence[str], seconds: float
) -> Run:
    """Compile, check, time. Timing stops when `seconds` have passed; the checks do not.

    Args:
        sweep: of gemv and streamed, those of which the layouts are timed.
    """
    started = time.monotonic()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False  # as in the engine
    device = torch.cuda.current_device()
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    arch = driver.architecture(torch.cuda.get_device_capability(device))
    wanted = [*cases.kernels(layers, rows, sms), *cases.kernels(cases.LLAMA, CHAIN_ROWS, sms)]
    wanted += _sweep_kernels(layers, rows, sms, sweep)
    count = cases.compile_all(wanted, arch, min(12, os.cpu_count() or 1))
    compiled = time.monotonic()
    memory = torch.empty(MEMORY_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    for part in memory.split(1 << 30):
        part.normal_(std=SCALE)
    run = Run(memory, 3 if quick else 7, sms, started + seconds)
    for layer in layers:
        for number in rows:
            check(run, layer, number)
    checked = time.monotonic()
    if run.faults:
        return run
    run.ceilings = kernels_ceilings.measure(memory[: 4 << 30], 3)
    for metric, value in (
        ("copy", run.ceilings.copy),
        ("read", run.ceilings.read),
        ("matmul", run.ceilings.matmul),
    ):
        run.add(Figure.count(CEILINGS, "torch and triton", metric, value / 1e12, "T/s"))
    chains(run, rows, quick)
    pieces(run)
    for layer in layers:
        for number in rows:
            if run.has_time(layer.case(number)):
                times(run, layer, number, read=number == rows[0])
    at = {"gemv": {n for n in rows if n <= gemv.MAX_ROWS}, "streamed": cases.swept_rows(rows)}
    for layer in layers:
        for number in rows:
            swept = [one for one in sweep if number in at[one]]
            if swept and run.has_time(f"the layouts of {layer.case(number)}"):
                layouts(run, layer, number, swept)
    run.notes.append(few_rows_won(run, layers, rows))
    run.notes.append(fastest(run, layers, rows))
    ended = time.monotonic()
    run.notes.append(
        f"{count} kernels made ready in {compiled - started:.0f} s, checks {checked - compiled:.0f} s, "
        f"times {ended - checked:.0f} s."
    )
    return run


def random(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


@dataclass(frozen=True)
class Tensors:
    """What a call of a layer takes beside its weight."""

    x: Tensor
    norm: Tensor | None
    residual: Tensor | None

    @classmethod
    def of(cls, layer: Layer, rows: int) -> Tensors:
        return cls(
            random(rows, rows, layer.inputs),
            1 + random(1, layer.inputs) / 4 if layer.normed else None,
            random(2, rows, layer.out, dtype=layer.out_dtype) if layer.residual else None,
        )


def by_torch(layer: Layer, given: Tensors, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The layer in torch's own operations; in `dtype` throughout, if given."""
    x, norm, residual = (
        None if t is None or dtype is None else t.to(dtype) for t in (given.x, given.norm, given.residual)
    )
    if dtype is None:
        x, norm, residual = given.x, given.norm, given.residual
    else:
        weight = weight.to(dtype)
    assert x is not None
    if norm is not None:
        x = F.rms_norm(x, norm.shape, norm, EPS)
    if layer.wide and dtype is None:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    y = torch.mm(x, weight.t()) if residual is None else torch.addmm(residual, x, weight.t())
    if layer.gated:
        gate, up = y.chunk(2, dim=-1)
        y = F.silu(gate).mul_(up)
    return y


def distance(y: Tensor, want: Tensor) -> float:
    """Relative L2; infinite where something is not finite."""
    if not bool(y.isfinite().all()):
        return float("inf")
    return float((y.double() - want).norm() / want.norm())


def check(run: Run, layer: Layer, rows: int) -> None:
    """Every contender against float64, with torch's own error beside it."""
    given = Tensors.of(layer, rows)
    weight = run.weights(layer, 1)[0]
    want = by_torch(layer, given, weight, torch.float64)
    plain = distance(by_torch(layer, given, weight), want)
    run.add(Figure.count(layer.case(rows), TORCH, ERROR, plain, "relative L2"))
    for name, built in contenders(layer, given, weight, rows, run.sms):
        residual = None if given.residual is None else given.residual.clone()
        error = distance(built(given.x, residual, dtype=layer.out_dtype), want)
        if error == float("inf"):
            run.faults.append(f"{layer.case(rows)}: {name} gives values that are not finite")
            continue
        run.add(Figure.count(layer.case(rows), name, ERROR, error, "relative L2").against(TORCH, plain))
        if not error <= WORSE_THAN_TORCH * plain + 1e-5:
            run.faults.append(f"{layer.case(rows)}: {name} is off by {error:.2e}, torch by {plain:.2e}")


def contenders(
    layer: Layer, given: Tensors, weight: Tensor, rows: int, sms: int
) -> Iterator[tuple[str, CudaLinear]]:
    make = partial(
        CudaLinear, weight, norm=given.norm, eps=EPS, gated=layer.gated, over_residual=layer.residual
    )
    yield OURS, make()
    if rows <= gemv.MAX_ROWS:
        if gemv.layout(rows, layer.inputs, layer.out, layer.gated, sms) is not None:
            yield FEW, make(few_rows=gemv.MAX_ROWS)
    if rows <= streamed.MAX_ROWS:
        yield STREAMED, make(few_rows=0, streamed_rows=streamed.MAX_ROWS)
        yield CUBLAS, make(few_rows=0, streamed_rows=0)
    if rows in cases.INVARIANT_ROWS:
        yield INVARIANT, make(batch_invariant=True)


def race(run: Run, calls: dict[str, list[Callable[[], object]]]) -> dict[str, list[float]]:
    """Samples of µs per call of every contender."""
    captured = {name: kernels_timing.capture(listed, len(listed)) for name, listed in calls.items()}
    kernels_timing.race(captured, run.replays)
    return {name: one.samples for name, one in captured.items()}


def record(run: Run, case: str, name: str, samples: list[float], num_bytes: int, operations: int) -> None:
    """The time, and what part of the read bandwidth and of the floor it is."""
    assert run.ceilings is not None
    run.add(Figure.of(case, name, TIME, samples, "µs"))
    us = median(samples)
    run.add(Figure.count(case, name, READ, num_bytes / us * 1e6 / run.ceilings.read, "x"))
    run.add(Figure.count(case, name, FLOOR, run.ceilings.floor_us(num_bytes, operations) / us, "x"))


def times(run: Run, layer: Layer, rows: int, *, read: bool) -> None:
    """One layer: calls go round weights that together exceed L2 several times.

    Args:
        read: also a kernel that only reads the weight.
    """
    given = Tensors.of(layer, rows)
    weights = run.weights(layer, layer.copies)
    calls: dict[str, list[Callable[[], object]]] = {}
    for weight in weights:
        for name, built in contenders(layer, given, weight, rows, run.sms):
            call = partial(built, given.x, given.residual, dtype=layer.out_dtype)
            calls.setdefault(name, []).append(call)
    if read:
        calls[READ_KERNEL] = [partial(_read, weight) for weight in weights]
    wide = {"out_dtype": torch.float32} if layer.wide else {}
    calls[TORCH] = [partial(torch.mm, given.x, weight.t(), **wide) for weight in weights]
    sampled = race(run, calls)
    for name, samples in sampled.items():
        record(run, layer.case(rows), name, samples, layer.fewest_bytes(rows), layer.operations(rows))


def few_rows_won(run: Run, layers: Iterable[Layer], rows: Iterable[int]) -> str:
    """Up to how many rows gemv.cu was at least as fast as cuBLAS with the launches around it."""
    table, told = Table(tuple(run.figures)), []
    for layer in layers:
        won = 0
        for number in sorted(rows):
            few, cublas = (table.find(layer.case(number), TIME, name) for name in (FEW, CUBLAS))
            if few is None or cublas is None or few.value > cublas.value:
                break
            won = number
        told.append(f"{layer.model} {layer.name} {won}")
    return f"Of the measured numbers of rows gemv.cu wins up to: {', '.join(told)}."


def fastest(run: Run, layers: Iterable[Layer], rows: Iterable[int]) -> str:
    """What was the fastest at each number of rows: gemv.cu, streamed.cu or cuBLAS."""
    table, told = Table(tuple(run.figures)), []
    kinds = {FEW: "gemv", STREAMED: "streamed", CUBLAS: "cuBLAS"}
    for layer in layers:
        won = []
        for number in sorted(rows):
            found = {kind: table.find(layer.case(number), TIME, name) for name, kind in kinds.items()}
            measured = {kind: figure.value for kind, figure in found.items() if figure is not None}
            if measured:
                won.append(f"{number} {min(measured, key=measured.__getitem__)}")
        told.append(f"{layer.model} {layer.name} {', '.join(won)}")
    return f"The fastest by number of rows: {'; '.join(told)}."


def _read(weight: Tensor) -> None:
    """Reads the weight and keeps nothing: what a launch of its size takes at best without an overlap."""
    from bench import kernels_streams as streams

    words = weight.view(-1).view(torch.int32)
    blocks = words.numel() // (2048 * 16)
    out = torch.empty(blocks, dtype=torch.int32, device=weight.device)
    streams.read[(blocks,)](words, out, 16, 2048, num_warps=8)


def chains(run: Run, rows: Iterable[int], quick: bool) -> None:
    """All products and norms of Llama-3.1-8B, no attention, as one graph."""
    qkv, out, gate_up, down, head = cases.LLAMA
    parts, first = [], 0
    for _ in range(32):
        block = []
        for layer in (qkv, out, gate_up, down):
            block.append((layer, run.weights(layer, 1, first)[0]))
            first += layer.weight_rows * layer.inputs
        parts.append(block)
    last = run.weights(head, 1, first)[0]
    norms = [1 + random(i, qkv.inputs) / 4 for i in range(3)]

    def ours(few_rows: int | None, streamed_rows: int | None) -> Callable[[Tensor], Tensor]:
        make = partial(CudaLinear, eps=EPS, few_rows=few_rows, streamed_rows=streamed_rows)
        built = [
            [
                make(w, norm=norms[0] if s.normed else None, gated=s.gated, over_residual=s.residual)
                for s, w in block
            ]
            for block in parts
        ]
        top = make(last, norm=norms[2])

        def forward(x: Tensor) -> Tensor:
            x = x.clone()
            for a, b, c, d in built:
                x = b(a(x)[:, : out.inputs], x)
                x = d(c(x), x)
            return top(x, dtype=torch.float32)

        return forward

    variants = {
        OURS: ours(None, None),
        STREAMED: ours(0, streamed.MAX_ROWS),
        CUBLAS: ours(0, 0),
        FEW: ours(gemv.MAX_ROWS, None),
    }

    def plain(x: Tensor) -> Tensor:
        for (_, a), (_, b), (_, c), (_, d) in parts:
            h = torch.mm(F.rms_norm(x, norms[0].shape, norms[0], EPS), a.t())
            x = torch.addmm(x, h[:, : out.inputs], b.t())
            gate, up = torch.mm(F.rms_norm(x, norms[0].shape, norms[0], EPS), c.t()).chunk(2, dim=-1)
            x = torch.addmm(x, F.silu(gate).mul_(up), d.t())
        return torch.mm(F.rms_norm(x, norms[2].shape, norms[2], EPS), last.t(), out_dtype=torch.float32)

    for number in CHAIN_ROWS:
        if number not in rows or (quick and number not in (1, 8)):
            continue
        case = f"Llama-3.1-8B, all products, {number} rows"
        if not run.has_time(case):
            continue
        x = random(number, number, qkv.inputs)
        raced = {
            name: forward for name, forward in variants.items() if name != FEW or number <= gemv.MAX_ROWS
        }
        want = plain(x)
        off = {name: distance(forward(x), want.double()) for name, forward in raced.items()}
        if not max(off.values()) <= 0.1:
            run.faults.append(f"{case}: {off} from torch's")
            continue
        layers = [layer for block in parts for layer, _ in block] + [head]
        num_bytes = sum(layer.fewest_bytes(number) for layer in layers)
        operations = sum(layer.operations(number) for layer in layers)
        calls = {name: [partial(forward, x)] for name, forward in raced.items()}
        sampled = race(run, calls | {"torch": [partial(plain, x)]})
        for name, samples in sampled.items():
            record(run, case, name, samples, num_bytes, operations)


def pieces(run: Run) -> None:
    """Norm and gate alone, over inputs that exceed L2: bytes read and written against the copy rate."""
    assert run.ceilings is not None
    for rows, columns in ((1024, 4096), (4096, 4096), (16384, 4096), (16384, 1024)):
        weight = torch.ones(columns, device="cuda")
        size = rows * columns
        sets = max(1, cases.L2_TIMES_BYTES // (4 * size))
        inputs = [run.memory[i * size : (i + 1) * size].view(rows, columns) for i in range(sets)]
        calls = {
            "rms_norm": [partial(rms_norm, x, weight, EPS) for x in inputs],
            "torch's rms_norm": [partial(F.rms_norm, x, (columns,), weight.bfloat16(), EPS) for x in inputs],
        }
        _against_copy(run, f"norm of {rows} × {columns}", calls, 4 * size)
    for rows, columns in ((1024, 14336), (4096, 14336), (16384, 3072)):
        size = rows * columns
        sets = max(1, cases.L2_TIMES_BYTES // (6 * size))
        inputs = [run.memory[2 * i * size : 2 * (i + 1) * size].view(rows, 2 * columns) for i in range(sets)]
        _against_copy(
            run, f"gate of {rows} × {columns}", {"silu_mul": [partial(silu_mul, x) for x in inputs]}, 6 * size
        )


def _against_copy(run: Run, case: str, calls: dict[str, list[Callable[[], object]]], num_bytes: int) -> None:
    assert run.ceilings is not None
    for name, samples in race(run, calls).items():
        run.add(Figure.of(case, name, TIME, samples, "µs"))
        share = num_bytes / median(samples) * 1e6 / run.ceilings.copy
        run.add(Figure.count(case, name, "of the copy bandwidth", share, "x"))


def _sweep_kernels(
    layers: Sequence[Layer], rows: Sequence[int], sms: int, sweep: Sequence[str]
) -> Iterator[cases.Kernel]:
    for layer in layers:
        base = {"DTYPE": 2, "OUT_TYPE": 0 if layer.wide else 2, "GATED": int(layer.gated)}
        if "gemv" in sweep:
            for number in rows:
                for few in cases.layouts(layer, number, sms):
                    yield "gemv", tuple(gemv.macros(base, few, layer.inputs, layer.normed).items())
        if "streamed" in sweep:
            for number in cases.swept_rows(rows):
                for many in cases.streamed_layouts(layer, number, sms):
                    yield "streamed", tuple((base | many.macros()).items())


def layouts(run: Run, layer: Layer, rows: int, sweep: Sequence[str]) -> None:
    """One layer by every layout that fits, and without an overlap of launches."""
    given = Tensors.of(layer, rows)
    built = [
        CudaLinear(w, norm=given.norm, eps=EPS, gated=layer.gated)._layer
        for w in run.weights(layer, layer.copies)
    ]
    calls: dict[str, list[Callable[[], object]]] = {}
    y = torch.empty(rows, layer.out, dtype=layer.out_dtype, device="cuda")
    shape = (rows, layer.inputs, layer.out, layer.gated, run.sms)
    few_chosen, chosen = gemv.layout(*shape), streamed.layout(*shape)
    for few in cases.layouts(layer, rows, run.sms) if "gemv" in sweep else ():
        name = f"{few.depth} under way, {few.resident} blocks, {few.rounds} tiles, {few.split} warps share"
        name += ", chosen" if few == few_chosen else ""
        for pdl in (True, False) if few == few_chosen else (True,):
            calls[name + ("" if pdl else ", no overlap")] = [
                partial(gemv.multiply, w, few, given.x, given.residual, y, norm=layer.normed, pdl=pdl)
                for w in built
            ]
    for many in cases.streamed_layouts(layer, rows, run.sms) if "streamed" in sweep else ():
        name = f"streamed, tiles of {many.tile}, {many.split} share, {many.stages} stages of {many.halves}, "
        name += f"{many.resident} per SM, {many.blocks} blocks" + (", chosen" if many == chosen else "")
        for pdl in (True, False) if many == chosen else (True,):
            calls[name + ("" if pdl else ", no overlap")] = [
                partial(_stream, w, many, given.x, given.residual, y, pdl=pdl) for w in built
            ]
    for name, samples in race(run, calls).items():
        record(
            run,
            f"layouts of {layer.case(rows)}",
            name,
            samples,
            layer.fewest_bytes(rows),
            layer.operations(rows),
        )


def _stream(
    layer: products.Layer,
    chosen: streamed.Layout,
    x: Tensor,
    residual: Tensor | None,
    y: Tensor,
    *,
    pdl: bool,
) -> None:
    """The whole layer: the norm by a launch of its own."""
    if layer.norm is not None:
        x = rms.rms_norm(x, layer.norm, layer.eps, inputs=layer.num_inputs, pdl=pdl)
    streamed.multiply(layer, chosen, x, residual, y, pdl=pdl)
