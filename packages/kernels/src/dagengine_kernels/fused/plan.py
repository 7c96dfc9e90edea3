"""The format of a fused plan: row-masked query tiles that walk shared KV tiles, cut into equal work.

Knows integers only, like the segment table that it is made from. Every kernel of this package reads it.

    query tile   up to M = rows_per_tile rows: `slots` = M // G table rows times the G query heads of one kv head;
                 row m of the tile is slot m // G, head (kv head) * G + m % G
    entry        PAGE, LO | OWNER << 8 | HI << 16, POS0, RUN
                 rows LO..HI-1 of a page; the page's row r is stored at POS0 + r. OWNER 0: for every slot that sees the
                 run; else slot OWNER - 1 alone sees it. Where a plan has no owners LO has all 16 bits
    KV tile      `boxes` consecutive entries of one run. Some may be null (PAGE -1, LO = HI = 0): the last ones, and
                 those of owners that have no page where others of their run grow into one
    run          DELTA, VEC      VEC -1: every slot of the tile sees it at DELTA;
                                 else slot i sees it at deltas[VEC + i], and not at all where that is INVISIBLE
    work         a stretch of KV tiles for one query tile and one kv head, done by one worker

A slot at view position p sees a token of a run with delta d stored at s iff s <= p - d (and s > p - d - window).
Turning q is a rotation at p - d; it happens once per work and run.

    worker     0            1            2                 work_indptr[w] .. work_indptr[w + 1] are w's works
    (tile,head) |--- A ---|---- A ----|-A-|----- B -----|   A is in three parts, merged by LSE; B is written directly

A work whose (tile, head) is not cut writes its rows directly (PART -1); otherwise the partial result of slot i and
kv-head-relative query head g goes to o_part[PART + i, g], lse2_part[PART + i, g] for every slot that holds a row (slots
that pad have no parts). A slot that saw nothing there leaves lse2 = -inf and may leave its o_part unwritten.
A merge row is (table row * Hkv + kv head): its parts are merge_parts[merge_indptr[j] .. merge_indptr[j + 1]], indices
into o_part; rows that no work writes directly are all listed, those that see nothing with no parts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

INVISIBLE = -(2**31)
"""A slot's delta where it does not see a run."""

ENTRY_PAGE, ENTRY_ROWS, ENTRY_POS0, ENTRY_RUN = range(4)
ENTRY_OWNER_SHIFT = 8
NO_TAIL = (-1, 0, 1)
"""A row of `PlanArrays.tails` where nothing grows."""

RUN_DELTA, RUN_VEC = range(2)
WORK_TILE, WORK_HEAD, WORK_BEGIN, WORK_END, WORK_PART = range(5)

Ints = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class PlanParameters:
    """What an implementation asks of the planner.

    Attributes:
        group: G, query heads per kv head.
        num_kv_heads: Hkv.
        rows_per_tile: the tile heights M that its kernels have, ascending, e.g. (64, 128); each at least G.
        workers: how many workers share a launch at each of these heights.
        boxes: entries per KV tile.
        window: keys in (p - window, p] are visible; None for no window.
        min_chunk: no (tile, head) is cut into pieces of fewer KV tiles than this, unless it is smaller itself or is
            cut together with tiles that read the same.
        work_cost: what starting a work costs, in KV tiles.
        run_cost: what going on to another run within a work costs (q turns), in KV tiles.
        wide_cost: the cost of a KV tile at the largest height relative to one at the smallest.
        owners: whether the kernels know entries with an owner: what is one slot's alone, and short, is then packed
            into KV tiles with that of others. Pages have at most 255 tokens then, and tiles 254 slots; refused beside
            `invariant_chunk`.
        invariant_chunk: for a batch-invariant plan the KV tiles of a part, else None. Every sequence then walks by
            itself, all that it lists in its order, and is cut at every so many KV tiles from the walk's begin: what a
            row's parts are made of, and their order, depends on what its sequence lists up to it and on nothing else
            (alone_twin.py draws it). Reads are not shared, and min_chunk and wide_cost have no meaning.
    """

    group: int
    num_kv_heads: int
    rows_per_tile: tuple[int, ...]
    workers: tuple[int, ...]
    boxes: int
    window: int | None = None
    min_chunk: int = 4
    work_cost: int = 3
    run_cost: int = 0
    wide_cost: float = 1.15
    owners: bool = False
    invariant_chunk: int | None = None


@dataclass(frozen=True, eq=False)
class PlanClass:
    """The query tiles of one height: one launch.

    Attributes:
        rows_per_tile: M.
        tile_rows: int32 [tiles, M // G], table rows; -1 pads, only behind the rows of a tile.
        works: int32 [W, 5], columns TILE, HEAD, BEGIN, END (KV tiles, that is entries BEGIN * boxes ..), PART.
        work_indptr: int32 [workers + 1].
    """

    rows_per_tile: int
    tile_rows: Ints
    works: Ints
    work_indptr: Ints


@dataclass(frozen=True, eq=False)
class PlanArrays:
    """A whole plan.

    Attributes:
        entries: int32 [E, 4], E a multiple of `boxes`.
        runs: int32 [R, 2].
        deltas: int32 [V].
        classes: at most one per height, ascending; none is empty.
        merge_rows: int32 [J], table row * Hkv + kv head, ascending.
        merge_indptr: int32 [J + 1].
        merge_parts: int32 [..], indices into the first axis of o_part.
        num_parts: length of the first axis of o_part [num_parts, G, D] and lse2_part [num_parts, G].
        tails: int32 [B, 3]: per sequence the entry that its next token goes into, the number of entries, with that
            one, that are reserved for its growth, and how far they are apart; NO_TAIL where the plan reserves none.
        boxes, page_size: as planned for.
        tokens_read: tokens in the pages that the walks read (whole pages, every tile's walk counted), per kv head.
        tokens_unique: distinct tokens that the table lists.
    """

    entries: Ints
    runs: Ints
    deltas: Ints
    classes: tuple[PlanClass, ...]
    merge_rows: Ints
    merge_indptr: Ints
    merge_parts: Ints
    num_parts: int
    tails: Ints
    boxes: int
    page_size: int
    tokens_read: int
    tokens_unique: int
    notes: tuple[str, ...] = field(default=())

    @property
    def read_ratio(self) -> float:
        """Tokens read over distinct tokens: 1.0 is the floor of any kernel that reads what is seen."""
        return self.tokens_read / self.tokens_unique if self.tokens_unique else 1.0
