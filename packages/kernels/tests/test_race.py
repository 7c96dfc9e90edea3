"""Drawing by the Gumbel-max trick: the kernel against its definition in Python, and what it refuses.

Its twin on a CPU is the engine's sampler in torch, which packages/engine/tests holds to the same definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.race import race

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")


def gumbel(key: int, token: int) -> float:
    z = (key + (token + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB % 2**64
    u = (z ^ (z >> 31)) % 2**63 / 2**63
    return -math.log(-math.log1p(-min(max(u, 2.0**-64), 1 - 2.0**-24)))


def arguments(rows: int, vocab: int, device: str) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    scores = torch.randn(rows, vocab, generator=generator) * 3
    scores[::2, ::3] = -torch.inf
    return {
        "scores": scores.to(device),
        "peaks": scores.amax(-1).to(device),
        "keys": torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator).to(device),
        "temperatures": torch.tensor([0.3, 1.0, 2.5, 1e-5] * rows)[:rows].to(device),
        "least": torch.tensor([-torch.inf, -2.0, 0.0] * rows)[:rows].to(device),
    }


def right(given: dict[str, torch.Tensor], row: int, error: float) -> set[int]:
    """Winners, if sums may be wrong by `error`."""
    peak, temperature, least, key = (
        float(given["peaks"][row]),
        float(given["temperatures"][row]),
        float(given["least"][row]),
        int(given["keys"][row]) % 2**64,
    )
    scaled = [(score - peak) / temperature for score in given["scores"][row].tolist()]
    sums = {t: s + gumbel(key, t) for t, s in enumerate(scaled) if s >= least and s > -math.inf}
    return {t for t, value in sums.items() if value >= max(sums.values()) - error}


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("vocab", [1, 31, 2048, 2049, 9000])
def test_winners_are_those_of_the_definition(vocab: int) -> None:
    given = arguments(24, vocab, "cuda")
    given["scores"][0::2] = given["scores"][0::2].where(torch.arange(vocab, device="cuda") != vocab - 1, 0.5)
    given["peaks"] = given["scores"].amax(-1)
    found = race(**given).tolist()
    host = {name: tensor.cpu() for name, tensor in given.items()}
    for row, token in enumerate(found):
        assert token in right(host, row, 1e-5)


@pytest.mark.gpu
@on_gpu
def test_rows_may_be_picked_and_lie_apart() -> None:
    given = arguments(24, 5000, "cuda")
    everything = race(**given)
    wide = torch.full((24, 5003), 99.0, device="cuda")
    wide[:, :5000] = given["scores"]
    order = torch.tensor([5, 0, 23, 5, 7], device="cuda")
    picked = {name: tensor[order] for name, tensor in given.items() if name != "scores"}
    assert torch.equal(race(wide[:, :5000], **picked, rows=order), everything[order])


@pytest.mark.gpu
@on_gpu
def test_equal_sums_go_to_the_lowest_id_and_rows_without_scores_to_the_last() -> None:
    """At 10^30 noise is lost in rounding."""
    given = arguments(3, 4000, "cuda")
    given["scores"][:] = -torch.inf
    given["scores"][0, [70, 2100, 3999]] = 1.0
    given["scores"][1, :] = float("nan")
    given["peaks"] = torch.tensor([1e30, float("nan"), -torch.inf], device="cuda")
    given["temperatures"] = torch.ones(3, device="cuda")
    given["least"] = torch.full((3,), -torch.inf, device="cuda")
    assert race(**given).tolist() == [70, 3999, 3999]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("peaks", lambda: torch.zeros(3, device="cuda")),
        ("keys", lambda: torch.zeros(4, dtype=torch.int32, device="cuda")),
        ("temperatures", lambda: torch.ones(4, dtype=torch.float64, device="cuda")),
        ("least", lambda: torch.zeros(8, device="cuda")[::2]),
        ("keys", lambda: torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_wrong_arguments_are_refused_by_name(field: str, wrong: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(KernelError) as caught:
        race(**arguments(4, 10, "cuda") | {field: wrong()})
    assert (caught.value.code, caught.value.field) == (INVALID_ARGUMENT, field)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_elsewhere_are_refused(dtype: torch.dtype) -> None:
    given = arguments(4, 10, "cpu")
    with pytest.raises(KernelError, match="on CUDA") as caught:
        race(**given | {"scores": given["scores"].to(dtype)})
    assert caught.value.code == INVALID_ARGUMENT
