"""What the work of a batch sees, as a segment table, built from what was known at the step before.

Knows pages and positions; not tensors. Of a chain of own tokens only the pages that are new since the last time are
asked for.

    own page i of a chain   | 0 ············ page_size |    view positions own_start + i * page_size ..
                            seen up to the end of the chunk: only the last page is cut
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from dagengine_kernels import HI, SegmentTable

from .work import EMPTY, Extents, Work


@dataclass(eq=False)
class _Own:
    """Extents of a chain's own pages as if all were full.

    Attributes:
        context: what the chain read then; another object after its pages were taken and others given to it.
        pages: the pages, `extents` [pages or more, 5].
    """

    context: Extents
    pages: list[int]
    extents: Extents


class Views:
    """
    Args:
        page_size, num_pages: of the arena.
    """

    def __init__(self, page_size: int, num_pages: int) -> None:
        self._page_size, self._num_pages = page_size, num_pages
        self._own: WeakKeyDictionary[Work, _Own] = WeakKeyDictionary()

    def table(
        self, works: Sequence[Work], counts: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> SegmentTable:
        """The segment table of the next tokens of each work, whose slots were given already.

        Args:
            counts: int64 [B], how many tokens each.
            positions: int64 [T], their view positions.
        """
        size = self._page_size
        pieces: list[Extents] = []
        rows, listed, static, last_rows = [0], [0], [], []
        for work, count in zip(works, counts.tolist(), strict=True):
            end = work.computed + count
            own = self._own_pages(work, end)
            pieces += work.context, own
            static.append(len(work.context))
            rows.append(rows[-1] + count)
            listed.append(listed[-1] + static[-1] + len(own))
            last_rows.append(end - (len(own) - 1) * size)
        extents = np.concatenate(pieces)
        ends = extents[:, HI]
        for behind, last in zip(listed[1:], last_rows, strict=True):
            ends[behind - 1] = last
        return SegmentTable(
            q_indptr=np.array(rows, np.int32),
            q_positions=positions,
            extent_indptr=np.array(listed, np.int32),
            extents=extents,
            page_size=size,
            num_pages=self._num_pages,
            sequence_ids=tuple([work.id for work in works]),
            static_extents=np.array(static, np.int32),
        )

    def _own_pages(self, work: Work, end: int) -> Extents:
        """Extents of the pages that own tokens [0, end) are in, all as if full."""
        size, pages = self._page_size, work.writer.pages
        count = -(-end // size)
        own = self._own.get(work)
        if own is None or own.context is not work.context or own.pages != pages[: len(own.pages)]:
            own = self._own[work] = _Own(work.context, [], EMPTY)
        known = len(own.pages)
        if known < count:
            if len(own.extents) < count:
                grown = np.empty((max(16, 2 * count), 5), np.int32)
                if known:
                    grown[:known] = own.extents[:known]
                own.extents = grown
            found = work.writer.extents(known * size, end)
            assert len(found) == count - known, f"own pages cover fewer than {end} tokens"
            views = range(work.own_start + known * size, work.own_start + count * size, size)
            own.extents[known:count] = [
                (page, 0, size, stored, view - stored)
                for (page, _, _, stored), view in zip(found, views, strict=True)
            ]
            own.pages = pages[:count]
        return own.extents[:count]
