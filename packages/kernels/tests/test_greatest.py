"""The greatest score of each row: the kernel against torch. Its twin on a CPU is the engine's, in numpy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.greatest import SLICE, greatest

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
NAN, INF = torch.nan, torch.inf


def check(scores: torch.Tensor) -> None:
    ids, peaks, finite = greatest(scores)
    want = scores.cpu().numpy().argmax(-1).tolist()
    values = scores.cpu()[range(len(scores)), want]
    usable = values.isfinite()
    assert torch.equal(finite.cpu(), usable)
    assert ids.tolist() == [token if usable[i] else 0 for i, token in enumerate(want)]
    assert torch.equal(peaks.cpu().nan_to_num(7.0), values.nan_to_num(7.0))


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("vocab", [1, 31, SLICE - 1, SLICE, SLICE + 1, 128_256])
def test_it_is_the_argmax_of_any_number_of_rows_again_and_again(vocab: int) -> None:
    generator = torch.Generator().manual_seed(vocab)
    for rows in (1, 3, 64, 2, 300):
        scores = torch.randn(rows, vocab + 5, generator=generator).cuda()
        for _ in range(3):
            check(scores[:, :vocab])
        check(scores[:, 2 : 2 + vocab] - 100.0)


@pytest.mark.gpu
@on_gpu
def test_ties_and_numbers_that_are_none() -> None:
    wide = torch.zeros(8, 3 * SLICE, device="cuda")
    wide[0, 5], wide[0, 2 * SLICE] = 1.0, 1.0
    wide[1] = -0.0
    wide[1, 7] = 0.0
    wide[2, SLICE + 1], wide[2, SLICE + 9] = NAN, INF
    wide[3, 9] = INF
    wide[4] = -INF
    wide[5] = -INF
    wide[5, 6000] = -3.0e38
    wide[6, 3 * SLICE - 1] = -NAN
    wide[7] = -torch.arange(3 * SLICE, device="cuda", dtype=torch.float32)
    check(wide)
    assert greatest(wide)[0].tolist() == [5, 0, 0, 0, 0, 6000, 0, 0]


@pytest.mark.gpu
@on_gpu
def test_no_rows_are_no_launch() -> None:
    ids, peaks, finite = greatest(torch.empty(0, 10, device="cuda"))
    assert len(ids) == len(peaks) == len(finite) == 0


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    "wrong",
    [
        lambda: torch.zeros(2, 10),
        lambda: torch.zeros(10, device="cuda"),
        lambda: torch.zeros(2, 10, device="cuda", dtype=torch.bfloat16),
        lambda: torch.zeros(10, 2, device="cuda").t(),
        lambda: torch.zeros(2, 0, device="cuda"),
    ],
)
def test_what_it_does_not_take(wrong: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(KernelError) as error:
        greatest(wrong())
    assert error.value.code == INVALID_ARGUMENT
