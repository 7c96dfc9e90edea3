"""A pytest kit for attention backends: inherit `AttentionBackendConformance` and say how to make yours.

    class TestMine(AttentionBackendConformance):
        def make_backend(self): return MyBackend()

It holds a backend to the definition (conformance_cases.py: a per-row float64 loop), to its own promises and
to the contract of `AttentionBackend`. What its capabilities rule out must be refused by `plan`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from dagengine_kernels.append import append_kv, empty_pages
from dagengine_kernels.backend import AttentionBackend, AttentionShape
from dagengine_kernels.conformance_cases import (
    CASES,
    Case,
    Pages,
    build_case,
    definition,
    frequencies,
    named_case,
    random_case,
)
from dagengine_kernels.dense import attend
from dagengine_kernels.errors import KernelError
from dagengine_kernels.lse import merge_many
from dagengine_kernels.rotary import build_table, rotate
from dagengine_kernels.segments import SegmentTable, SequenceSegments

LOG2E = math.log2(math.e)


class AttentionBackendConformance:
    """Inherit, implement `make_backend`, and run pytest."""

    device: str = "cpu"

    float32_tolerance: float = 1e-5
    """Relative L2 error of float32 outputs."""

    bfloat16_factor: float = 1.25
    """How many times the error of ordinary RoPE and attention in bf16 is allowed."""

    random_cases: int = 25

    def make_backend(self) -> AttentionBackend:
        """A fresh backend."""
        raise NotImplementedError

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        return self.make_backend()

    def attend(
        self, backend: AttentionBackend, case: Case, dtype: torch.dtype = torch.float32, layer: int = 0
    ) -> tuple[Tensor, Tensor]:
        """out and lse2 of a case, on the CPU; skips what the backend cannot do, once `plan` refused it."""
        table, shape = case.table, case.shape
        rotary = case.rotary
        if rotary is not None:
            rotary = replace(rotary, cos=rotary.cos.to(self.device), sin=rotary.sin.to(self.device))
        able = backend.capabilities
        if not _able(backend, case, self.device, dtype):
            with pytest.raises(KernelError) as refused:
                backend.plan(table, shape, rotary, device=self.device, dtype=dtype)
            assert refused.value.code == "capability_missing"
            pytest.skip(f"{backend.name} says it cannot do this")
        plan = backend.plan(table, shape, rotary, device=self.device, dtype=dtype)
        q, kv_layer = case.q.to(self.device, dtype), case.kv_layer.to(self.device, dtype)
        sinks = None if case.sinks is None else case.sinks.to(self.device)
        if sinks is not None and not able.sinks:
            pytest.skip(f"{backend.name} has no sinks")
        before = kv_layer.clone()
        out, lse2 = backend.run(plan, layer, q, kv_layer, sinks=sinks, return_lse=True)
        assert torch.equal(before.nan_to_num(7.0), kv_layer.nan_to_num(7.0)), "the pages were written"
        assert out.dtype == dtype
        assert lse2.dtype == torch.float32
        only = backend.run(plan, layer, q, kv_layer, sinks=sinks)
        assert isinstance(only, Tensor)
        assert torch.equal(only, out), "out depends on return_lse, or on what ran before"
        return out.cpu(), lse2.cpu()

    def check(self, backend: AttentionBackend, case: Case, want: np.ndarray, want_lse2: np.ndarray) -> None:
        out, lse2 = self.attend(backend, case)
        assert out.shape == want.shape
        assert lse2.shape == want_lse2.shape
        seen = np.isfinite(want_lse2)
        assert not out.isnan().any(), "NaN of a neighbour leaked"
        assert np.array_equal(seen, np.isfinite(lse2.numpy()))
        assert (lse2.numpy()[~seen] == -np.inf).all()
        assert (out.numpy()[~seen] == 0).all()
        assert _relative(out.double().numpy(), want) <= self.float32_tolerance
        if seen.any():
            assert np.abs(lse2.numpy()[seen] - want_lse2[seen]).max() <= 1e-4

    @pytest.mark.parametrize("name", CASES)
    def test_matches_the_definition(self, backend: AttentionBackend, name: str) -> None:
        self.check(backend, *_known(name))

    def test_matches_the_definition_on_random_batches(self, backend: AttentionBackend) -> None:
        for seed in range(self.random_cases):
            known = _known(seed)
            if _able(backend, known[0], self.device, torch.float32):
                self.check(self.make_backend(), *known)

    @pytest.mark.parametrize("name", CASES)
    def test_bfloat16_sees_what_float32_sees(self, backend: AttentionBackend, name: str) -> None:
        case, want, want_lse2 = _known(name)
        out, lse2 = self.attend(backend, case, torch.bfloat16)
        assert not out.isnan().any()
        assert np.array_equal(np.isfinite(want_lse2), np.isfinite(lse2.numpy()))
        assert _relative(out.double().numpy(), want) <= 2e-2

    def test_bfloat16_error_is_that_of_ordinary_rope(self, backend: AttentionBackend) -> None:
        """Against unrounded rotations in float64: ours from moved segments, and RoPE at view positions."""
        ours, ordinary = [], []
        for seed in range(4):
            generator = torch.Generator().manual_seed(seed)
            heads, dim, context, rows = 2, 64, 160, 8
            k, v = (torch.randn(context + rows, heads, dim, generator=generator).bfloat16() for _ in "kv")
            q = torch.randn(rows, 2 * heads, dim, generator=generator).bfloat16()
            rotary = build_table(frequencies(dim), 1.0, 1024, device=self.device)
            views = torch.arange(context + rows)
            stored = torch.cat([torch.arange(40) + start for start in (300, 7, 90, 480)] + [views[context:]])
            pages = Pages(40, 16, seed)
            extents = [
                e
                for i, start in enumerate((300, 7, 90, 480))
                for e in pages.place(40, start, 40 * i, offset=3 * i)
            ]
            extents += pages.place(rows, context, context)
            slots = torch.cat([torch.arange(page * 16 + lo, page * 16 + hi) for page, lo, hi, *_ in extents])
            kv_layer = empty_pages(40, heads, 16, dim, dtype=torch.bfloat16, device=self.device)
            on_device = [x.to(self.device) for x in (k, v, stored, slots)]
            append_kv(*on_device, rotary=rotary, kv_layer=kv_layer)
            table = SegmentTable.from_sequences(
                [SequenceSegments(context, rows, extents)], page_size=16, num_pages=40
            )
            shape = AttentionShape(2 * heads, heads, dim, dim**-0.5)
            if not _able(backend, Case(table, shape, rotary, q, kv_layer), self.device, torch.bfloat16):
                pytest.skip(f"{backend.name} does not take this")
            plan = backend.plan(table, shape, rotary, device=self.device, dtype=torch.bfloat16)
            out = backend.run(plan, 0, q.to(self.device), kv_layer)
            assert isinstance(out, Tensor)

            want = _ordinary(q, k, v, torch.float64).numpy()
            ours.append(_relative(out.cpu().double().numpy(), want))
            ordinary.append(_relative(_ordinary(q, k, v, torch.bfloat16).numpy(), want))
        assert np.mean(ours) <= self.bfloat16_factor * np.mean(ordinary)

    def test_same_bits_from_run_to_run(self) -> None:
        for seed in (3, 4, 8):
            case = random_case(seed)
            first, second = self.make_backend(), self.make_backend()
            if _able(first, case, self.device, torch.float32):
                a, b = self.attend(first, case), self.attend(second, case)
                assert torch.equal(a[0], b[0])
                assert torch.equal(a[1], b[1])

    def test_lse_is_base_2(self, backend: AttentionBackend) -> None:
        """Of n equal scores s it is log2(n) + s * log2(e)."""
        pages = Pages(4, 16, 0)
        case = build_case([SequenceSegments(9, 1, pages.place(8, 0, 0))], pages, rotary=None, head_dim=64)
        q = torch.full_like(case.q, 0.5)
        kv_layer = case.kv_layer.clone()
        kv_layer[:, 0] = torch.where(kv_layer[:, 0].isnan(), math.nan, 0.25)
        _, lse2 = self.attend(backend, replace(case, q=q, kv_layer=kv_layer))
        score = 64 * 0.5 * 0.25 / 8
        assert torch.allclose(lse2, torch.full_like(lse2, 3 + score * LOG2E), atol=1e-5)

    def test_parts_merge_to_the_whole(self, backend: AttentionBackend) -> None:
        pages = Pages(20, 16, 1)
        extents = [*pages.place(30, 9, 0), *pages.place(25, 100, 30, offset=4), *pages.place(6, 55, 55)]
        whole = build_case([SequenceSegments(55, 6, extents, 1)], pages)
        out, lse2 = self.attend(backend, whole)
        parts = []
        for part in (extents[:2], extents[2:5], extents[5:], []):
            table = SegmentTable.from_sequences(
                [SequenceSegments(55, 6, part, 1)], page_size=16, num_pages=20
            )
            parts.append(self.attend(self.make_backend(), replace(whole, table=table)))
        merged, merged_lse2 = merge_many(
            torch.stack([p[0] for p in parts]), torch.stack([p[1] for p in parts])
        )
        assert torch.allclose(merged, out, atol=1e-5)
        assert torch.allclose(merged_lse2, lse2, atol=1e-5)

    def test_the_order_of_extents_does_not_matter(self, backend: AttentionBackend) -> None:
        pages = Pages(20, 16, 2)
        extents = [*pages.place(40, 9, 0), *pages.place(20, 100, 40), *pages.place(3, 60, 60)]
        case = build_case([SequenceSegments(60, 3, extents, 1)], pages)
        turned = SegmentTable.from_sequences(
            [SequenceSegments(60, 3, extents[::-1], 2)], page_size=16, num_pages=20
        )
        out, _ = self.attend(backend, case)
        other, _ = self.attend(backend, replace(case, table=turned))
        assert torch.allclose(out, other, atol=1e-5)

    def test_a_batch_gives_what_its_sequences_give_alone(self, backend: AttentionBackend) -> None:
        pages = Pages(30, 16, 3)
        sequences = [
            SequenceSegments(40, 1, [*pages.place(33, 0, 0), *pages.place(8, 33, 33)], 1),
            SequenceSegments(20, 7, [*pages.place(20, 50, 0), *pages.place(7, 20, 20)], 2),
            SequenceSegments(10, 1, [*pages.place(10, 3, 0), *pages.place(1, 10, 10)], 3),
        ]
        case = build_case(sequences, pages)
        out, _ = self.attend(backend, case)
        for sequence, rows in zip(sequences, (slice(0, 1), slice(1, 8), slice(8, 9)), strict=True):
            table = SegmentTable.from_sequences([sequence], page_size=16, num_pages=30)
            alone, _ = self.attend(self.make_backend(), replace(case, table=table, q=case.q[rows]))
            assert torch.allclose(out[rows], alone, atol=1e-5)

    def test_decode_steps_follow_growing_and_changing_tables(self, backend: AttentionBackend) -> None:
        """Static extents grow, a sequence is forgotten and its id comes back with other pages; two layers."""
        pages = Pages(30, 4, 4)
        context, own, other = pages.place(13, 60, 0), pages.place(12, 13, 13), pages.place(21, 40, 0)
        steps = []
        for n in range(1, 13):
            extents, left = list(context), n
            for page, lo, hi, stored, delta in own:
                if left > 0:
                    extents.append((page, lo, min(hi, lo + left), stored, delta))
                left -= hi - lo
            static = len(context) + (n - 1) // 4 if n > 2 else 0
            steps.append(SequenceSegments(12 + n, 1, extents, 5, static))
        steps.append(SequenceSegments(21, 1, other, 5, len(other)))
        steps.append(SequenceSegments(21, 1, other[:3], 5, 2))
        for i, step in enumerate(steps):
            if i == len(steps) - 1:
                backend.forget(5)
            for layer in (0, 1):
                case = build_case([step], pages, seed=layer)
                whole = build_case([steps[11]] if i < 12 else [steps[12]], pages, seed=layer)
                case = replace(case, kv_layer=whole.kv_layer)
                out, _ = self.attend(backend, case, layer=layer)
                assert _relative(out.double().numpy(), definition(case)[0]) <= self.float32_tolerance
        backend.forget(5)
        backend.forget(12345)

    def test_what_does_not_fit_is_refused(self, backend: AttentionBackend) -> None:
        case = named_case("page-size-16")
        if not _able(backend, case, self.device, torch.float32):
            pytest.skip(f"{backend.name} does not take this")
        options: dict[str, Any] = {"device": self.device, "dtype": torch.float32}
        plan = backend.plan(case.table, case.shape, case.rotary, **options)
        q, kv_layer = case.q.to(self.device), case.kv_layer.to(self.device)
        wrong: tuple[tuple[str, Any, dict[str, Any]], ...] = (
            ("q", (plan, 0, q[:-1], kv_layer), {}),
            ("q", (plan, 0, q.double(), kv_layer), {}),
            ("kv_layer", (plan, 0, q, kv_layer[:1]), {}),
            ("kv_layer", (plan, 0, q, kv_layer.transpose(2, 3)), {}),
            ("sinks", (plan, 0, q, kv_layer), {"sinks": torch.zeros(3)}),
            ("plan", (replace(plan, backend="another"), 0, q, kv_layer), {}),
        )
        for field, arguments, named in wrong:
            with pytest.raises(KernelError) as refused:
                backend.run(*arguments, **named)
            assert refused.value.field == field
        short = build_table(frequencies(24), 1.0, 30)
        with pytest.raises(KernelError) as refused:
            backend.plan(case.table, case.shape, short, **options)
        assert refused.value.code == "position_overflow"
        extents = case.table.extents.copy()
        extents[0, 0] = case.table.num_pages
        with pytest.raises(KernelError) as refused:
            backend.plan(replace(case.table, extents=extents), case.shape, case.rotary, **options)
        assert refused.value.field == "extents[0].PAGE"

    def test_temporaries_are_counted(self, backend: AttentionBackend) -> None:
        self.attend(backend, named_case("page-size-16"))
        assert backend.temp_bytes > 0
        backend.reset_stats()
        assert backend.temp_bytes == 0

    def test_says_what_runs(self, backend: AttentionBackend) -> None:
        assert backend.name
        assert backend.implementation


@cache
def _known(which: str | int) -> tuple[Case, np.ndarray, np.ndarray]:
    """A named or (by seed) random case, and its out and lse2 by definition."""
    case = named_case(which) if isinstance(which, str) else random_case(which)
    return case, *definition(case)


def _ordinary(q: Tensor, k: Tensor, v: Tensor, dtype: torch.dtype) -> Tensor:
    """Causal attention of the last len(q) positions, RoPE at 0, 1, 2, ..., computed in `dtype`; float64."""
    group, dim, views = q.shape[1] // k.shape[1], q.shape[2], torch.arange(len(k))
    rotary = build_table(frequencies(dim), 1.0, len(k))
    q, k, v = (x.to(dtype) for x in (q, k, v))
    mask = torch.zeros(len(q), len(k), dtype=dtype)
    mask.masked_fill_(views[None] > views[-len(q) :, None], -math.inf)
    heads = (rotate(q, views[-len(q) :], rotary), rotate(k, views, rotary), v)
    q, k, v = (
        x.repeat_interleave(n, 1).transpose(0, 1)[None] for x, n in zip(heads, (1, group, group), strict=True)
    )
    return attend(q, k, v, mask, dim**-0.5)[0][0].transpose(0, 1).double()


def _able(backend: AttentionBackend, case: Case, device: str, dtype: torch.dtype) -> bool:
    try:
        backend.capabilities.check(backend.name, case.table, case.shape, device, dtype)
    except KernelError:
        return False
    return True


def _relative(have: np.ndarray, want: np.ndarray) -> float:
    size = float(np.linalg.norm(want))
    return float(np.linalg.norm(have - want)) / size if size else float(np.abs(have).max(initial=0.0))
