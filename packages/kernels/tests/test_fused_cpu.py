"""What `fused` promises on the CPU beyond the kit: equal bits on any threads, shared reads, any head, any dtype."""

import math
import threading
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dagengine_kernels import (
    AttentionShape,
    KernelError,
    SegmentTable,
    SequenceSegments,
    build_table,
    get_backend,
)
from dagengine_kernels.conformance_cases import Pages, build_case, definition, frequencies, random_case
from dagengine_kernels.fused import cpu, native, planner
from dagengine_kernels.fused.backend import FusedBackend
from dagengine_kernels.fused.plan import PlanParameters

if native.why_missing():
    pytest.skip(native.why_missing(), allow_module_level=True)

ISAS = native.load().cpu.isas()


def fused(isa=None):
    return get_backend("fused", implementation="cpu", isa=isa)


def attend(backend, case, dtype=torch.float32, pages=None, q=None):
    plan = backend.plan(case.table, case.shape, case.rotary, device="cpu", dtype=dtype)
    q = case.q.to(dtype) if q is None else q
    out, lse2 = backend.run(plan, 0, q, case.kv_layer.to(pages or dtype), sinks=case.sinks, return_lse=True)
    return plan, out, lse2


def error(have, want):
    return float((have.double() - want.double()).norm() / want.double().norm())


