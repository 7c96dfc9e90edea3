"""Adversarial inputs for attention backends, and what they must give: a per-row float64 loop.

The oracle shares no code with any backend: it walks rows, heads and tokens one by one and turns keys and
queries as complex numbers. Everything that no extent lists is NaN in the pages.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dagengine_kernels.backend import AttentionShape
from dagengine_kernels.rotary import RotaryTable, build_table
from dagengine_kernels.segments import SegmentTable, SequenceSegments

Extent = tuple[int, int, int, int, int]

MAX_POSITIONS = 512


@dataclass(frozen=True, eq=False)
class Case:
    """One batch; float32 q [T, Hq, D] and pages [pages, 2, Hkv, page_size, D] whose values bf16 can hold."""

    table: SegmentTable
    shape: AttentionShape
    rotary: RotaryTable | None
    q: Tensor
    kv_layer: Tensor
    sinks: Tensor | None = None


class Pages:
    """Hands out extents of an arena whose every page is given out once, in a shuffled order."""

    def __init__(self, num_pages: int, page_size: int, seed: int) -> None:
        self.num_pages, self.page_size = num_pages, page_size
        self.free = list(range(num_pages))
        self.random = random.Random(seed)
        self.random.shuffle(self.free)

    def place(
        self, count: int, stored: int, view: int, *, offset: int = 0, in_order: bool = False
    ) -> list[Extent]:
        """`count` tokens from row `offset` of fresh pages on, stored at `stored`.., seen at `view`..."""
        placed: list[Extent] = []
        if in_order:
            self.free.sort(reverse=True)
        done = 0
        while done < count:
            lo = offset if not placed else 0
            hi = min(self.page_size, lo + count - done)
            placed.append((self.free.pop(), lo, hi, stored + done, view - stored))
            done += hi - lo
        return placed


def build_case(
    sequences: Sequence[SequenceSegments],
    pages: Pages,
    *,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 24,
    rotary: RotaryTable | str | None = "default",
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    seed: int = 0,
) -> Case:
    """Fill pages with random K and V where the extents point and NaN everywhere else."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).bfloat16().float()

    table = SegmentTable.from_sequences(sequences, page_size=pages.page_size, num_pages=pages.num_pages)
    used = torch.zeros(pages.num_pages, pages.page_size, dtype=torch.bool)
    for page, lo, hi, _, _ in table.extents.tolist():
        used[page, lo:hi] = True
    kv_layer = normal(pages.num_pages, 2, heads[1], pages.page_size, head_dim)
    kv_layer.permute(0, 3, 1, 2, 4)[~used] = math.nan
    if isinstance(rotary, str):
        rotary = build_table(frequencies(head_dim), 1.0, 2 * MAX_POSITIONS)
    return Case(
        table=table,
        shape=AttentionShape(heads[0], heads[1], head_dim, head_dim**-0.5, window, softcap),
        rotary=rotary,
        q=normal(table.num_rows, heads[0], head_dim),
        kv_layer=kv_layer,
        sinks=normal(heads[0]) if sinks else None,
    )


