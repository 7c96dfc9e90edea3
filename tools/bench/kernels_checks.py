"""Whether a backend computes what the definition says: float64 over the adversarial batches. No times here.

K is drawn unrotated. The truth rotates it at its view position and attends, all in float64. Ordinary attention does the
same with q, K, weights and the result rounded to the dtype under test, and float32 between. The backend reads K rotated
at its stored position, in pages whose other rows are NaN.

    error      ‖out − truth‖ / ‖truth‖ over a batch      bar: ≤ 1.25 × the error of ordinary attention
    lse2       largest |difference| to the truth's       bar: ≤ 0.087 (0.06 nat)
    same       bits of two fresh backends                bar: equal

A batch of few rows is drawn several times, and its errors are those of all draws together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from bench.kernels_tables import BATCHES, MAX, Batch
from dagengine_kernels import (
    PAGE,
    AttentionBackend,
    AttentionShape,
    KernelError,
    RotaryTable,
    SegmentTable,
    SequenceSegments,
    build_table,
    get_backend,
    rotate,
)
from dagengine_kernels.rotary import exact_rows, expand_rows, turn

FACTOR = 1.25
LSE2 = 0.087
LEAST = 2e-5
CHECKED_ROWS = 16
ENOUGH = 16384


@dataclass(frozen=True)
class Config:
    """dtype, head dimension, query heads per kv head, page size."""

    dtype: torch.dtype
    dim: int
    group: int
    page_size: int

    def __str__(self) -> str:
        kind = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}[self.dtype]
        return f"{kind}, head {self.dim}, group {self.group}, page {self.page_size}"


def configs(dtypes: Iterable[torch.dtype], *, every: bool = False) -> list[Config]:
    """Every dtype, head dimension and page size, with groups in turn; or all combinations."""
    listed, groups = [], (4, 1, 8, 2)
    for dtype in dtypes:
        for dim in (128, 64):
            for page_size in (64, 16):
                chosen = groups if every else (groups[len(listed) % 4],)
                listed += [Config(dtype, dim, group, page_size) for group in chosen]
    return listed


@dataclass(frozen=True)
class Checked:
    """One batch under one config. refused: why the backend says it cannot; then nothing else counts."""

    batch: str
    config: Config
    error: float = 0.0
    ordinary: float = 0.0
    lse2: float = 0.0
    same: bool = True
    clean: bool = True
    refused: str | None = None
    failed: str | None = None

    @property
    def passed(self) -> bool:
        return self.failed is None and (
            self.refused is not None
            or (
                self.error <= FACTOR * max(self.ordinary, LEAST)
                and self.lse2 <= LSE2
                and self.same
                and self.clean
            )
        )

    @property
    def ratio(self) -> float:
        """Error over that of ordinary attention; 0 where both are below what rounding explains."""
        return self.error / max(self.ordinary, LEAST)


def as_row(checked: Checked, backend: str) -> dict[str, object]:
    """What a report keeps of it."""
    return {
        "backend": backend,
        "batch": checked.batch,
        "config": str(checked.config),
        "error": _finite(checked.error),
        "ordinary": checked.ordinary,
        "ratio": _finite(checked.ratio),
        "lse2": _finite(checked.lse2),
        "same": checked.same,
        "clean": checked.clean,
        "refused": checked.refused,
        "failed": checked.failed,
        "passed": checked.passed,
    }


def _finite(value: float) -> float:
    return value if math.isfinite(value) else 1e9


@dataclass(frozen=True, eq=False)
class Inputs:
    """Tensors of one batch: q, unrotated k and v [pages, Hkv, page size, D], and the pages."""

    batch: Batch
    shape: AttentionShape
    rotary: RotaryTable | None
    q: Tensor
    k: Tensor
    v: Tensor
    pages: Tensor
    sinks: Tensor | None


def rotary_table(kind: str, dim: int, device: torch.device | str) -> RotaryTable | None:
    """plain, none, interleaved, partial (half of the head) or scaled (YaRN's factor)."""
    if kind == "none":
        return None
    turned = dim // 2 if kind == "partial" else dim
    inv_freq = [10000.0 ** (-2 * i / turned) for i in range(turned // 2)]
    pairing = "interleaved" if kind == "interleaved" else "half"
    scaling = 1.139 if kind == "scaled" else 1.0
    return build_table(inv_freq, scaling, 2 * MAX, pairing=pairing, device=device)


def inputs(batch: Batch, config: Config, device: torch.device | str, seed: int, kv_heads: int = 2) -> Inputs:
    """Random values in the pages' listed rows, NaN in all others."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator, device=device).to(config.dtype)

    table, dim = batch.table, config.dim
    shape = AttentionShape(kv_heads * config.group, kv_heads, dim, dim**-0.5, batch.window, batch.softcap)
    rotary = rotary_table(batch.rotary, dim, device)
    places = (table.num_pages, kv_heads, table.page_size, dim)
    k, v = normal(*places), normal(*places)
    stored = torch.full((table.num_pages, table.page_size), -1, dtype=torch.int64)
    for page, lo, hi, first, _ in table.extents.tolist():
        stored[page, lo:hi] = torch.arange(first, first + hi - lo)
    stored = stored.to(device)
    cached = k
    if rotary is not None:
        by_token = k.transpose(1, 2).reshape(-1, kv_heads, dim)
        turned = rotate(by_token.float(), stored.clamp(min=0).view(-1), rotary, dtype=config.dtype)
        cached = turned.view(table.num_pages, table.page_size, kv_heads, dim).transpose(1, 2)
    pages = torch.stack((cached, v), 1)
    pages.masked_fill_((stored < 0)[:, None, None, :, None], math.nan)
    return Inputs(
        batch,
        shape,
        rotary,
        normal(table.num_rows, shape.num_heads, dim),
        k,
        v,
        pages.contiguous(),
        normal(shape.num_heads).float() if batch.sinks else None,
    )


def attend(x: Inputs, rounded: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """The truth (rounded None) or ordinary attention: out [T, Hq, D] and lse2 [T, Hq], float64."""
    table, shape = x.batch.table, x.shape
    work = torch.float64 if rounded is None else torch.float32

    def put(t: Tensor) -> Tensor:
        return t if rounded is None else t.to(rounded).to(work)

    def at(t: Tensor, positions: Tensor) -> Tensor:
        if x.rotary is None:
            return t.to(work)
        rows = exact_rows(x.rotary, positions, scaled=True)
        cos, sin = expand_rows(*(r.to(work) for r in rows), x.rotary.pairing)
        return put(turn(t.to(work), cos, sin, x.rotary.rotary_dim, x.rotary.pairing))

    device = x.q.device
    out = torch.zeros(x.q.shape, dtype=torch.float64, device=device)
    lse2 = torch.full(x.q.shape[:2], -math.inf, dtype=torch.float64, device=device)
    for b in range(table.num_sequences):
        rows = slice(int(table.q_indptr[b]), int(table.q_indptr[b + 1]))
        extents = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]].tolist()
        if rows.start == rows.stop:
            continue
        positions = torch.from_numpy(table.q_positions[rows]).to(device)
        place = torch.tensor(
            [(p, r, s + r - lo + d) for p, lo, hi, s, d in extents for r in range(lo, hi)],
            dtype=torch.int64,
            device=device,
        ).reshape(-1, 3)
        page, row, view = place.T
        q = at(x.q[rows], positions)
        k = at(x.k[page, :, row], view).repeat_interleave(shape.group, 1)
        v = x.v[page, :, row].to(work).repeat_interleave(shape.group, 1)
        score = torch.einsum("rhd,lhd->rhl", q, k) * shape.scale
        if shape.softcap is not None:
            score = shape.softcap * torch.tanh(score / shape.softcap)
        hidden = view[None] > positions[:, None]
        if shape.window is not None:
            hidden |= view[None] <= positions[:, None] - shape.window
        score = score.masked_fill(hidden[:, None], -math.inf)
        top = score.amax(-1) if len(page) else score.new_full(score.shape[:2], -math.inf)
        if x.sinks is not None:
            top = torch.maximum(top, x.sinks.to(work))
        top = top.masked_fill(top == -math.inf, 0.0)
        weights = torch.exp(score - top[..., None])
        total = weights.sum(-1)
        if x.sinks is not None:
            total = total + torch.exp(x.sinks.to(work) - top)
        result = torch.einsum("rhl,lhd->rhd", put(weights), v) / total.masked_fill(total == 0, 1.0)[..., None]
        out[rows] = put(result).double()
        lse2[rows] = (top.double() + total.double().log()) / math.log(2)
    return out, lse2


def truth_of(
    table: SegmentTable, shape: AttentionShape, rotary: RotaryTable | None, q: Tensor, pages: Tensor
) -> dict[int, Tensor]:
    """float64 results for cached K as it lies: the last rows of the first and of the last sequence.

    Returns: {first row: out [n, Hq, D]}.
    """
    found = {}
    for b in {0, table.num_sequences - 1}:
        start, stop = int(table.q_indptr[b]), int(table.q_indptr[b + 1])
        first = max(start, stop - CHECKED_ROWS)
        extents = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]].copy()
        used, extents[:, PAGE] = np.unique(extents[:, PAGE], return_inverse=True)
        sequence = SequenceSegments(int(table.q_positions[first]), stop - first, extents.tolist())
        alone = SegmentTable.from_sequences([sequence], page_size=table.page_size, num_pages=len(used))
        reference = get_backend("reference")
        plan = reference.plan(alone, shape, rotary, device=q.device, dtype=torch.float64)
        chosen = pages[torch.from_numpy(used).to(pages.device)].double()
        out = reference.run(plan, 0, q[first:stop].double(), chosen)
        assert isinstance(out, Tensor)
        found[first] = out
    return found


def error_of(out: Tensor, truth: dict[int, Tensor]) -> float:
    """‖out − truth‖ / ‖truth‖ over the rows that `truth` holds."""
    have = torch.cat([out[first : first + len(want)].double() for first, want in truth.items()])
    return relative(have, torch.cat(list(truth.values())))


def relative(have: Tensor, want: Tensor) -> float:
    """‖have − want‖ / ‖want‖, or ‖have‖ where the truth is 0; NaN where `have` has one."""
    size = float(want.norm())
    return float((have.double() - want).norm()) / (size or 1.0)


def check(make: Callable[[], AttentionBackend], name: str, config: Config, device: str) -> Checked:
    """One batch by two fresh backends, with several draws where it is small. Never raises for what they do."""
    try:
        batch = BATCHES[name](config.page_size)
        draws = [inputs(batch, config, device, seed) for seed in range(_draws(batch, config))]
        backends, plans = [make(), make()], []
        for backend in backends:
            x = draws[0]
            plans.append(backend.plan(batch.table, x.shape, x.rotary, device=device, dtype=config.dtype))
        wrong = usual = size = gap = 0.0
        same = clean = True
        for x in draws:
            results = []
            for backend, plan in zip(backends, plans, strict=True):
                backend.forget(0)
                torch.full_like(
                    x.q, math.nan
                )  # freed at once: an output that takes its place unwritten shows
                results.append(backend.run(plan, 0, x.q, x.pages, sinks=x.sinks, return_lse=True))
            (out, lse2), (again, lse2_again) = results
            same = same and torch.equal(out, again) and torch.equal(lse2, lse2_again)
            want, want_lse2 = attend(x, None)
            ordinary, _ = attend(x, config.dtype)
            seen = want_lse2.isfinite()
            clean = clean and bool((lse2.isfinite() == seen).all()) and not bool(out.isnan().any())
            clean = clean and bool((out[~seen] == 0).all()) and bool((lse2[~seen] == -math.inf).all())
            if bool(seen.any()):
                gap = max(gap, float((lse2.double() - want_lse2)[seen].abs().max()))
            wrong += float((out.double() - want).square().sum())
            usual += float((ordinary - want).square().sum())
            size += float(want.square().sum())
        size = size or 1.0
        return Checked(name, config, math.sqrt(wrong / size), math.sqrt(usual / size), gap, same, clean)
    except KernelError as error:
        if error.code == "capability_missing":
            return Checked(name, config, refused=str(error))
        return Checked(name, config, failed=f"{type(error).__name__}: {error}")
    except Exception as error:  # whatever a kernel does wrong is a row of the report, not the end of it
        return Checked(name, config, failed=f"{type(error).__name__}: {str(error)[:300]}")


def _draws(batch: Batch, config: Config) -> int:
    """So many that their errors are those of about ENOUGH numbers, within reason."""
    numbers = max(1, batch.table.num_rows * 2 * config.group * config.dim)
    return max(1, min(6, ENOUGH // numbers))