def many_readers(num_readers=7, tokens=1500, rows=1, page_size=16, **options):
    """Readers of one document, each at its own delta, with some tokens of their own."""
    pages = Pages(tokens // page_size + 2 * num_readers * (2 + rows // page_size) + 2, page_size, 3)
    document = pages.place(tokens, 5, 0, in_order=True)
    sequences = []
    for i in range(num_readers):
        moved = [(page, lo, hi, stored, delta + 11 * i) for page, lo, hi, stored, delta in document]
        first = tokens + 11 * i
        sequences.append(SequenceSegments(first, rows, [*moved, *pages.place(rows, first, first)], i))
    rotary = build_table(frequencies(options.get("head_dim", 64)), 1.0, 8192)
    settings = {"heads": (6, 2), "head_dim": 64, "rotary": rotary, **options}
    return build_case(sequences, pages, **settings)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@settings(max_examples=40, deadline=None)
@given(st.integers(100, 10**6), st.sampled_from(ISAS))
def test_random_batches_match_the_definition(seed, isa):
    case = random_case(seed)
    want, want_lse2 = definition(case)
    _, out, lse2 = attend(fused(isa), case)
    seen = np.isfinite(want_lse2)
    assert not out.isnan().any()
    assert np.array_equal(np.isfinite(lse2.numpy()), seen)
    assert np.abs(out.double().numpy() - want).max(initial=0.0) <= 1e-4
    assert np.abs(lse2.numpy()[seen] - want_lse2[seen]).max(initial=0.0) <= 1e-4


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("options", [{}, {"window": 1800, "softcap": 3.0, "sinks": True}], ids=["", "all"])
@pytest.mark.parametrize("rows", [1, 90])
def test_shared_reads_match_the_reference(isa, options, rows):
    case = many_readers(tokens=2500, rows=rows, num_readers=7 if rows == 1 else 2, **options)
    _, want, want_lse2 = attend(get_backend("reference"), case)
    for dtype, bar in ((torch.float32, 2e-6), (torch.bfloat16, 4e-3), (torch.float16, 1e-3)):
        plan, out, lse2 = attend(fused(isa), case, dtype)
        assert error(out, want) <= bar
        assert (lse2 - want_lse2).abs().max() <= (1e-4 if dtype == torch.float32 else 0.05)
        assert plan.arrays.num_parts > 0, "nothing was cut: the merge was not tried"


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("head_dim", [8, 40, 72, 80, 104, 192, 256, 320])
def test_heads_of_any_width(isa, head_dim):
    case = many_readers(num_readers=3, tokens=70, head_dim=head_dim, heads=(2, 1))
    _, want, _ = attend(get_backend("reference"), case)
    assert error(attend(fused(isa), case)[1], want) <= 2e-6
    assert error(attend(fused(isa), case, torch.bfloat16)[1], want) <= 6e-3


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("group", [1, 2, 5, 6, 7, 12, 130])
def test_groups_of_any_size(isa, group):
    case = many_readers(num_readers=3, tokens=90, head_dim=16, heads=(group, 1))
    _, want, _ = attend(get_backend("reference"), case)
    assert error(attend(fused(isa), case)[1], want) <= 2e-6


@pytest.mark.parametrize("isa", ISAS)
def test_large_scores_do_not_overflow(isa):
    case = many_readers(num_readers=2, tokens=300)
    case = replace(case, q=case.q * 300, sinks=torch.linspace(-500, 500, 6))
    _, want, want_lse2 = attend(get_backend("reference"), case)
    _, out, lse2 = attend(fused(isa), case)
    assert error(out, want) <= 1e-3
    assert torch.allclose(lse2, want_lse2, rtol=1e-5)


@pytest.mark.parametrize("pages", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_queries_and_pages_of_different_dtypes(dtype, pages):
    case = many_readers(num_readers=3, tokens=200)
    case = replace(case, kv_layer=case.kv_layer.to(pages).float())
    _, want, _ = attend(get_backend("reference"), case)
    _, out, _ = attend(fused(), case, dtype, pages)
    assert out.dtype == dtype
    bar = 2e-6 if dtype == torch.float32 else 4e-3
    assert error(out, want) <= bar


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bits_do_not_depend_on_the_number_of_threads(isa, rows, dtype, threads):
    case = many_readers(rows=rows, sinks=True)
    results = []
    for count in (1, 2, 3):
        threads(count)
        plan, *result = attend(fused(isa), case, dtype)
        assert plan.loaded["native"].threads(count) == count, "the batch is too small to try threads"
        results.append(result)
    for out, lse2 in results[1:]:
        assert torch.equal(out, results[0][0])
        assert torch.equal(lse2, results[0][1])


def test_readers_of_one_document_read_it_once():
    case = many_readers(num_readers=8)
    backend = fused()
    attend(backend, case)
    reads = backend.reads
    assert reads.unique_tokens == 1500 + 8
    assert reads.tokens <= 1.15 * reads.unique_tokens
    assert reads.unique_bytes == reads.unique_tokens * 2 * 2 * 64 * 4
    assert reads.bytes == reads.tokens * 2 * 2 * 64 * 4


def test_workers_are_counted_by_the_work(threads):
    small, large = many_readers(1, 50), many_readers(8, 1500)
    counts = []
    for number in (1, 8):
        threads(number)
        counts.append([cpu.workers(case.table, case.shape) for case in (small, large)])
    assert counts[0] == counts[1]
    assert counts[0][0] == 1 < counts[0][1]


@pytest.mark.parametrize("group", [1, 2, 3, 4, 8, 71, 200])
def test_tiles_hold_whole_rows_and_whole_strips(group):
    rows = cpu.tile_rows(group)
    assert rows % group == 0
    assert rows <= max(cpu.TILE_ROWS, group)
    assert rows % cpu.STRIP_ROWS == 0 or group > cpu.TILE_ROWS // cpu.STRIP_ROWS


def test_a_plan_can_be_run_again_after_another():
    backend = fused()
    first, second = many_readers(num_readers=2, tokens=100), many_readers(rows=30)
    plan, out, _ = attend(backend, first)
    attend(backend, second)
    again = backend.run(plan, 0, first.q, first.kv_layer)
    assert torch.equal(again, out)


def test_temporaries_do_not_grow_with_the_context():
    sizes = []
    for tokens in (1500, 6000):
        backend = fused()
        attend(backend, many_readers(num_readers=2, tokens=tokens))
        sizes.append(backend.temp_bytes)
    assert sizes[1] <= 2 * sizes[0]


def test_an_empty_table_is_planned():
    table = SegmentTable.from_sequences((), page_size=16, num_pages=1)
    backend = fused()
    plan = backend.plan(table, AttentionShape(2, 1, 8, 1.0), None, device="cpu", dtype=torch.float32)
    out = backend.run(plan, 0, torch.empty(0, 2, 8), torch.zeros(1, 2, 1, 16, 8))
    assert out.shape == (0, 2, 8)


def test_pages_of_another_dtype_are_refused():
    case = many_readers(num_readers=1, tokens=20)
    with pytest.raises(KernelError) as refused:
        attend(fused(), case, pages=torch.float64)
    assert (refused.value.code, refused.value.field) == ("capability_missing", "kv_layer")


def test_auto_runs_the_widest_instruction_set_and_says_so():
    backend = get_backend("fused")
    attend(backend, many_readers(num_readers=1, tokens=20))
    assert backend.implementation == f"fused-cpu-{ISAS[0]}"


def test_the_environment_chooses_the_instruction_set(monkeypatch):
    monkeypatch.setenv(cpu.ISA_VARIABLE, "portable")
    assert fused().implementation == "fused-cpu-portable"
    assert fused(ISAS[0]).implementation == f"fused-cpu-{ISAS[0]}"
    monkeypatch.setenv(cpu.ISA_VARIABLE, "avx3")
    with pytest.raises(KernelError, match="not 'avx3'") as refused:
        fused()
    assert refused.value.field == "isa"


def test_what_cannot_be_had_is_refused():
    for options, field in (
        ({"implementation": "gpu"}, "implementation"),
        ({"implementation": ["cpu"]}, "implementation"),
        ({"isa": "avx2"}, "options"),
        ({"implementation": "cpu", "isa": "avx3"}, "isa"),
        ({"implementation": "cpu", "lanes": 3}, "options"),
    ):
        with pytest.raises(KernelError) as refused:
            get_backend("fused", **options)
        assert refused.value.field == field


def test_a_named_implementation_that_cannot_run_says_why():
    case = many_readers(num_readers=1, tokens=20)
    with pytest.raises(KernelError) as refused:
        fused().plan(case.table, case.shape, case.rotary, device="meta", dtype=torch.float32)
    assert refused.value.code == "capability_missing"


def test_without_the_compiled_part_it_is_refused_with_the_reason(monkeypatch):
    monkeypatch.setattr(native, "why_missing", lambda: "no compiler was found")
    assert "no compiler was found" in FusedBackend.unavailable("cpu")
    case = many_readers(num_readers=1, tokens=20)
    backend = get_backend("fused")
    assert "no compiler was found" in backend.implementation
    with pytest.raises(KernelError, match="no compiler was found") as refused:
        backend.plan(case.table, case.shape, case.rotary, device="cpu", dtype=torch.float32)
    assert refused.value.code == "capability_missing"
    with pytest.raises(KernelError, match="no compiler was found"):
        fused()


@pytest.mark.parametrize("other", [lambda: get_backend("fused"), fused], ids=["unused", "of the same name"])
def test_another_backends_plan_is_refused(other):
    case = many_readers(num_readers=1, tokens=20)
    plan, _, _ = attend(fused(ISAS[-1]), case)
    theirs, _, _ = attend(get_backend("reference"), case)
    backend = other()
    for act in (
        lambda: backend.run(plan, 0, case.q, case.kv_layer),
        lambda: backend.run(theirs, 0, case.q, case.kv_layer),
        lambda: backend.advance(plan),
        lambda: backend.advance(theirs),
    ):
        with pytest.raises(KernelError) as refused:
            act()
        assert (refused.value.code, refused.value.field) == ("invalid_argument", "plan")


@pytest.mark.parametrize("field", ["q", "kv_layer", "sinks"])
def test_tensors_of_another_device_are_refused(field):
    case = many_readers(num_readers=1, tokens=20)
    backend = fused()
    plan, _, _ = attend(backend, case)
    given = {"q": case.q, "kv_layer": case.kv_layer, "sinks": torch.zeros(6)}
    given[field] = given[field].to("meta")
    with pytest.raises(KernelError, match="is on meta") as refused:
        backend.run(plan, 0, **given)
    assert (refused.value.code, refused.value.field) == ("invalid_argument", field)


@pytest.mark.parametrize("softcap", [1e-46, 1e-40, 1e-37, 1e-3, 1e30, 1e39, math.inf])
def test_a_soft_cap_is_exact_or_refused(softcap):
    case = many_readers(num_readers=2, tokens=40, softcap=softcap)
    if softcap < 1.2e-38 or softcap > 3.4e38:
        with pytest.raises(KernelError) as refused:
            attend(fused(), case)
        assert (refused.value.code, refused.value.field) == ("capability_missing", "softcap")
    else:
        _, want, _ = attend(get_backend("reference"), case)
        assert error(attend(fused(), case)[1], want) <= 2e-6


@pytest.mark.parametrize("scale", [1e39, -1e39])
def test_a_scale_that_float32_does_not_hold_is_refused(scale):
    case = many_readers(num_readers=1, tokens=20)
    with pytest.raises(KernelError) as refused:
        attend(fused(), replace(case, shape=replace(case.shape, scale=scale)))
    assert (refused.value.code, refused.value.field) == ("capability_missing", "scale")


@pytest.mark.parametrize("window", [2**31 - 1, 2**31, 2**32 + 1, 2**63])
def test_a_window_wider_than_any_context_hides_nothing(window):
    _, want, want_lse2 = attend(fused(), many_readers(num_readers=2, tokens=40))
    _, out, lse2 = attend(fused(), many_readers(num_readers=2, tokens=40, window=window))
    assert torch.equal(out, want) and torch.equal(lse2, want_lse2)


def test_threads_that_share_a_backend_take_turns():
    backend = fused()
    cases = [many_readers(3, 900), many_readers(2, 1800, rows=30), many_readers(7, 4000)]
    made = [attend(backend, case) for case in cases]
    wrong = []

    def repeat(case, plan, want):
        for _ in range(30):
            if not torch.equal(backend.run(plan, 0, case.q, case.kv_layer), want):
                wrong.append(plan)

    work = [
        threading.Thread(target=repeat, args=(c, plan, out))
        for c, (plan, out, _) in zip(cases, made, strict=True)
    ]
    for one in work:
        one.start()
    for one in work:
        one.join()
    assert not wrong


@pytest.mark.parametrize(
    ("reserve", "field"),
    [
        (7, "reserve"),
        ([[5]], "reserve"),
        ([[8], []], "reserve[0]"),
        ([[], [2**31]], "reserve[1]"),
        ([[-1], []], "reserve[0]"),
        ([[5, 5], []], "reserve[0]"),
        ([[5], [6, 5]], "reserve[1]"),
        ([[0], []], "reserve[0]"),
        ([[2], []], "reserve[0]"),
        ([None, []], "reserve[0]"),
        ([[1.5], []], "reserve[0]"),
        ([["a"], []], "reserve[0]"),
        ([5, 6], "reserve[0]"),
    ],
)
def test_only_fresh_pages_of_the_arena_are_reserved(reserve, field):
    table = SegmentTable.from_sequences(
        [
            SequenceSegments(19, 1, [(0, 0, 16, 0, 0), (1, 0, 4, 16, 0)], 0),
            SequenceSegments(5, 1, [(2, 0, 6, 0, 0)], 1),
        ],
        page_size=16,
        num_pages=8,
    )
    parameters = PlanParameters(2, 2, (64,), (8,), 2)
    fine = planner.plan_table(table, parameters, reserve=[np.array([3]), (4, 7)])
    assert fine.tails.tolist() == [[1, 2, 1], [4, 3, 1]]
    with pytest.raises(KernelError) as refused:
        planner.plan_table(table, parameters, reserve=reserve)
    assert (refused.value.code, refused.value.field) == ("invalid_argument", field)


def test_lse_of_equal_scores():
    """Of n equal scores s it is log2(n) + s * log2(e), through cuts and merges."""
    case = many_readers(num_readers=1, tokens=4000, heads=(1, 1), rotary=None)
    case = replace(case, q=torch.full_like(case.q, 0.5))
    kv_layer = torch.where(case.kv_layer.isnan(), math.nan, 0.25)
    plan, _, lse2 = attend(fused(), replace(case, kv_layer=kv_layer))
    assert plan.arrays.num_parts > 0
    want = math.log2(4001) + 64 * 0.5 * 0.25 / 8 / math.log(2)
    assert lse2.item() == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("isa", ISAS)
def test_a_sink_of_minus_infinity_takes_nothing(isa):
    rotary = build_table(frequencies(16), 1.0, 64)
    table = SegmentTable.from_sequences(
        [SequenceSegments(0, 1, []), SequenceSegments(5, 1, [(0, 0, 5, 0, 0)], 1)], page_size=8, num_pages=1
    )
    shape = AttentionShape(4, 2, 16, 0.25)
    q, kv = torch.randn(2, 4, 16), torch.randn(1, 2, 2, 8, 16)
    sinks = torch.tensor([-math.inf, 0.0, 1.0, -math.inf])
    results = []
    for backend in (fused(isa), get_backend("reference")):
        plan = backend.plan(table, shape, rotary, device="cpu", dtype=torch.float32)
        results.append(backend.run(plan, 0, q, kv, sinks=sinks, return_lse=True))
    (out, lse2), (want, want_lse2) = results
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse2, want_lse2)
    assert torch.isneginf(lse2[0, [0, 3]]).all() and not out[0].any()
