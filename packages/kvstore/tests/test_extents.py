from __future__ import annotations

import random

import pytest

np = pytest.importorskip("numpy")

from dagengine_kvstore.extents import (  # noqa: E402
    DIRECT_BYTES,
    FIRST_PART_BYTES,
    LEAST_DIRECT_BYTES,
    MOST_PART_BYTES,
    STAGED_BYTES,
    Method,
    choose,
    parts,
    stretches,
)


@pytest.mark.parametrize("seed", range(20))
def test_stretches_are_maximal_and_cover_every_page_once(seed: int) -> None:
    rng = random.Random(seed)
    hosts = sorted(rng.sample(range(30), 12))
    devices = [page + rng.choice((0, 0, 0, 5)) for page in hosts]
    for given in (None, devices):
        firsts, counts = stretches(100 + 8 * np.array(hosts), 8, None if given is None else np.array(given))
        found = [*zip(firsts.tolist(), counts.tolist(), strict=True)]
        assert [index for first, count in found for index in range(first, first + count)] == list(range(12))
        for index in range(1, 12):
            follows = hosts[index] == hosts[index - 1] + 1
            if given is not None:
                follows = follows and devices[index] == devices[index - 1] + 1
            assert (index in firsts) == (not follows)
    assert [len(array) for array in stretches(np.array([], np.int64), 8)] == [0, 0]


def method(devices: list[int], hosts: list[int], num_layers: int, layer_bytes: int) -> Method:
    addresses = np.array(hosts) * num_layers * layer_bytes
    return choose(np.array(devices), addresses, num_layers, layer_bytes)


def test_the_mean_extent_decides_how_pages_are_copied() -> None:
    scattered = [0, 2, 4, 6]
    together = [0, 1, 2, 3]
    # One layer: pages that follow each other on both sides are one extent.
    size = DIRECT_BYTES // 4
    assert method(together, together, 1, size) is Method.DIRECT
    size = STAGED_BYTES // 4
    assert method(scattered, together, 1, size) is Method.STAGED
    assert method(scattered, scattered, 1, LEAST_DIRECT_BYTES) is Method.DIRECT
    assert method(scattered, scattered, 1, LEAST_DIRECT_BYTES - 1) is Method.KERNEL
    assert method(scattered, together, 1, DIRECT_BYTES) is Method.DIRECT
    # Several layers: a device extent is one page in one layer, a host extent all its layers.
    assert method(together, scattered, 8, DIRECT_BYTES) is Method.DIRECT
    small = STAGED_BYTES // 8
    assert method(scattered, scattered, 8, small) is Method.STAGED
    assert method(scattered, scattered, 8, small - 1) is Method.KERNEL
    assert method([], [], 8, small) is Method.DIRECT, "nothing to copy"


@pytest.mark.parametrize("seed", range(5))
def test_parts_grow_and_cover_every_extent_once_in_order(seed: int) -> None:
    rng = random.Random(seed)
    sizes = np.array([rng.choice((1, 64 << 10, 5 << 20, 50 << 20)) for _ in range(rng.randint(1, 400))])
    found = [*parts(sizes)]
    assert [index for part in found for index in range(part.start, part.stop)] == list(range(len(sizes)))
    most = FIRST_PART_BYTES
    for part, following in zip(found, [*found[1:], None], strict=True):
        size = int(sizes[part].sum())
        assert size <= most or part.stop - part.start == 1
        assert following is None or size + int(sizes[following.start]) > most
        most = min(2 * most, MOST_PART_BYTES)
    assert [*parts(np.array([], np.int64))] == []
