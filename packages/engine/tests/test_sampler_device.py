"""A launch reads nothing of what it computes, so the host never waits. On CUDA the choices are the CPU's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from dagengine.sampler import NonFiniteLogits, Sampled, Sampler, SamplingRow
from dagengine.sampling import SamplingParams

from .sampler_reference import OPTIONS as COMMON
from .sampler_reference import choices, row

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")

ERROR = 1e-4
"""Of a score: what rounding may do to it; choices may differ where two scores are this close."""

OPTIONS = [*COMMON, SamplingParams(temperature=1e-7), SamplingParams(temperature=100.0, top_k=1)]


def rows_of(count: int, vocab: int, step: int = 0) -> list[SamplingRow]:
    return [
        row(
            OPTIONS[i % len(OPTIONS)],
            seed=i,
            key=i,
            step=step,
            seen=(1, 2, vocab - 1),
            banned=(0, 4) if i % 5 == 0 else (),
        )
        for i in range(count)
    ]


READS = {
    "item": lambda x: x.max().item(),
    "tolist": lambda x: x.tolist(),
    "a branch": lambda x: bool((x > 0).any()),
    "numpy": lambda x: x.numpy(),
    "a copy": lambda x: x.cpu(),
    "mask": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "unique": lambda x: x.unique(),
}
"""Ways to read a tensor on the host, each of which a launch must not use."""


@pytest.mark.parametrize("way", READS.values(), ids=READS.keys())
def test_a_tensor_without_data_cannot_be_read(way: object) -> None:
    """What makes the next test one."""
    with pytest.raises((RuntimeError, NotImplementedError, TypeError)):
        way(torch.zeros(3, 3, device="meta"))  # type: ignore[operator]


@pytest.mark.parametrize("vocab", [700, 500_000])
def test_a_launch_reads_nothing_of_what_it_computes(vocab: int) -> None:
    """On tensors without data, where a read raises; the code is CUDA's, but for the kernels that draw."""
    device = torch.device("meta")
    sampler = Sampler(device, vocab - 3)
    for step in range(3):
        pending = sampler.launch(torch.empty(24, vocab, device=device), rows_of(24, vocab, step))
        assert pending.ids.shape == (24,) and pending.ids.dtype == torch.int64 and pending.ids.is_meta
    again = rows_of(24, vocab)[4]._replace(step=1, sampled=(3,))
    sampler.launch(torch.empty(1, vocab, device=device), [again])
    for key in range(24):
        sampler.forget(key)


def cuda_logits(rows: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    """The same on both devices, with ties, masked ids, and the greatest of some rows at the end of the vocabulary."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)).mul(24).round().div(8)
    logits[::3, ::7] = -torch.inf
    logits[1::4, -5:] = logits.amax()
    return logits, logits.cuda()


@pytest.mark.gpu
@on_gpu
def test_cuda_launches_without_waiting() -> None:
    _, logits = cuda_logits(36, 5000, 0)
    sampler = Sampler(logits.device, 4990)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pendings = [sampler.launch(logits, rows_of(36, 5000, step)) for step in range(3)]
        again = rows_of(36, 5000)[4]._replace(step=1, sampled=(3,))
        pendings.append(sampler.launch(logits[:1], [again]))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for pending in pendings:
        results = pending.results()
        assert [r.token_id for r in results if isinstance(r, Sampled)] == pending.ids.tolist()


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("vocab", [257, 2000])
def test_cuda_chooses_what_the_cpu_chooses(vocab: int) -> None:
    """But where rounding decides, which is rare; there both choices are right to within ERROR."""
    differ, count = 0, 0
    for seed in range(6):
        here, there = cuda_logits(60, vocab, seed)
        rows = [one._replace(seed=1000 * seed + i) for i, one in enumerate(rows_of(60, vocab))]
        cpu = Sampler(here.device, vocab).launch(here, rows).results()
        cuda = Sampler(there.device, vocab).launch(there, rows).results()
        for a, b, values, one in zip(cpu, cuda, here.tolist(), rows, strict=True):
            assert isinstance(a, Sampled) and isinstance(b, Sampled)
            count += 1
            if a.token_id != b.token_id:
                differ += 1
                assert {a.token_id, b.token_id} <= choices(values, one, error=ERROR)
            elif a.logprob is not None and b.logprob is not None:
                assert b.logprob.logprob == pytest.approx(a.logprob.logprob, abs=1e-4)
                assert [t for t, _ in a.logprob.top] == [t for t, _ in b.logprob.top]
    assert differ <= count // 200


@pytest.mark.gpu
@on_gpu
def test_cuda_rows_never_depend_on_the_batch() -> None:
    _, logits = cuda_logits(64, 50_000, 3)
    rows = rows_of(64, 50_000)
    together = Sampler(logits.device, 50_000).launch(logits, rows).results()
    alone = []
    for i, one in enumerate(rows):
        (result,) = Sampler(logits.device, 50_000).launch(logits[i : i + 1], [one]).results()
        alone.append(result)
    assert together == alone


@pytest.mark.gpu
@on_gpu
def test_cuda_counts_ids_the_host_has_not_heard_of() -> None:
    params = SamplingParams(temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.4)
    logits = torch.randn(5, 300, generator=torch.Generator().manual_seed(8))
    rows = [row(params, seed=i, key=i, seen=(i,)) for i in range(5)]
    ids = {}
    for device in ("cpu", "cuda"):
        sampler, there = Sampler(torch.device(device), 300), logits.to(device)
        steps = [sampler.launch(there, [one._replace(step=step) for one in rows]).ids for step in range(20)]
        ids[device] = torch.stack(steps).cpu()
    assert torch.equal(ids["cpu"], ids["cuda"])


@pytest.mark.gpu
@on_gpu
def test_cuda_finds_rows_that_are_not_finite() -> None:
    nan, inf = float("nan"), float("inf")
    logits = torch.tensor([[1.0, 2.0], [1.0, nan], [nan, 1.0], [-inf, -inf], [inf, 0.0], [-inf, 0.5]]).cuda()
    for params in (SamplingParams(temperature=0.0), SamplingParams(), SamplingParams(top_k=1, top_p=0.5)):
        rows = [row(params, key=i) for i in range(6)]
        pending = Sampler(logits.device, 2).launch(logits, rows)
        failed = [isinstance(result, NonFiniteLogits) for result in pending.results()]
        assert failed == [False, True, True, True, True, False]
        assert pending.ids[1:].tolist() == [0, 0, 0, 0, 1]
