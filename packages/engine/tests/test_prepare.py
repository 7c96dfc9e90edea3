"""Reads as rows of the segment table, and how many pages a layout needs, against their definitions."""

from __future__ import annotations

import random

import numpy as np
import pytest

from dagengine.prepare import _num_pages, context_extents
from dagengine_kvstore import KVStore, NodeRecord, Read
from dagengine_positions import Layout, Segment

SIZE = 16
LENGTHS = (1, 16, 40, 64, 77)


def sealed(store: KVStore, length: int, own_start: int) -> NodeRecord:
    writer = store.begin([], [], own_start, signature={"start": str(own_start)})
    writer.reserve(length)
    writer.append(list(range(length)))
    writer.commit(length)
    return writer.seal({})


@pytest.mark.parametrize("seed", range(20))
def test_rows_are_the_extents_of_the_reads_at_their_views(seed: int) -> None:
    rng = random.Random(seed)
    store = KVStore(64, SIZE)
    nodes = [sealed(store, length, 100 * i) for i, length in enumerate(LENGTHS)]
    reads = []
    for _ in range(rng.randint(0, 6)):
        node = rng.choice(nodes)
        start = rng.randrange(node.length)
        reads.append(Read(node, start, rng.randint(start + 1, node.length), rng.randint(-start, 500)))
    with store.lease(reads) as lease:
        rows = []
        for index, read in enumerate(reads):
            view = read.node.own_start + read.start + read.delta
            for page, lo, hi, stored in lease.extents(index):
                rows.append((page, lo, hi, stored, view - stored))
                view += hi - lo
        found = context_extents(reads, lease)
    assert found.dtype == np.int32 and found.shape == (len(rows), 5)
    assert found.tolist() == [list(row) for row in rows]


@pytest.mark.parametrize("seed", range(20))
def test_pages_of_a_layout_are_counted_once(seed: int) -> None:
    rng = random.Random(seed)
    segments = []
    for _ in range(rng.randint(0, 8)):
        start = rng.randrange(100)
        segments.append(Segment(rng.randrange(3), start, rng.randint(start + 1, 130), 0, 0))
    layout = Layout("any", tuple(segments), 0, 0)
    pages = {
        (segment.node, token // SIZE) for segment in segments for token in range(segment.start, segment.stop)
    }
    assert _num_pages(layout, SIZE) == len(pages)
