"""Random numbers that are a function of (seed, step, token id) and of nothing else.

SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014; the output function is
Stafford's "Mix13") can be read anywhere: its output n from a state s is `mix64(s + (n + 1) * GAMMA)`. Three of them
stand on each other, so that no two of seed, step and token id can trade places:

    base = output 0 of seed        key = output `step` of base        bits = output `token id` of key

Integer arithmetic is modulo 2^64; tensors hold the same bits as int64, on which torch multiplies and adds with
wrap-around.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
"""The step of SplitMix64: 2^64 over the golden ratio, rounded to odd."""

_FIRST, _SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_MASK = 2**64 - 1
_SIGN = 2**63
_LARGEST_BELOW_1 = 1 - 2**-24


def stream_keys(seeds: Sequence[int], steps: Sequence[int]) -> NDArray[np.int64]:
    """What decides all random numbers of a step of a sequence: the bits of `key` above, for each seed and step.

    Args:
        seeds: any integers, taken modulo 2^64.
        steps: 0 or more, as many.
    """
    base = _output(np.array([seed & _MASK for seed in seeds], np.uint64), np.uint64(0))
    return _output(base, np.array(steps, np.uint64)).view(np.int64)


def _output(state: NDArray[np.uint64], index: NDArray[np.uint64] | np.uint64) -> NDArray[np.uint64]:
    z = state + (index + np.uint64(1)) * np.uint64(GAMMA)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(_FIRST)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(_SECOND)
    return z ^ (z >> np.uint64(31))


def weyl(ids: Tensor) -> Tensor:
    """What `bits` adds to a key for these token ids (int64, any shape): (id + 1) * GAMMA."""
    return (ids + 1) * _signed(GAMMA)


def bits(keys: Tensor, offsets: Tensor) -> Tensor:
    """Output `id` of SplitMix64 from each key.

    Args:
        keys: int64 [n], `stream_keys`.
        offsets: int64 [V] or [n, V], `weyl` of the ids.
    Returns: int64 [n, V].
    """
    z = keys[:, None] + offsets
    z ^= (z >> 30) & (2**34 - 1)  # of int64 the shift is arithmetic, the mask makes it logical
    z *= _signed(_FIRST)
    z ^= (z >> 27) & (2**37 - 1)
    z *= _signed(_SECOND)
    z ^= (z >> 31) & (2**33 - 1)
    return z


def gumbel(keys: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise [n, V]: the argmax of log-weights plus this noise draws from the weights (Gumbel, 1954).

    The noise is -log(E), E = -log(1 - u) exponential, with u from the lower 63 bits of `bits`. Ids with small weights
    win by small E, so u is fine near 0: 2^-64 at least, which is noise of at most 44.4. At the other end u stops at
    1 - 2^-24. Both ends are reached by fewer than one draw in 2^23, and the noise is always finite.

    Args:
        keys, offsets: as for `bits`.
        dtype: of the result, float32 or float64.
    """
    u = (bits(keys, offsets) & (_SIGN - 1)).to(dtype)
    u.mul_(2.0**-63).clamp_(2.0**-64, _LARGEST_BELOW_1)
    return u.neg_().log1p_().neg_().log_().neg_()


def _signed(value: int) -> int:
    return value - 2**64 if value >= _SIGN else value
