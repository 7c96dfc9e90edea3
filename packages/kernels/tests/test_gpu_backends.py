"""The torch backends on an NVIDIA GPU against the kit that any backend inherits (test_conformance.py: the CPU)."""

import pytest
import torch

from dagengine_kernels import (
    AttentionShape,
    SegmentTable,
    SequenceSegments,
    build_table,
    empty_pages,
    get_backend,
)
from dagengine_kernels.conformance import AttentionBackendConformance
from dagengine_kernels.conformance_cases import frequencies

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]


class OnGpu(AttentionBackendConformance):
    device = "cuda"
    random_cases = 15


class TestReference(OnGpu):
    float32_tolerance = 1e-7

    def make_backend(self):
        return get_backend("reference")


class TestSegmented(OnGpu):
    def make_backend(self):
        return get_backend("segmented")


class TestSegmentedInPlace(OnGpu):
    def make_backend(self):
        return get_backend("segmented", in_place_tokens=1, in_place_page_size=1)


class TestPacked(OnGpu):
    # A moved copy of K is rounded to bf16 a second time.
    bfloat16_factor = 2.0

    def make_backend(self):
        return get_backend("packed")


class TestNaive(OnGpu):
    bfloat16_factor = 2.0

    def make_backend(self):
        return get_backend("naive")


@pytest.mark.parametrize("name", ["packed", "naive", "segmented"])
@pytest.mark.parametrize("context", [1500, 0], ids=["after-a-context", "alone"])
def test_a_long_prefill_agrees_with_the_definition(name, context):
    """More rows than a tile and a causal end: the paths of torch's kernels that the kit's small cases do not take."""
    generator = torch.Generator().manual_seed(0)
    pages, size, heads, dim, rows = 50, 64, 2, 128, 700
    kv_layer = empty_pages(pages, heads, size, dim, dtype=torch.bfloat16)
    kv_layer.normal_(generator=generator)
    extents = [(i, 0, size, 64 * i + 100, -100) for i in range(context // size)]
    extents += [
        (30 + i, 0, min(size, rows - 64 * i), 3000 + 64 * i, len(extents) * size - 3000) for i in range(11)
    ]
    first = (context // size) * size
    table = SegmentTable.from_sequences(
        [SequenceSegments(first, rows, extents)], page_size=size, num_pages=pages
    )
    shape = AttentionShape(4 * heads, heads, dim, dim**-0.5)
    rotary = build_table(frequencies(dim), 1.0, 8000, device="cuda")
    q = torch.randn(rows, 4 * heads, dim, generator=generator).bfloat16().cuda()
    outs = []
    for backend in (get_backend(name), get_backend("reference")):
        plan = backend.plan(table, shape, rotary, device="cuda", dtype=torch.bfloat16)
        outs.append(backend.run(plan, 0, q, kv_layer.cuda(), return_lse=True))
    (out, lse2), (want, want_lse2) = outs
    assert (out.double() - want.double()).norm() <= 1e-2 * want.double().norm()
    assert (lse2 - want_lse2).abs().max() <= 0.03
