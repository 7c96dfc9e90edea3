"""Drawing by the Gumbel-max trick, with and without top-p: the kernels against the definition in Python.

Its twin on a CPU is the engine's sampler in torch, which packages/engine/tests holds to the same definition.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.draw import draw

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
    """Winners, if sums and shares may be wrong by `error`."""
    peak, temperature, least, key = (
        float(given["peaks"][row]),
        float(given["temperatures"][row]),
        float(given["least"][row]),
        int(given["keys"][row]) % 2**64,
    )
    scaled = [(score - peak) / temperature for score in given["scores"][row].tolist()]
    order = [t for t, s in enumerate(scaled) if s >= least and s > -math.inf]
    order.sort(key=lambda t: (-scaled[t], t))
    top_p = float(given["top_p"][row]) if "top_p" in given else math.inf
    total, winners = math.fsum(math.exp(scaled[t]) for t in order), set()
    final = {t: scaled[t] + gumbel(key, t) for t in order}
    for share in (top_p * (1 - error), top_p, top_p * (1 + error)):
        before, sums = 0.0, {}
        for token in order:
            if sums and before >= share * total:
                break
            sums[token] = final[token]
            before += math.exp(scaled[token])
        winners |= {t for t, value in sums.items() if value >= max(sums.values()) - error}
    return winners


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", [1, 31, 2048, 2049, 5000])
def test_winners_are_those_of_the_definition(vocab: int, ties: bool) -> None:
    given = arguments(12, vocab, "cuda")
    given["scores"][0::2] = given["scores"][0::2].where(torch.arange(vocab, device="cuda") != vocab - 1, 0.5)
    if ties:
        given["scores"] = given["scores"].round()
    given["peaks"] = given["scores"].amax(-1)
    for top_p in (None, 1e-9, 0.2, 0.8, 0.9999, math.inf):
        if top_p is not None:
            given["top_p"] = torch.full((12,), top_p, dtype=torch.float64, device="cuda")
        found = draw(**given).tolist()
        host = {name: tensor.cpu() for name, tensor in given.items()}
        sets = [right(host, row, 1e-5) for row in range(12)]
        assert all(token in winners for token, winners in zip(found, sets, strict=True))
        assert sum(map(len, sets)) <= 12 + 5  # mostly there is one winner


@pytest.mark.gpu
@on_gpu
def test_top_p_keeps_exactly_the_beginning_of_the_order() -> None:
    """Of 1000 equal tokens and likelier ones around them: which are ever drawn, over many keys."""
    row = torch.full((3000,), -torch.inf)
    row[500:2500:2], row[7], row[2999] = 0.0, 1.0, 1.0
    share = (2 * math.e + 10.5) / (2 * math.e + 1000)
    for top_p, kept in ((share, {7, 2999, *range(500, 522, 2)}), (1e-6, {7}), (0.004, {7, 2999})):
        given = {
            "scores": row.expand(20000, -1).contiguous().cuda(),
            "peaks": torch.ones(20000).cuda(),
            "keys": torch.arange(20000).cuda(),
            "temperatures": torch.ones(20000).cuda(),
            "least": torch.full((20000,), -torch.inf).cuda(),
            "top_p": torch.full((20000,), top_p, dtype=torch.float64).cuda(),
        }
        assert set(draw(**given).tolist()) == kept


@pytest.mark.gpu
@on_gpu
def test_rows_may_be_picked_and_lie_apart() -> None:
    given = arguments(24, 5000, "cuda")
    given["top_p"] = torch.tensor([0.3, 0.9, math.inf] * 8, dtype=torch.float64, device="cuda")
    everything = draw(**given)
    wide = torch.full((24, 5003), 99.0, device="cuda")
    wide[:, :5000] = given["scores"]
    order = torch.tensor([5, 0, 23, 5, 7], device="cuda")
    picked = {name: tensor[order] for name, tensor in given.items() if name != "scores"}
    assert torch.equal(draw(wide[:, :5000], **picked, rows=order), everything[order])


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
    assert draw(**given).tolist() == [70, 3999, 3999]


@pytest.mark.gpu
@on_gpu
@pytest.mark.parametrize(
    ("field", "wrong"),
    [
        ("peaks", lambda: torch.zeros(3, device="cuda")),
        ("keys", lambda: torch.zeros(4, dtype=torch.int32, device="cuda")),
        ("temperatures", lambda: torch.ones(4, dtype=torch.float64, device="cuda")),
        ("least", lambda: torch.zeros(8, device="cuda")[::2]),
        ("top_p", lambda: torch.ones(4, device="cuda")),
        ("keys", lambda: torch.zeros(4, dtype=torch.int64)),
    ],
)
def test_wrong_arguments_are_refused_by_name(field: str, wrong: Callable[[], torch.Tensor]) -> None:
    with pytest.raises(KernelError) as caught:
        draw(**arguments(4, 10, "cuda") | {field: wrong()})
    assert (caught.value.code, caught.value.field) == (INVALID_ARGUMENT, field)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_scores_elsewhere_are_refused(dtype: torch.dtype) -> None:
    given = arguments(4, 10, "cpu")
    with pytest.raises(KernelError, match="on CUDA") as caught:
        draw(**given | {"scores": given["scores"].to(dtype)})
    assert caught.value.code == INVALID_ARGUMENT
