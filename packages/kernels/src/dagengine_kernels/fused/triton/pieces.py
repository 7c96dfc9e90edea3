"""A plan's works, cut into pieces where the walk changes. Knows integers only; runs on the host, once per plan.

    work     KV tiles |  0   1   2   3 | 4   5   6 |       of one query tile and kv head
    run               |  7   7   7   7 | 8   8   8 |
    kind              |  S   S   S   R | W   W   R |       S SEEN, W WHOLE, R RAGGED: see attend.py
    pieces            [  new      )[   )[new   )[  )       q is turned where NEW is 1

A piece of a run that its rows see at several deltas serves a kernel that turns q. One that turns K needs one delta:
`one_delta_each` walks such a piece once per delta.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from dagengine_kernels.fused.plan import (
    ENTRY_PAGE,
    ENTRY_POS0,
    ENTRY_ROWS,
    ENTRY_RUN,
    INVISIBLE,
    RUN_DELTA,
    RUN_VEC,
    WORK_BEGIN,
    WORK_END,
    WORK_HEAD,
    WORK_PART,
    WORK_TILE,
    Ints,
    PlanArrays,
    PlanClass,
)

SEEN, WHOLE, RAGGED = range(3)

PIECE_DELTA, PIECE_VEC, PIECE_BEGIN, PIECE_END, PIECE_KIND, PIECE_NEW = range(6)


@dataclass(frozen=True, eq=False)
class Pieces:
    """The works of one height, longest first.

    Attributes:
        works: int32 [W, 5], columns TILE, HEAD, FIRST and LAST (pieces FIRST .. LAST - 1), PART.
        pieces: int32 [P, 6], columns DELTA, VEC (as of a run), BEGIN, END (KV tiles), KIND, NEW (1 where q has to
            be turned: the first piece of a run in its work).
        deltas: int32 [V], what VEC points into.
    """

    works: Ints
    pieces: Ints
    deltas: Ints


def cut_works(
    arrays: PlanArrays, tiles: PlanClass, positions: Ints, *, group: int, window: int | None
) -> Pieces:
    """Cut the works of one height.

    Args:
        positions: [T] view positions of the table's rows.
        group, window: as planned for.
    """
    works = tiles.works[np.argsort(tiles.works[:, WORK_BEGIN] - tiles.works[:, WORK_END], kind="stable")]
    lengths = works[:, WORK_END] - works[:, WORK_BEGIN]
    work = np.repeat(np.arange(len(works)), lengths)
    starts = np.cumsum(lengths) - lengths
    tile = np.arange(len(work)) - starts[work] + works[work, WORK_BEGIN]

    entries = arrays.entries.reshape(-1, arrays.boxes, 4)
    run = entries[:, 0, ENTRY_RUN][tile]
    new = np.ones(len(work), bool)
    new[1:] = (work[1:] != work[:-1]) | (run[1:] != run[:-1])
    piece = np.cumsum(new) - 1
    query_tile, piece_run = works[work[new], WORK_TILE], run[new]
    low, high = _reach(arrays, tiles.tile_rows[query_tile], piece_run, positions)

    full = (entries[..., ENTRY_ROWS] == arrays.page_size << 16) & (entries[..., ENTRY_PAGE] >= 0)
    pos0 = entries[..., ENTRY_POS0].astype(np.int64)
    seen = pos0.max(1)[tile] + arrays.page_size - 1 <= low[piece]
    if window is not None:
        seen &= pos0.min(1)[tile] > high[piece] - window
    kind = np.where(full.all(1)[tile], np.where(seen, SEEN, WHOLE), RAGGED)

    cut = new.copy()
    cut[1:] |= kind[1:] != kind[:-1]
    begins = np.flatnonzero(cut)
    ends = np.append(begins[1:], len(work))
    pieces = np.empty((len(begins), 6), np.int32)
    pieces[:, PIECE_DELTA] = arrays.runs[run[begins], RUN_DELTA]
    pieces[:, PIECE_VEC] = arrays.runs[run[begins], RUN_VEC]
    pieces[:, PIECE_BEGIN] = tile[begins]
    pieces[:, PIECE_END] = tile[ends - 1] + 1
    pieces[:, PIECE_KIND] = kind[begins]
    pieces[:, PIECE_NEW] = new[begins]
    firsts = np.searchsorted(work[begins], np.arange(len(works) + 1)).astype(np.int32)
    named = np.stack(
        [works[:, WORK_TILE], works[:, WORK_HEAD], firsts[:-1], firsts[1:], works[:, WORK_PART]], axis=1
    )
    return Pieces(named, pieces, arrays.deltas)


def one_delta_each(cut: Pieces, slots: int) -> Pieces:
    """The same works, where every piece has the one DELTA of all slots that see it; others are INVISIBLE in VEC."""
    deltas = [cut.deltas]
    length = len(cut.deltas)
    vecs: dict[tuple[int, int], int] = {}
    works, pieces = cut.works.copy(), []
    for w, (_, _, first, last, _) in enumerate(cut.works.tolist()):
        works[w, 2] = len(pieces)
        for delta, vec, begin, end, kind, _ in cut.pieces[first:last].tolist():
            if vec < 0:
                pieces.append((delta, vec, begin, end, kind, 1))
                continue
            seen_at = cut.deltas[vec : vec + slots]
            for one in dict.fromkeys(seen_at[seen_at != INVISIBLE].tolist()):
                if (vec, one) not in vecs:
                    vecs[vec, one] = length
                    deltas.append(np.where(seen_at == one, one, INVISIBLE).astype(np.int32))
                    length += slots
                pieces.append((one, vecs[vec, one], begin, end, max(kind, WHOLE), 1))
        works[w, 3] = len(pieces)
    return Pieces(works, np.array(pieces, np.int32).reshape(-1, 6), np.concatenate(deltas))


def _reach(arrays: PlanArrays, rows: Ints, run: Ints, positions: Ints) -> tuple[np.ndarray, np.ndarray]:
    """The lowest and highest p - delta of the rows [P, slots] in runs [P]; the lowest is -1 if one sees nothing."""
    vec = arrays.runs[run, RUN_VEC]
    at = np.maximum(vec, 0)[:, None] + np.arange(rows.shape[1])
    own = np.append(arrays.deltas, 0)[np.minimum(at, len(arrays.deltas))]
    delta = np.where(vec[:, None] >= 0, own, arrays.runs[run, RUN_DELTA][:, None]).astype(np.int64)
    seen_from = np.where(delta == INVISIBLE, -1, np.append(positions, 0)[rows] - delta)
    low = np.where(rows >= 0, seen_from, 2**31).min(1)
    high = np.where(rows >= 0, seen_from, -1).max(1)
    return low, high
