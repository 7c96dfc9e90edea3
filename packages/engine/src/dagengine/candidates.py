"""The likeliest tokens of each row in order, and how many of them top-k, min-p and top-p keep.

Order: greatest first, equal ones by id. All three filters keep a beginning of that order. Sums of probabilities are
integers (fixed point), so they do not depend on the order of summation, nor on the batch that decides that order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dagengine_kernels.fused.cuda.greatest import greatest as greatest_on_cuda

MASS_BITS = 42
"""Fractional bits of a mass. A row's sum fits into int64 while its vocabulary is below MAX_VOCAB."""

MAX_VOCAB = 1 << (63 - MASS_BITS)

GROUP = 16
"""Tokens of which a CPU looks at the greatest first."""

_LOW = 2**32 - 1


def mass(shifted: Tensor) -> Tensor:
    """exp of scores that are at most 0, int64 in units of 2^-MASS_BITS (rounded down: at most that much too small)."""
    return shifted.exp().mul_(2.0**MASS_BITS).to(torch.int64)


def argmax(scores: Tensor) -> Tensor:
    """The first of the greatest of each row [n, V], int64 [n]; NaN counts as the greatest."""
    if scores.device.type == "cpu":  # numpy's is many times faster than torch's
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(dim=-1)


def greatest(scores: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The argmax of each row [n, V], int64 [n]; its score, [n, 1]; and whether that is finite, bool [n].

    It is not where the row holds NaN, plus infinity, or minus infinity alone; the argmax is 0 then.
    """
    if scores.device.type == "cuda":
        ids, peaks, finite = greatest_on_cuda(scores)
        return ids, peaks[:, None], finite
    ids = argmax(scores)
    peaks = scores.gather(1, ids[:, None])
    finite = (peaks - peaks == 0)[:, 0]  # fewer operations than isfinite
    return ids * finite, peaks, finite


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` of each row in order.

    Args:
        scores: float32 (on a CPU also float64) [n, V].
        count: from 1 to V.
    Returns: their scores [n, count] and their ids, int64 [n, count].
    """
    if scores.device.type == "cpu" and (count < scores.shape[1] or scores.dtype != torch.float32):
        ids = torch.from_numpy(np.stack([_likeliest_of(row, count) for row in scores.numpy()]))
    elif scores.device.type == "cpu":  # numpy sorts many times faster than torch
        ids = torch.from_numpy(np.sort(_order_keys(scores).numpy(), axis=-1)) & _LOW
    elif count == scores.shape[1]:
        return (scores + 0.0).sort(dim=-1, descending=True, stable=True)  # + 0.0: minus zero equals zero
    else:
        ids = _order_keys(scores).topk(count, dim=-1, largest=False).values & _LOW
    return scores.gather(1, ids), ids


def lengths(
    ordered: Tensor, top_k: Tensor, log_min_p: Tensor, top_p: Tensor, total: Tensor | None = None
) -> Tensor:
    """How many of the likeliest tokens stay, int64 [n], 1 at least.

    Args:
        ordered: scores less the greatest, [n, K], greatest first. Where `total` is given the row may have more.
        top_k: int64 [n], at least 1 and at most V: how many top-k leaves.
        log_min_p: [n, 1], at most 0, of the scores' dtype; a token stays if its score is not below.
        top_p: float64 [n, 1]; a token stays if what comes before it is less than this share of what the others leave.
            Infinity keeps all.
        total: int64 [n], the mass of which top-p takes its share; by default that of what the others leave here.
    """
    size = top_k.minimum((ordered >= log_min_p).sum(dim=-1)).clamp_(min=1)
    sums = mass(ordered).cumsum(dim=-1)
    if total is None:
        total = sums.gather(1, size[:, None] - 1)[:, 0]
    share = (total.to(torch.float64) * top_p[:, 0]).ceil_().clamp_(max=2.0**62).to(torch.int64)
    return size.minimum(torch.searchsorted(sums, share[:, None])[:, 0] + 1)


def _likeliest_of(scores: NDArray[np.floating[Any]], count: int) -> NDArray[np.int64]:
    """`likeliest` of one row on a CPU, where numpy selects many times faster than torch: the ids.

    The greatest of each of many groups of tokens are as many scores, so the `count`-th of them is no more than the
    `count`-th of all: most tokens are below, and only the rest is looked at closely.
    """
    width = len(scores) // GROUP
    if 4 * count <= width:
        tops = scores[: GROUP * width].reshape(GROUP, width).max(axis=0)
        ids = np.flatnonzero(~(scores < np.partition(tops, width - count)[width - count]))
        scores = scores[ids]
    else:
        ids = np.arange(len(scores))
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    rest = np.flatnonzero(~(scores < least))  # all of a row whose NaN took the last places
    return ids[rest[np.argsort(-scores[rest], kind="stable")[:count]]]


def _order_keys(scores: Tensor) -> Tensor:
    """float32 [n, V] to int64, all different, that ascend in the order of tokens.

    bits 63-32   not (the score's bits, the lower 31 flipped if negative), which descends as a signed integer
    bits 31-0    the id
    """
    top = (scores + 0.0).view(torch.int32)  # as above
    top = ((top >> 31) & 0x7FFFFFFF).bitwise_xor_(top).bitwise_not_()
    ids = torch.arange(scores.shape[1], device=scores.device)
    return top.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(ids)
