"""What is one slot's alone, and short, shares KV tiles with that of others; it is read by its owner alone."""

from dataclasses import replace

import numpy as np
import pytest

from dagengine_kernels import KernelError
from dagengine_kernels.fused import planner_twin
from dagengine_kernels.fused.plan import ENTRY_OWNER_SHIFT, NO_TAIL
from dagengine_kernels.fused.planner import plan_spans

from .planner_batches import H200, batch, pages, walked

PAIRS = replace(H200, boxes=2, owners=True)


def readers(count: int, own: int, shared: int = 640):
    """Readers of one state, each with own tokens behind it."""
    state = pages(0, shared)
    return batch(*([(state, 0, shared), (pages(100 + 100 * i, own), 0, own)] for i in range(count)))


def owners(arrays) -> list[int]:
    return (arrays.entries[:, 1] >> ENTRY_OWNER_SHIFT & 0xFF).tolist()


def test_short_tails_of_readers_lie_in_kv_tiles_together():
    arrays = plan_spans(readers(8, 20), PAIRS)
    assert (len(arrays.entries), len(arrays.runs)) == (10 + 8, 2)
    assert owners(arrays) == [0] * 10 + list(range(1, 9))
    assert arrays.entries[10:, 0].tolist() == [100 + 100 * i for i in range(8)]
    apart = plan_spans(readers(8, 20), replace(PAIRS, owners=False))
    assert (len(apart.entries), len(apart.runs)) == (10 + 16, 9)
    assert arrays.tokens_read == apart.tokens_read


def test_what_is_long_and_what_is_alone_stays_a_run_of_its_own():
    long = plan_spans(readers(3, 2 * 4 * 64, 2560), PAIRS)
    assert set(owners(long)) == {0} and len(long.runs) == 4
    shorter = plan_spans(readers(3, 2 * 4 * 64 - 1, 2560), PAIRS)
    assert len(shorter.runs) == 2
    state, tail = pages(0, 640), pages(100, 20)
    alone = plan_spans(batch([(state, 0, 640)], [(state, 0, 640), (tail, 0, 20)]), PAIRS)
    assert set(owners(alone)) == {0} and len(alone.runs) == 2


def test_an_owner_turns_at_its_own_delta():
    state = pages(0, 640)
    contexts = [[(state, 0, 640), (pages(100 * i, 20), 0, 20)] for i in (1, 2, 3)]
    table = batch(*contexts)
    spans = table.spans.copy()
    spans[1::2, 4] += np.array([5, -7, 0], np.int32)
    table = replace(table, spans=spans, q_positions=table.q_positions + 10)
    arrays = plan_spans(table, PAIRS)
    assert len(arrays.runs) == 2
    vector = arrays.runs[1, 1]
    assert arrays.deltas[vector : vector + 3].tolist() == spans[1::2, 4].tolist()
    rows = walked(arrays, PAIRS, table.q_positions, 3)
    assert [heads[0].total() for heads in rows] == [660] * 3


def test_the_pages_that_tails_grow_into_lie_behind_all_tails():
    """While nothing is in them their KV tiles are empty, and left out."""
    reserve = [[1000 + 10 * i + k for k in range(2 if i != 1 else 1)] for i in range(4)]
    arrays = plan_spans(readers(4, 20), PAIRS, reserve=reserve)
    behind = arrays.entries[10:]
    assert behind[:, 0].tolist() == [100, 200, 300, 400, 1000, 1010, 1020, 1030, 1001, -1, 1021, 1031]
    assert arrays.tails.tolist() == [[10 + i, 1 + len(reserve[i]), 4] for i in range(4)]
    for _ in range(44):
        planner_twin.advance(arrays)
    assert arrays.tails[:, :2].tolist() == [[14 + i, len(reserve[i])] for i in range(4)]
    assert behind[:8, 1].tolist() == [i + 1 << ENTRY_OWNER_SHIFT | 64 << 16 for i in range(4)] + [
        i + 1 << ENTRY_OWNER_SHIFT for i in range(4)
    ]
    for _ in range(64):
        planner_twin.advance(arrays)
    assert arrays.tails[:, :2].tolist() == [[18, 1], list(NO_TAIL[:2]), [20, 1], [21, 1]]


@pytest.mark.parametrize(
    ("parameters", "page_size"),
    [
        (replace(PAIRS, group=1, rows_per_tile=(255,), workers=(4,)), 64),
        (PAIRS, 256),
        (replace(PAIRS, invariant_chunk=4), 64),
    ],
)
def test_owners_that_a_plan_cannot_have_are_refused(parameters, page_size):
    table = batch([(pages(0, 100, page_size), 0, 100)], page_size=page_size)
    plan_spans(table, replace(parameters, owners=False))
    with pytest.raises(KernelError) as refused:
        plan_spans(table, parameters)
    assert (refused.value.code, refused.value.field) == ("invalid_argument", "owners")
