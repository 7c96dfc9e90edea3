"""One wrong number in one row of one table makes the comparison fail: the other tests are not vacuous."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from scripted_model import ScriptedBackend
from simulator import Mismatch, Settings, World

from dagengine import ContextRef, Keep, SamplingParams
from dagengine.request import Request
from dagengine_kernels.segments import DELTA, HI, LO, PAGE, STORED

Row = NDArray[np.int32]
pytestmark = pytest.mark.usefixtures("step_mode")


def wrong_page(row: Row) -> None:
    row[PAGE] = (row[PAGE] + 1) % 16


def first_row_missing(row: Row) -> None:
    row[LO] += 1
    row[STORED] += 1


def lo_alone(row: Row) -> None:
    row[LO] += 1


def last_row_missing(row: Row) -> None:
    row[HI] -= 1


def one_row_more(row: Row) -> None:
    row[HI] += 1


def delta_more(row: Row) -> None:
    row[DELTA] += 1


def delta_less(row: Row) -> None:
    row[DELTA] -= 1


def stored_alone(row: Row) -> None:
    row[STORED] += 1


def stored_against_delta(row: Row) -> None:
    row[STORED] += 1
    row[DELTA] -= 1


FAULTS = (
    wrong_page,
    first_row_missing,
    lo_alone,
    last_row_missing,
    one_row_more,
    delta_more,
    delta_less,
    stored_alone,
    stored_against_delta,
)
DOCUMENTS = {"a": (11, 12, 13, 14, 15, 16, 17), "b": (21, 22, 23, 24, 25, 26), "c": (31, 32, 33)}


def ask() -> World:
    """A question over three documents in 16 pages of 4 tokens, checked against the definition."""
    world = World(0, Settings(page_size=4, pages=16, max_num_batched_tokens=64, max_num_seqs=4))
    for name, ids in DOCUMENTS.items():
        world.submit(Request(name, ids, None, keep=Keep()))
    world.run()
    refs = tuple(
        ContextRef(state=world.handle(name).id, mode="artifact", span="all") for name in ("b", "c", "a")
    )
    world.submit(Request("q", (1, 2, 3), SamplingParams(max_tokens=4, temperature=0.0), refs, keep=Keep()))
    world.run()
    return world


def plant(monkeypatch: pytest.MonkeyPatch, change: Callable[[Row], None], at_row: int) -> list[Row]:
    """Let one row of the question's first table lie, once. Returns the row, once it was changed."""
    plan, changed = ScriptedBackend.plan, list[Row]()

    def lying(self: ScriptedBackend, table: Any, *args: Any, **kwargs: Any) -> Any:
        if not changed and table.static_extents.tolist() == [5]:
            extents = table.extents.copy()
            change(extents[at_row])
            changed.append(extents[at_row])
            table = replace(table, extents=extents, static_extents=np.zeros(1, np.int32))
        return plan(self, table, *args, **kwargs)

    monkeypatch.setattr(ScriptedBackend, "plan", lying)
    return changed


def test_the_truth_passes() -> None:
    answer = ask().ends["q"].choices[0]
    assert len(answer.token_ids) == 4 and answer.dag.visible == 16


def changeable(change: Callable[[Row], None], at_row: int) -> bool:
    """Rows of b, c and a, then the own ones: 4 of 6, 2 of 6, 3, 4 of 7, 3 of 7, 3."""
    full, first = at_row in (0, 3), at_row == 0
    return not (change in (one_row_more, lo_alone) and full) and not (change is delta_less and first)


CASES = [(change, row) for change in FAULTS for row in range(6) if changeable(change, row)]


@pytest.mark.parametrize(
    ("change", "at_row"), CASES, ids=lambda value: getattr(value, "__name__", str(value))
)
def test_a_planted_fault_is_found(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Row], None], at_row: int
) -> None:
    changed = plant(monkeypatch, change, at_row)
    with pytest.raises(Mismatch) as error:
        ask()
    assert changed, "nothing was changed"
    assert "invalid_segment_table" not in str(error.value), (
        "the table's own check found it, not the comparison"
    )


def test_a_page_overwritten_too_early_is_found() -> None:
    """Another request's KV in a page that is still read: what a free without a fence does."""
    world = World(0, Settings(page_size=4, pages=16, max_num_batched_tokens=64, max_num_seqs=4))
    world.submit(Request("a", DOCUMENTS["a"], None, keep=Keep()))
    world.submit(Request("b", DOCUMENTS["b"], None, keep=Keep()))
    world.run()
    (a, _), (b, _) = (world.core.store.resolve(world.handle(name).id) for name in ("a", "b"))
    for layer in range(2):
        pages = world.core._runner.arena.layer(layer)
        pages[a.pages[0]] = pages[b.pages[0]]
    reader = ContextRef(state=world.handle("a").id)
    world.submit(Request("q", (1,), SamplingParams(max_tokens=3, temperature=0.0), (reader,)))
    with pytest.raises(Mismatch):
        world.run()
