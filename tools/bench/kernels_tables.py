"""Adversarial batches for kernels: what page size, head dimension, group and dtype are is chosen by who asks.

Knows tables and options of layers; no backends. All positions are below MAX; rotary tables cover twice that.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from bench.kernels_cases import Arena, Node
from dagengine_kernels import SegmentTable, SequenceSegments

MAX = 4096


@dataclass(frozen=True)
class Batch:
    """A table with the layer's options. rotary: plain, none, interleaved, partial or scaled."""

    table: SegmentTable
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    rotary: str = "plain"


def ragged(size: int) -> Batch:
    """Decode and prefill rows, deltas of both signs, slices that begin and end inside pages."""
    a = Arena(size)
    sequences = [
        SequenceSegments(40, 1, [*a.node(17, 90, 2).seen_at(0), *a.node(24, 5).seen_at(17)], 7),
        SequenceSegments(
            9,
            6,
            [*a.node(4).seen_at(0), *a.node(5, 200).seen_at(4), *a.node(6, 9).seen_at(9)],
            3,
        ),
        SequenceSegments(0, 1, a.node(1).seen_at(0), 11),
        SequenceSegments(0, 5, a.node(5).seen_at(0), 12),
        SequenceSegments(30, 0, a.node(3).seen_at(0), 13),
        SequenceSegments(300, 70, [*a.node(300, 1000, 5).seen_at(0), *a.node(70, 300).seen_at(300)], 14),
    ]
    return Batch(a.table(sequences))


def empty(size: int) -> Batch:
    """Sequences without extents beside one that has some."""
    a = Arena(size)
    listed = [
        SequenceSegments(5, 1, [], 1),
        SequenceSegments(0, 3, [], 2),
        SequenceSegments(3, 1, a.node(3).seen_at(0), 3),
    ]
    return Batch(a.table(listed))


def one_token_ranges(size: int) -> Batch:
    """Thirty ranges of one token, each in its own page, read by a prefill and a decode row."""
    a = Arena(size)
    nodes = [a.node(1, 7 * i, i % size) for i in range(30)]
    ranges = [e for i, node in enumerate(nodes) for e in node.seen_at(i)]
    listed = [
        SequenceSegments(30, 4, [*ranges, *a.node(4, 30).seen_at(30)], 1),
        SequenceSegments(29, 1, ranges, 2),
    ]
    return Batch(a.table(listed))


def sees_nothing(size: int) -> Batch:
    """Rows before everything that their sequence lists; some rows of a prefill, and whole sequences."""
    a = Arena(size)
    listed = [
        SequenceSegments(4, 1, a.node(6).seen_at(5), 1),
        SequenceSegments(4, 6, a.node(20).seen_at(7), 2),
        SequenceSegments(0, 3, [*a.node(2, 9).seen_at(50), *a.node(1, 2).seen_at(2)], 3),
    ]
    return Batch(a.table(listed))


def far(size: int) -> Batch:
    """Stored at the last position and seen at 0, stored at 0 and seen last, by a query at the last position."""
    a, last = Arena(size), MAX - 1
    listed = [
        SequenceSegments(last, 1, [*a.node(1, last).seen_at(0), *a.node(1).seen_at(last)], 1),
        SequenceSegments(last - 1, 2, [*a.node(1, last).seen_at(0), *a.node(1).seen_at(last - 1)], 2),
        SequenceSegments(last, 1, [*a.node(200, last - 199).seen_at(0), *a.node(1).seen_at(last)], 3),
    ]
    return Batch(a.table(listed))


def overlapping_views(size: int) -> Batch:
    """Two ranges at the same views; both count."""
    a = Arena(size)
    first, second, third = a.node(12), a.node(12, 3), a.node(3, 8)
    listed = [
        SequenceSegments(20, 1, [*first.seen_at(0), *second.seen_at(5), *third.seen_at(8)], 1),
        SequenceSegments(20, 3, [*first.seen_at(4), *second.seen_at(5), *a.node(3, 20).seen_at(20)], 2),
    ]
    return Batch(a.table(listed))


def slices_of_a_page(size: int) -> Batch:
    """Several slices of one page in one sequence, also the same tokens twice at two deltas."""
    a = Arena(size)
    page = a.node(16)
    twice = [*page.seen_at(2, 2, 7), *page.seen_at(7, 9, 14), *page.seen_at(12, 2, 5)]
    listed = [
        SequenceSegments(15, 1, twice, 1),
        SequenceSegments(15, 2, [*twice, *a.node(2, 15).seen_at(15)], 2),
        SequenceSegments(40, 1, [*page.seen_at(20), *page.seen_at(0)], 3),
    ]
    return Batch(a.table(listed))


