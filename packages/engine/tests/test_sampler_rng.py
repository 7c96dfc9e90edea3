"""The random numbers: SplitMix64's own, uniform, and unrelated between neighbouring seeds, steps and tokens."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from dagengine.rng import GAMMA, bits, gumbel, stream_keys, weyl

from .sampler_reference import noise, nth, splitmix64

FROM_0 = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC, 0x1B39896A51A8749B]
"""The first outputs from state 0, as java.util.SplittableRandom(0).nextLong() gives them."""

FROM_1234567 = [
    6457827717110365317,
    3203168211198807973,
    9817491932198370423,
    4593380528125082431,
    16408922859458223821,
]
"""From state 1234567 (Rosetta Code, "Pseudo-random numbers/Splitmix64")."""


def signed(value: int) -> int:
    return value - 2**64 if value >= 2**63 else value


def stream_key(seed: int, step: int) -> int:
    return int(stream_keys([seed], [step])[0]) % 2**64


def table(keys: list[int], count: int) -> NDArray[np.uint64]:
    """[keys, count]"""
    found = bits(torch.tensor([signed(key) for key in keys]), weyl(torch.arange(count)))
    return found.numpy().view(np.uint64)


def in_numpy(state: int, count: int) -> NDArray[np.uint64]:
    """SplitMix64 once more, on unsigned integers."""
    with np.errstate(over="ignore"):
        z = np.uint64(state) + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(GAMMA)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return z ^ (z >> np.uint64(31))


def surprise(values: NDArray[np.uint64], cells: int) -> float:
    """Standard deviations by which chi-square of `values` in [0, cells) lies from its mean, were they uniform."""
    counts = np.bincount(values.astype(np.int64), minlength=cells)
    square = ((counts - len(values) / cells) ** 2 / (len(values) / cells)).sum()
    return float((square - (cells - 1)) / math.sqrt(2 * (cells - 1)))


@pytest.mark.parametrize(("state", "known"), [(0, FROM_0), (1234567, FROM_1234567)])
def test_known_answers(state: int, known: list[int]) -> None:
    assert list(itertools.islice(splitmix64(state), 5)) == known
    assert table([state], 5)[0].tolist() == known


def test_tensors_hold_what_numpy_computes_on_unsigned_integers() -> None:
    for state in (0, 1, 2**63 - 1, 2**63, 2**64 - 1, 0xDEADBEEFCAFEF00D):
        assert np.array_equal(table([state], 5000)[0], in_numpy(state, 5000))


def test_a_streams_key_is_two_levels_of_outputs() -> None:
    for seed, step in ((0, 0), (0, 7), (-1, 3), (2**63 - 1, 1), (12345, 99)):
        assert stream_key(seed, step) == nth(nth(seed % 2**64, 0), step)
        assert stream_key(seed, step) == stream_key(seed + 2**64, step)
    several = stream_keys([3, 2**70, -5], [0, 9, 2**31]).tolist()
    assert several == [int(stream_keys([a], [b])[0]) for a, b in ((3, 0), (0, 9), (2**64 - 5, 2**31))]


def test_answers_of_one_request_never_share_a_stream() -> None:
    """Their seeds are GAMMA apart, as are states of SplitMix64; steps must not undo that."""
    keys = {stream_key(99 + answer * GAMMA, step) for answer in range(64) for step in range(256)}
    assert len(keys) == 64 * 256


@pytest.mark.parametrize("shift", [0, 11, 24, 37, 55, 56])
@pytest.mark.parametrize("axis", ["tokens", "steps", "seeds"])
def test_bytes_are_uniform_along_every_axis(axis: str, shift: int) -> None:
    if axis == "tokens":
        numbers = table([stream_key(1, 2)], 200_000)[0]
    elif axis == "steps":
        numbers = table([stream_key(1, step) for step in range(50_000)], 4)[:, 3]
    else:
        numbers = table([stream_key(seed, 2) for seed in range(50_000)], 4)[:, 3]
    assert abs(surprise((numbers >> np.uint64(shift)) & np.uint64(255), 256)) < 5


@pytest.mark.parametrize("axis", ["tokens", "steps", "seeds"])
def test_neighbours_are_independent(axis: str) -> None:
    """Pairs of 4-bit values of neighbours fill all cells alike."""
    if axis == "tokens":
        numbers = table([stream_key(5, 0)], 100_001)[0]
    elif axis == "steps":
        numbers = table([stream_key(5, step) for step in range(50_001)], 1)[:, 0]
    else:
        numbers = table([stream_key(seed, 0) for seed in range(50_001)], 1)[:, 0]
    top = numbers >> np.uint64(59) & np.uint64(15)
    assert abs(surprise(top[:-1] * np.uint64(16) + top[1:], 256)) < 5


def test_the_uniformity_test_notices_a_cell_that_is_too_full() -> None:
    numbers = table([1], 200_000)[0] & np.uint64(255)
    numbers[:400] = 3
    assert surprise(numbers, 256) > 5


def test_noise_is_gumbel_noise() -> None:
    """exp(-exp(-g)) is uniform; and it is that of plain Python. float32 is coarse where noise is low and never wins."""
    keys, offsets = torch.tensor([signed(stream_key(3, 4))]), weyl(torch.arange(100_000))
    exact = gumbel(keys, offsets, torch.float64)[0]
    uniform = torch.exp(-torch.exp(-exact)).numpy()
    assert abs(surprise(np.floor(uniform * 200).astype(np.uint64), 200)) < 5
    error = (gumbel(keys, offsets, torch.float32)[0].double() - exact).abs()
    assert error[exact > -1.5].max() < 3e-6
    assert error.max() < 0.1
    assert torch.allclose(
        exact[:2000], torch.tensor(noise(3, 4, 2000), dtype=torch.float64), rtol=1e-12, atol=1e-12
    )


def test_the_largest_noise_is_not_cut_off() -> None:
    """A token of probability 1e-7 still wins one time in 1e7: the greatest of 2^22 numbers is where it should be."""
    keys = torch.tensor([signed(stream_key(seed, 0)) for seed in range(32)])
    top = gumbel(keys, weyl(torch.arange(2**17)), torch.float32).amax(dim=-1)
    expected = math.log(2**17) + 0.5772
    assert abs(float(top.mean()) - expected) < 5 * math.pi / math.sqrt(6 * 32)
    assert float(top.max()) > math.log(2**17) + 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_noise_is_finite_at_both_ends(dtype: torch.dtype) -> None:
    """Keys whose id 0 has all bits clear, and all set: the inverse of the output function, less GAMMA."""
    for wanted in (0, 2**64 - 1):
        key = (unmix64(wanted) - GAMMA) % 2**64
        assert nth(key, 0) == wanted
        (value,) = gumbel(torch.tensor([signed(key)]), weyl(torch.arange(1)), dtype)[0].tolist()
        assert value == pytest.approx(
            -math.log(-math.log1p(-(1 - 2.0**-24))) if wanted else 64 * math.log(2), rel=1e-5
        )


def unmix64(z: int) -> int:
    z = z ^ (z >> 31) ^ (z >> 62)
    z = z * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    z = z ^ (z >> 27) ^ (z >> 54)
    z = z * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return z ^ (z >> 30) ^ (z >> 60)
