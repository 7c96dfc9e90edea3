"""What can be copied as one piece, and how. Knows page numbers, addresses and bytes; moves nothing.

    device pages  3 4 5 9      in the order of host addresses
    host pages    0 1 2 3
                  └─┬─┘ │      behind each other on both sides: one extent, if there is one layer; with several, every
                  └──┬──┘      page in every layer is one. Behind each other on the host: one extent of the host

    direct   the copy engine moves the extents of both sides                             512 KiB and more, in the mean
    staged   a kernel gathers into a buffer, the copy engine moves the host's extents    256 KiB and more, likewise
    kernel   a kernel reads and writes pinned host memory                                the rest

Where the host's extents are no larger than those of both sides, a buffer gains nothing: from 256 KiB on that is direct.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

DIRECT_BYTES = 512 << 10
STAGED_BYTES = 256 << 10


class Method(StrEnum):
    DIRECT = "direct"
    STAGED = "staged"
    KERNEL = "kernel"


def stretches(
    addresses: Sequence[int], page_bytes: int, devices: Sequence[int] | None = None
) -> list[tuple[int, int]]:
    """(first index, count) of maximal stretches of host pages that lie behind each other in memory.

    Args:
        devices: device pages that must go up by one, too.
    """
    found: list[tuple[int, int]] = []
    first = 0
    for index in range(1, len(addresses) + 1):
        count = index - first
        if (
            index == len(addresses)
            or addresses[index] != addresses[first] + count * page_bytes
            or (devices is not None and devices[index] != devices[first] + count)
        ):
            found.append((first, count))
            first = index
    return found


def choose(devices: Sequence[int], addresses: Sequence[int], num_layers: int, layer_bytes: int) -> Method:
    """The method for these pages, by the mean size of an extent. `layer_bytes` is what a page has in one layer."""
    page_bytes = num_layers * layer_bytes
    total = len(addresses) * page_bytes
    host = len(stretches(addresses, page_bytes))
    both = len(stretches(addresses, page_bytes, devices)) if num_layers == 1 else len(addresses) * num_layers
    if total >= DIRECT_BYTES * both or (both == host and total >= STAGED_BYTES * both):
        return Method.DIRECT
    return Method.STAGED if total >= STAGED_BYTES * host else Method.KERNEL
