from __future__ import annotations

import random

import pytest

from dagengine_kvstore.extents import DIRECT_BYTES, STAGED_BYTES, Method, choose, stretches


@pytest.mark.parametrize("seed", range(20))
def test_stretches_are_maximal_and_cover_every_page_once(seed: int) -> None:
    rng = random.Random(seed)
    hosts = sorted(rng.sample(range(30), 12))
    devices = [page + rng.choice((0, 0, 0, 5)) for page in hosts]
    for given in (None, devices):
        found = stretches([100 + 8 * page for page in hosts], 8, given)
        assert [index for first, count in found for index in range(first, first + count)] == list(range(12))
        breaks = {first for first, _ in found}
        for index in range(1, 12):
            follows = hosts[index] == hosts[index - 1] + 1
            if given is not None:
                follows = follows and devices[index] == devices[index - 1] + 1
            assert (index in breaks) == (not follows)
    assert stretches([], 8) == []


def addresses(pages: list[int], page_bytes: int) -> list[int]:
    return [page_bytes * page for page in pages]


def test_the_mean_extent_decides_how_pages_are_copied() -> None:
    scattered = [0, 2, 4, 6]
    together = [0, 1, 2, 3]
    # One layer: pages that follow each other on both sides are one extent.
    size = DIRECT_BYTES // 4
    assert choose(together, addresses(together, size), 1, size) is Method.DIRECT
    assert choose(scattered, addresses(together, size), 1, size) is Method.STAGED
    assert choose(together, addresses(scattered, size), 1, size) is Method.KERNEL
    size = STAGED_BYTES  # a buffer would not make the host's extents larger
    assert choose(scattered, addresses(scattered, size), 1, size) is Method.DIRECT
    assert choose(scattered, addresses(scattered, size), 1, size - 1) is Method.KERNEL
    assert choose(scattered, addresses(together, size), 1, size) is Method.STAGED
    # Several layers: a device extent is one page in one layer, a host extent all its layers.
    assert choose(together, addresses(scattered, 8 * DIRECT_BYTES), 8, DIRECT_BYTES) is Method.DIRECT
    small = STAGED_BYTES // 8
    assert choose(scattered, addresses(scattered, 8 * small), 8, small) is Method.STAGED
    assert choose(scattered, addresses(scattered, 8 * small - 8), 8, small - 1) is Method.KERNEL
