"""What can be copied as one piece, and how. Knows page numbers, addresses and bytes; moves nothing.

    device pages  3 4 5 9      in the order of host addresses
    host pages    0 1 2 3
                  └─┬─┘ │      behind each other on both sides: one extent, if there is one layer; with several, every
                  └──┬──┘      page in every layer is one. Behind each other on the host: one extent of the host

    direct   the copy engine moves the extents of both sides                             128 KiB and more, in the mean
    staged   a kernel gathers into a buffer, the copy engine moves the host's extents    256 KiB and more, likewise
    direct   as above                                                                    64 KiB and more
    kernel   a kernel reads and writes pinned host memory                                the rest

Direct copies take the least of a running step's bandwidth, a kernel that writes host memory by far the most; but below
128 KiB queueing extents one by one takes the host twice as long as staging them. Arrays are int64.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.int64]

DIRECT_BYTES = 128 << 10
STAGED_BYTES = 256 << 10
LEAST_DIRECT_BYTES = 64 << 10
FIRST_PART_BYTES = 4 << 20
MOST_PART_BYTES = 32 << 20


class Method(StrEnum):
    DIRECT = "direct"
    STAGED = "staged"
    KERNEL = "kernel"


def stretches(addresses: Numbers, page_bytes: int, devices: Numbers | None = None) -> tuple[Numbers, Numbers]:
    """First index and count of each maximal stretch of host pages that lie behind each other in memory.

    Args:
        addresses: [num_pages], of host pages, ascending.
        devices: [num_pages], device pages that must go up by one, too.
    """
    begins = np.empty(len(addresses), np.bool_)
    begins[:1] = True
    np.not_equal(addresses[1:] - addresses[:-1], page_bytes, out=begins[1:])
    if devices is not None:
        begins[1:] |= devices[1:] - devices[:-1] != 1
    firsts = begins.nonzero()[0]
    counts = np.empty_like(firsts)
    np.subtract(firsts[1:], firsts[:-1], out=counts[:-1])
    counts[-1:] = len(addresses) - firsts[-1:]
    return firsts, counts


def choose(devices: Numbers, addresses: Numbers, num_layers: int, layer_bytes: int) -> Method:
    """The method for these pages, by the mean size of an extent. `layer_bytes` is what a page has in one layer."""
    if layer_bytes >= DIRECT_BYTES:
        return Method.DIRECT
    page_bytes = num_layers * layer_bytes
    total = len(addresses) * page_bytes
    host_ends = addresses[1:] - addresses[:-1] != page_bytes
    host = min(1, total) + int(np.count_nonzero(host_ends))
    if total < LEAST_DIRECT_BYTES * host:
        return Method.KERNEL  # an extent of both sides has no more than one of the host
    if num_layers > 1:
        both = len(addresses) * num_layers
    else:
        both = min(1, total) + int(np.count_nonzero(host_ends | (devices[1:] - devices[:-1] != 1)))
    if total >= DIRECT_BYTES * both:
        return Method.DIRECT
    if total >= STAGED_BYTES * host:
        return Method.STAGED
    return Method.DIRECT if total >= LEAST_DIRECT_BYTES * both else Method.KERNEL


def parts(sizes: Numbers) -> Iterator[slice]:
    """Stretches of extents to be queued one after the other, so that the device begins while the host goes on.

    The first has 4 MiB, the following twice as much each up to 32 MiB, or one extent if that is more.
    """
    ends = sizes.cumsum()
    begin, done, most = 0, 0, FIRST_PART_BYTES
    while begin < len(sizes):
        end = max(begin + 1, int(ends.searchsorted(done + most, side="right")))
        yield slice(begin, end)
        begin, done, most = end, int(ends[end - 1]), min(2 * most, MOST_PART_BYTES)
