"""The likeliest tokens of each row in order, and how many of them top-k, min-p and top-p keep.

Order: greatest first, equal ones by id. All three filters keep a beginning of that order. Sums of probabilities are
integers (fixed point), so they do not depend on the order of summation, and with it on the device or the batch.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

MASS_BITS = 42
"""Fractional bits of a mass. A row's sum fits into int64 while its vocabulary is below MAX_VOCAB."""

MAX_VOCAB = 1 << (63 - MASS_BITS)

_LOW = 2**32 - 1


def mass(shifted: Tensor) -> Tensor:
    """exp of scores that are at most 0, int64 in units of 2^-MASS_BITS (rounded down: at most that much too small)."""
    return shifted.exp().mul_(2.0**MASS_BITS).to(torch.int64)


def argmax(scores: Tensor) -> Tensor:
    """The first of the greatest of each row [n, V], int64 [n]; NaN counts as the greatest."""
    if scores.device.type == "cpu":  # numpy's is many times faster than torch's
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(dim=-1)


def likeliest(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The first `count` of each row in order.

    Args:
        scores: float32 (on a CPU also float64) [n, V].
        count: from 1 to V.
    Returns: their scores [n, count] and their ids, int64 [n, count].
    """
    if scores.dtype != torch.float32 or (count == scores.shape[1] and scores.device.type != "cpu"):
        values, ids = scores.sort(dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    ids = _LOW - (_greatest(_order_keys(scores), count) & _LOW)
    return scores.gather(1, ids), ids


def kept(ordered: Tensor, whole: Tensor, log_min_p: Tensor, top_p: Tensor) -> Tensor:
    """Which of the likeliest stay, bool [n, K]; those that stay come first, and the first always does.

    Args:
        ordered: scores less the greatest, [n, K], greatest first.
        whole: int64 [n]: how many of the K top-k leaves, which are those of which top-p takes its share.
        log_min_p: [n], at most 0, of the scores' dtype; a token stays if its score is not below.
        top_p: float64 [n]; a token stays if what comes before it is less than this share. Infinity keeps all.
    """
    place = torch.arange(ordered.shape[1], device=ordered.device)
    stay = (place < whole[:, None]) & (ordered >= log_min_p[:, None])
    masses = mass(ordered) * stay
    sums = masses.cumsum(dim=-1)
    share = top_p[:, None] * sums[:, -1:].to(torch.float64)
    stay &= (sums - masses).to(torch.float64) < share
    stay[:, 0] = True
    return stay


def _order_keys(scores: Tensor) -> Tensor:
    """float32 [n, V] to int64: greater for greater scores, and among equal ones for lower ids; all differ.

        bits 63-32   the score's bits, the lower 31 flipped if negative: ordered as signed integers
        bits 31-0    2^32 - 1 - id
    """
    top = (scores + 0.0).view(torch.int32)  # + 0.0: minus zero equals zero
    top = top ^ ((top >> 31) & 0x7FFFFFFF)
    below = torch.arange(_LOW, _LOW - scores.shape[1], -1, device=scores.device)
    return top.to(torch.int64).bitwise_left_shift_(32).bitwise_or_(below)


def _greatest(keys: Tensor, count: int) -> Tensor:
    """The greatest `count` of each row of `keys`, greatest first."""
    if keys.device.type != "cpu":
        return keys.topk(count, dim=-1).values
    array = keys.numpy()  # numpy's sort is many times faster than torch's
    if count < keys.shape[1]:
        array = np.partition(array, keys.shape[1] - count, axis=-1)[:, keys.shape[1] - count :]
    return torch.from_numpy(np.ascontiguousarray(np.sort(array, axis=-1)[:, ::-1]))