def own_order(size: int, readers: int = 10, **options: object) -> Batch:
    """Readers of the same documents, or slices of them, each in its own order, at its own deltas."""
    a, r = Arena(size), random.Random(readers)
    documents = [(a.node(n, 100 * i, i % 3), n) for i, n in enumerate((150, 64, 211, 33, 300, 97))]
    listed = []
    for b in range(readers):
        extents, view = [], b % 4
        for node, n in r.sample(documents, r.randint(4, 6)):
            first = r.choice((0, 0, n // 3))
            extents += node.seen_at(view, first, n)
            view += n - first
        own = r.randint(1, 70)
        extents += a.node(own, view).seen_at(view)
        listed.append(SequenceSegments(view + own - 1, 1, extents, b))
    return Batch(a.table(listed), **options)  # type: ignore[arg-type]


def many_readers(size: int) -> Batch:
    """More rows of one document than any tile holds."""
    return own_order(size, readers=45)


def document_twice(size: int) -> Batch:
    """A document that one sequence sees at two places and another at one."""
    a = Arena(size)
    node: Node = a.node(130)
    listed = [
        SequenceSegments(260, 1, [*node.seen_at(0), *node.seen_at(130), *a.node(1, 260).seen_at(260)], 1),
        SequenceSegments(135, 1, [*node.seen_at(5), *a.node(1, 135).seen_at(135)], 2),
    ]
    return Batch(a.table(listed))


def windowed_out(size: int) -> Batch:
    """A window that hides everything, or all but little."""
    a = Arena(size)
    listed = [
        SequenceSegments(100, 1, a.node(20).seen_at(0), 1),
        SequenceSegments(22, 8, a.node(20).seen_at(0), 2),
        SequenceSegments(6, 2, [*a.node(5, 50).seen_at(0), *a.node(2, 6).seen_at(6)], 3),
    ]
    return Batch(a.table(listed), window=4)


def long_decode(size: int) -> Batch:
    """Contexts long enough to be cut into many works, one of them of a single slice, beside short ones."""
    a = Arena(size)
    listed = [
        SequenceSegments(3500, 1, [*a.node(2100, 9, 3).seen_at(0), *a.node(1401, 0).seen_at(2100)], 1),
        SequenceSegments(2222, 1, a.node(2223, 500, 1).seen_at(0), 2),
        SequenceSegments(10, 1, a.node(11).seen_at(0), 3),
    ]
    return Batch(a.table(listed))


def prefills(size: int) -> Batch:
    """Ragged prefills over segments beside decode rows, one of them with tokens that come after its chunk."""
    a = Arena(size)
    shared = a.node(330, 77, 1)
    listed = [
        SequenceSegments(
            630, 200, [*shared.seen_at(0), *a.node(300).seen_at(330), *a.node(200).seen_at(630)], 1
        ),
        SequenceSegments(330, 65, [*shared.seen_at(0), *a.node(400, 330).seen_at(330)], 2),
        SequenceSegments(0, 257, a.node(257).seen_at(0), 3),
        SequenceSegments(331, 1, [*shared.seen_at(1), *a.node(1, 331).seen_at(331)], 4),
    ]
    return Batch(a.table(listed))


def with_options(build: Callable[[int], Batch], **options: object) -> Callable[[int], Batch]:
    return lambda size: replace(build(size), **options)  # type: ignore[arg-type]


BATCHES: dict[str, Callable[[int], Batch]] = {
    "ragged": ragged,
    "empty contexts": empty,
    "one-token ranges": one_token_ranges,
    "rows that see nothing": sees_nothing,
    "rows that see a sink only": with_options(sees_nothing, sinks=True),
    "stored last, seen first": far,
    "overlapping views": overlapping_views,
    "slices of a page": slices_of_a_page,
    "own order": own_order,
    "many readers": many_readers,
    "a document twice": document_twice,
    "window": with_options(own_order, window=150),
    "window over a prefill": with_options(prefills, window=90),
    "window hides everything": windowed_out,
    "soft cap": with_options(own_order, softcap=2.0),
    "sinks": with_options(own_order, sinks=True),
    "window, soft cap, sinks": with_options(own_order, window=150, softcap=2.0, sinks=True),
    "long decode": long_decode,
    "prefills": prefills,
    "no positions": with_options(own_order, rotary="none"),
    "interleaved": with_options(own_order, rotary="interleaved"),
    "partial": with_options(own_order, rotary="partial"),
    "scaled": with_options(own_order, rotary="scaled"),
}