def frequencies(rotary_dim: int, theta: float = 10000.0) -> list[float]:
    """theta^(-2i/rotary_dim), i < rotary_dim/2."""
    return [theta ** (-2 * i / rotary_dim) for i in range(rotary_dim // 2)]


def definition(
    case: Case, q: Tensor | None = None, kv_layer: Tensor | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """out [T, Hq, D] and lse2 [T, Hq] (base 2, with sinks) in float64, one row and one token at a time."""
    table, shape = case.table, case.shape
    queries = (case.q if q is None else q).double().numpy()
    cells = (case.kv_layer if kv_layer is None else kv_layer).double().numpy()
    out = np.zeros(queries.shape)
    lse2 = np.full(queries.shape[:2], -np.inf)
    for b in range(table.num_sequences):
        extents = table.extents[table.extent_indptr[b] : table.extent_indptr[b + 1]].tolist()
        for row in range(table.q_indptr[b], table.q_indptr[b + 1]):
            p = int(table.q_positions[row])
            for head in range(shape.num_heads):
                kv_head = head // shape.group
                query = _turned(queries[row, head], p, case.rotary, scaled=True)
                scores, values = [], []
                for page, lo, hi, stored, delta in extents:
                    for r in range(lo, hi):
                        view = stored + (r - lo) + delta
                        if view > p or (shape.window is not None and view <= p - shape.window):
                            continue
                        key = _turned(cells[page, 0, kv_head, r], delta, case.rotary, scaled=False)
                        score = float(query @ key) * shape.scale
                        if shape.softcap is not None:
                            score = shape.softcap * math.tanh(score / shape.softcap)
                        scores.append(score)
                        values.append(cells[page, 1, kv_head, r])
                if case.sinks is not None:
                    scores.append(float(case.sinks[head]))
                    values.append(np.zeros(shape.head_dim))
                if scores:
                    top = max(scores)
                    weights = np.exp(np.array(scores) - top)
                    out[row, head] = weights @ np.array(values) / weights.sum()
                    lse2[row, head] = (top + math.log(weights.sum())) / math.log(2)
    return out, lse2


def _turned(x: np.ndarray, position: int, rotary: RotaryTable | None, *, scaled: bool) -> np.ndarray:
    if rotary is None or (position == 0 and not scaled):
        return x
    half = rotary.rotary_dim // 2
    first, second = (slice(0, half), slice(half, 2 * half))
    if rotary.pairing == "interleaved":
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    z = (x[first] + 1j * x[second]) * np.exp(1j * position * rotary.inv_freq.numpy())
    z *= rotary.attention_scaling if scaled else 1.0
    turned = x.copy()
    turned[first], turned[second] = z.real, z.imag
    return turned


def _ragged(pages: Pages) -> list[SequenceSegments]:
    """Decode and prefill rows, distinct deltas of both signs, slices that begin and end inside pages."""
    own = pages.place
    return [
        SequenceSegments(40, 1, [*own(17, 90, 0, offset=min(2, pages.page_size - 1)), *own(24, 5, 17)], 7),
        SequenceSegments(9, 6, [*own(4, 0, 0), *own(5, 200, 4), *own(6, 9, 9)], 3),
        SequenceSegments(0, 1, own(1, 0, 0), 11),
        SequenceSegments(0, 5, own(5, 0, 0), 12),
        SequenceSegments(30, 0, own(3, 0, 0), 13),
        SequenceSegments(12, 1, [*own(12, 0, 0), *own(1, 12, 12)], 14),
    ]


def _page_size(size: int) -> Callable[[], Case]:
    def build() -> Case:
        pages = Pages(150, size, seed=size)
        return build_case(_ragged(pages), pages)

    return build


def _head_dim(dim: int) -> Callable[[], Case]:
    def build() -> Case:
        pages = Pages(20, 16, seed=dim)
        return build_case(_ragged(pages)[:2], pages, head_dim=dim)

    return build


def _group(group: int) -> Callable[[], Case]:
    def build() -> Case:
        pages = Pages(20, 16, seed=group)
        return build_case(_ragged(pages)[:2], pages, heads=(2 * group, 2))

    return build


def _variant(**options: object) -> Callable[[], Case]:
    def build() -> Case:
        pages = Pages(20, 16, seed=5)
        return build_case(_ragged(pages), pages, **options)  # type: ignore[arg-type]

    return build


def _rotary(**options: object) -> Callable[[], Case]:
    def build() -> Case:
        pages = Pages(20, 16, seed=6)
        settings: dict[str, object] = {"rotary_dim": 24, "scaling": 1.0, "pairing": "half", **options}
        inv_freq = frequencies(int(str(settings["rotary_dim"])))
        table = build_table(
            inv_freq,
            float(str(settings["scaling"])),
            2 * MAX_POSITIONS,
            pairing=settings["pairing"],  # type: ignore[arg-type]
        )
        return build_case(_ragged(pages), pages, rotary=table)

    return build


def _empty() -> Case:
    pages = Pages(4, 16, seed=1)
    sequences = [
        SequenceSegments(5, 1, [], 1),
        SequenceSegments(0, 3, [], 2),
        SequenceSegments(3, 1, pages.place(3, 0, 0), 3),
    ]
    return build_case(sequences, pages)


def _no_rows() -> Case:
    return build_case([SequenceSegments(0, 0, [], 1)], Pages(2, 16, seed=1))


def _sees_nothing() -> Case:
    pages = Pages(12, 16, seed=2)
    sequences = [
        SequenceSegments(4, 1, pages.place(6, 0, 5), 1),
        SequenceSegments(4, 6, pages.place(20, 0, 7), 2),
        SequenceSegments(0, 3, [*pages.place(2, 9, 50), *pages.place(1, 2, 2)], 3),
    ]
    return build_case(sequences, pages)


def _sees_nothing_sinks() -> Case:
    case = _sees_nothing()
    return replace(case, sinks=torch.linspace(-1, 1, 4))


def _windowed_out() -> Case:
    pages = Pages(12, 16, seed=3)
    sequences = [
        SequenceSegments(100, 1, pages.place(20, 0, 0), 1),
        SequenceSegments(22, 8, pages.place(20, 0, 0), 2),
        SequenceSegments(6, 2, [*pages.place(5, 50, 0), *pages.place(2, 6, 6)], 3),
    ]
    return build_case(sequences, pages, window=4)


def _one_token_ranges() -> Case:
    pages = Pages(40, 16, seed=4)
    ranges = [e for i in range(30) for e in pages.place(1, 7 * i, i, offset=i % 16)]
    sequences = [
        SequenceSegments(30, 4, [*ranges, *pages.place(4, 30, 30)], 1),
        SequenceSegments(29, 1, ranges, 2),
    ]
    return build_case(sequences, pages)


def _far() -> Case:
    last = MAX_POSITIONS - 1
    pages = Pages(8, 16, seed=5)
    sequences = [
        SequenceSegments(last, 1, [*pages.place(1, last, 0), *pages.place(1, 0, last)], 1),
        SequenceSegments(last - 1, 2, [*pages.place(1, last, 0), *pages.place(1, 0, last - 1)], 2),
    ]
    return build_case(sequences, pages)


def _overlaps() -> Case:
    pages = Pages(12, 16, seed=6)
    sequences = [
        SequenceSegments(20, 1, [*pages.place(12, 0, 0), *pages.place(12, 3, 5), *pages.place(3, 8, 8)], 1),
        SequenceSegments(20, 3, [*pages.place(12, 0, 4), *pages.place(12, 3, 5), *pages.place(3, 20, 20)], 2),
    ]
    return build_case(sequences, pages)


def _same_page_twice() -> Case:
    pages = Pages(6, 16, seed=7)
    ((page, *_),) = pages.place(16, 0, 0)
    twice = [(page, 2, 7, 2, 0), (page, 9, 14, 9, -2), (page, 2, 5, 2, 10)]
    sequences = [
        SequenceSegments(15, 1, twice, 1),
        SequenceSegments(15, 2, [*twice, *pages.place(2, 15, 15)], 2),
        SequenceSegments(40, 1, [(page, 0, 16, 0, 20), (page, 0, 16, 0, 0)], 3),
    ]
    return build_case(sequences, pages)


def _shared_pages() -> Case:
    """Readers of one document of many whole pages, each at its own delta, and one that reads parts of it."""
    pages = Pages(24, 32, seed=8)
    document = pages.place(310, 0, 0, in_order=True)
    sequences = []
    for i in range(3):
        moved = [(page, lo, hi, stored, 3 * i) for page, lo, hi, stored, _ in document]
        sequences.append(SequenceSegments(330 + i, 1, [*moved, *pages.place(1, 330 + i, 330 + i)], i))
    sequences.append(SequenceSegments(330, 1, document[::2], 7))
    sequences.append(SequenceSegments(330, 2, [*document, *pages.place(2, 330, 330)], 8))
    return build_case(sequences, pages, heads=(3, 1), head_dim=16)


def _own_reused() -> Case:
    pages = Pages(12, 16, seed=9)
    own = [*pages.place(20, 60, 10), *pages.place(6, 30, 30)]
    sequences = [SequenceSegments(28, 8, [*pages.place(10, 0, 0), *own], 1)]
    return build_case(sequences, pages)


def _long_prefill(window: int | None = None) -> Callable[[], Case]:
    def build() -> Case:
        pages = Pages(60, 16, seed=10)
        sequences = [
            SequenceSegments(
                50, 80, [*pages.place(30, 100, 0), *pages.place(20, 7, 30), *pages.place(80, 50, 50)], 1
            ),
            SequenceSegments(20, 1, pages.place(21, 0, 0), 2),
            SequenceSegments(0, 70, pages.place(70, 0, 0, in_order=True), 3),
            SequenceSegments(3, 66, [*pages.place(40, 90, 20), *pages.place(66, 3, 3)], 4),
        ]
        return build_case(sequences, pages, heads=(2, 1), head_dim=16, window=window)

    return build


def _long_decode(page_size: int, **options: object) -> Callable[[], Case]:
    """Long contexts in runs of neighbouring pages, with used, unused and partly used pages between them."""

    def build() -> Case:
        pages = Pages(60, page_size, seed=11)
        first = pages.place(10 * page_size, 0, 0, in_order=True)
        gap = pages.place(3, 0, 340, offset=1, in_order=True)
        pages.place(1, 0, 0, in_order=True)
        second = pages.place(8 * page_size + 5, 100, 3, in_order=True)
        sequences = [
            SequenceSegments(345, 1, [*first[:7], *first[8:], *gap, *pages.place(1, 345, 345)], 1),
            SequenceSegments(300, 1, [*second, *first[3:6], *pages.place(1, 300, 300)], 2),
            SequenceSegments(10, 1, pages.place(11, 0, 0), 3),
            SequenceSegments(40, 1, [], 4),
        ]
        return build_case(sequences, pages, heads=(2, 1), head_dim=16, **options)  # type: ignore[arg-type]

    return build


_BUILDERS: dict[str, Callable[[], Case]] = {
    **{f"page-size-{size}": _page_size(size) for size in (1, 3, 16, 64)},
    **{f"head-dim-{dim}": _head_dim(dim) for dim in (24, 64, 80, 96, 128, 256)},
    **{f"group-{group}": _group(group) for group in (1, 4, 8)},
    "window-1": _variant(window=1),
    "window-7": _variant(window=7),
    "softcap": _variant(softcap=2.0),
    "sinks": _variant(sinks=True),
    "window-softcap-sinks": _variant(window=7, softcap=2.0, sinks=True),
    "no-positions": _variant(rotary=None),
    "partial-rotary": _rotary(rotary_dim=12),
    "interleaved": _rotary(pairing="interleaved"),
    "interleaved-partial": _rotary(pairing="interleaved", rotary_dim=8),
    "attention-scaling": _rotary(scaling=1.139),
    "empty-contexts": _empty,
    "no-rows-at-all": _no_rows,
    "rows-that-see-nothing": _sees_nothing,
    "rows-that-see-nothing-but-a-sink": _sees_nothing_sinks,
    "window-hides-everything": _windowed_out,
    "one-token-ranges": _one_token_ranges,
    "stored-last-view-0-query-last": _far,
    "overlapping-views": _overlaps,
    "same-page-by-several-slices": _same_page_twice,
    "one-document-many-readers": _shared_pages,
    "own-tokens-stored-elsewhere": _own_reused,
    "long-prefill": _long_prefill(),
    "long-prefill-window": _long_prefill(window=9),
    "long-decode-in-page-runs": _long_decode(32),
    "long-decode-in-small-pages": _long_decode(16),
    "long-decode-window": _long_decode(32, window=150),
    "long-decode-softcap-sinks": _long_decode(32, softcap=2.0, sinks=True),
}

CASES: tuple[str, ...] = tuple(_BUILDERS)
"""Names that `named_case` takes."""


def named_case(name: str) -> Case:
    """One of `CASES`."""
    return _BUILDERS[name]()


def random_case(seed: int) -> Case:
    """A case drawn from everything that the named ones cover."""
    r = random.Random(seed)
    pages = Pages(120, r.choice((1, 3, 16, 64)), seed)
    if pages.page_size < 16:
        pages = Pages(600, pages.page_size, seed)
    sequences = []
    for i in range(r.randint(1, 5)):
        n, own = r.choice((0, 1, 1, 1, 2, 7, 70)), r.randint(0, 60)
        extents: list[Extent] = []
        for _ in range(r.choice((0, 1, 3, 5))):
            offset = r.randrange(pages.page_size)
            stored, view = r.randrange(MAX_POSITIONS - 30), r.randint(0, own + n)
            extents += pages.place(r.randint(1, 25), stored, view, offset=offset, in_order=r.random() < 0.5)
        if n and r.random() < 0.7:
            extents += pages.place(n, own + r.choice((0, 0, 5)), own)
        if r.random() < 0.2:
            r.shuffle(extents)
        sequences.append(SequenceSegments(own, n, extents, i))
    kv_heads, head_dim = r.choice((1, 2)), r.choice((8, 16))
    rotary_dim = r.choice((head_dim, head_dim // 2))
    table = build_table(
        frequencies(rotary_dim),
        r.choice((1.0, 1.139)),
        2 * MAX_POSITIONS,
        pairing=r.choice(("half", "interleaved")),
    )
    return build_case(
        sequences,
        pages,
        heads=(kv_heads * r.choice((1, 3)), kv_heads),
        head_dim=head_dim,
        rotary=r.choice((None, table, table, table)),
        window=r.choice((None, None, 1, 20)),
        softcap=r.choice((None, None, 2.0)),
        sinks=r.random() < 0.3,
        seed=seed,
    )
