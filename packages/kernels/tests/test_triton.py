"""Triton against the kit and the definition: in its interpreter, and on the GPU where there is one."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
pytest.importorskip("triton")

from dagengine_kernels import AttentionShape, KernelError, SequenceSegments, build_table, get_backend
from dagengine_kernels.conformance import AttentionBackendConformance
from dagengine_kernels.conformance_cases import (
    Pages,
    build_case,
    definition,
    frequencies,
    named_case,
    random_case,
)
from dagengine_kernels.fused.triton.executor import TritonExecutor, interprets

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

# The interpreter takes about a second a case, so the kit's cases are chosen; all of them pass.
FLOAT32_CASES = (
    "page-size-3",
    "page-size-16",
    "page-size-64",
    "head-dim-80",
    "head-dim-128",
    "group-8",
    "window-softcap-sinks",
    "no-positions",
    "interleaved-partial",
    "attention-scaling",
    "empty-contexts",
    "no-rows-at-all",
    "rows-that-see-nothing-but-a-sink",
    "window-hides-everything",
    "same-page-by-several-slices",
    "one-document-many-readers",
    "long-prefill-window",
    "long-decode-softcap-sinks",
)
FLOAT16_CASES = (
    "page-size-16",
    "head-dim-64",
    "group-1",
    "interleaved",
    "long-prefill",
    "one-document-many-readers",
)
BFLOAT16_CASES = ("page-size-64", "window-softcap-sinks")


class TestTriton(AttentionBackendConformance):
    device = DEVICE
    random_cases = 4
    # The interpreter cuts float32 off to bfloat16, which doubles the error.
    bfloat16_factor = 2.5 if DEVICE == "cpu" else 1.25

    def make_backend(self):
        return get_backend("fused", implementation="triton")

    @pytest.mark.parametrize("name", FLOAT32_CASES)
    def test_matches_the_definition(self, backend, name):
        super().test_matches_the_definition(backend, name)

    @pytest.mark.parametrize("name", BFLOAT16_CASES)
    def test_bfloat16_sees_what_float32_sees(self, backend, name):
        super().test_bfloat16_sees_what_float32_sees(backend, name)

    @pytest.mark.parametrize("name", FLOAT16_CASES)
    def test_float16_matches_the_definition(self, backend, name):
        case = named_case(name)
        want, want_lse2 = definition(case)
        out, lse2 = self.attend(backend, case, torch.float16)
        assert np.array_equal(np.isfinite(want_lse2), np.isfinite(lse2.numpy()))
        assert relative(out, want) <= 2e-3


def relative(have, want):
    return float(np.linalg.norm(have.double().numpy() - want) / np.linalg.norm(want))


def attend(backend, case):
    rotary = case.rotary
    if rotary is not None:
        rotary = replace(rotary, cos=rotary.cos.to(DEVICE), sin=rotary.sin.to(DEVICE))
    plan = backend.plan(case.table, case.shape, rotary, device=DEVICE, dtype=torch.float32)
    sinks = None if case.sinks is None else case.sinks.to(DEVICE)
    out, lse2 = backend.run(
        plan, 0, case.q.to(DEVICE), case.kv_layer.to(DEVICE), sinks=sinks, return_lse=True
    )
    return out.cpu(), lse2.cpu(), plan


def whole_heads(seed):
    """A random case with heads of 32 that turn whole."""
    case, generator = random_case(seed), torch.Generator().manual_seed(seed)
    rotary = case.rotary
    if rotary is not None:
        rotary = build_table(frequencies(32), rotary.attention_scaling, rotary.length, pairing=rotary.pairing)
    kv_layer = torch.randn(*case.kv_layer.shape[:-1], 32, generator=generator)
    return replace(
        case,
        shape=replace(case.shape, head_dim=32),
        rotary=rotary,
        q=torch.randn(*case.q.shape[:-1], 32, generator=generator),
        kv_layer=kv_layer.masked_fill(case.kv_layer[..., :1].isnan(), torch.nan),
    )


@pytest.mark.parametrize("seed", range(5))
def test_turning_keys_gives_what_turning_queries_gives(seed):
    case = whole_heads(seed)
    want, want_lse2 = definition(case)
    out, lse2, _ = attend(get_backend("fused", implementation="triton", turn="keys"), case)
    seen = np.isfinite(want_lse2)
    assert np.array_equal(seen, np.isfinite(lse2.numpy()))
    assert np.abs(out.double().numpy() - want).max(initial=0) <= 1e-4
    assert np.abs(lse2.numpy()[seen] - want_lse2[seen]).max(initial=0) <= 1e-4


@pytest.mark.parametrize("turn", ["query", "keys"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
def test_readers_of_one_document_at_their_own_deltas(turn, pairing):
    """The document's tiles are shared, cut among workers and merged; whole pages go by descriptors."""
    pages = Pages(12, 64, 0)
    document = pages.place(300, 40, 0, offset=7)
    sequences = []
    for i in range(5):
        moved = [(page, lo, hi, stored, 13 * i - 40) for page, lo, hi, stored, _ in document]
        sequences.append(SequenceSegments(400 + i, 1, [*moved, *pages.place(1, 400 + i, 400 + i)], i))
    rotary = build_table(frequencies(32), 1.139, 1024, pairing=pairing)
    case = build_case(sequences, pages, heads=(2, 1), head_dim=32, rotary=rotary, sinks=True)
    out, lse2, plan = attend(get_backend("fused", implementation="triton", turn=turn), case)
    want, want_lse2 = definition(case)
    assert plan.arrays.num_parts > 0
    assert relative(out, want) <= 1e-5
    assert np.abs(lse2.numpy() - want_lse2).max() <= 1e-4


def test_says_what_runs():
    backend = get_backend("fused", implementation="triton", turn="keys")
    assert backend.implementation.startswith("fused-triton-keys")
    assert interprets() == (DEVICE == "cpu")
    assert TritonExecutor.unavailable(torch.device(DEVICE)) is None
    assert TritonExecutor.unavailable(torch.device("meta"))
    if DEVICE == "cpu":
        assert "no CUDA device" in TritonExecutor.unavailable(torch.device("cuda"))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(KernelError) as refused:
        TritonExecutor(turn="values")
    assert refused.value.field == "turn"
    with pytest.raises(KernelError) as refused:
        TritonExecutor(heights=(48,))
    assert refused.value.field == "heights"
    case = named_case("partial-rotary")
    options = {"device": DEVICE, "dtype": torch.float32}
    with pytest.raises(KernelError) as refused:
        get_backend("fused", implementation="triton", turn="keys").plan(
            case.table, case.shape, case.rotary, **options
        )
    assert (refused.value.code, refused.value.field) == ("capability_missing", "rotary_dim")
    backend = get_backend("fused", implementation="triton")
    plan = backend.plan(case.table, case.shape, case.rotary, **options)
    with pytest.raises(KernelError) as refused:
        backend.run(plan, 0, case.q.to(DEVICE), case.kv_layer.to(DEVICE).half())
    assert refused.value.field == "kv_layer"
    many = AttentionShape(512, 1, 24, 1.0)
    with pytest.raises(KernelError) as refused:
        backend.plan(case.table, many, None, **options)
    assert (refused.value.code, refused.value.field) == ("capability_missing", "num_heads")
