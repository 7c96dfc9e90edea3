from __future__ import annotations

import random
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kvstore_helpers import refused
from kvstore_mover import ListMover, Row, at_once

from dagengine_kvstore import Move, MovePlan, StepKind, plan_moves
from dagengine_kvstore.move_graph import MoveGraph

SIZE = 4


def computed(num_pages: int, page_size: int = SIZE) -> list[Row]:
    return [(row, -row) for row in range(num_pages * page_size)]


def num_pages(moves: list[Move]) -> int:
    return max((max(move.source, move.target) for move in moves), default=-1) + 1


def carried_out(moves: list[Move], page_size: int = SIZE, spares: int = 0, width: int = 4) -> MovePlan:
    """Plan and run moves; everything but the spare pages must be as by the obvious copy."""
    pages = num_pages(moves)
    rows = computed(pages + spares, page_size)
    want = at_once(rows, moves, page_size)[: pages * page_size]
    plan = plan_moves(moves, page_size, spare=range(pages, pages + spares), width=width)
    mover = ListMover(list(rows), page_size)
    mover.run(plan)
    assert mover.rows[: pages * page_size] == want
    assert (mover.keys, mover.values, mover.host) == (plan.key_rows, plan.value_rows, plan.host_rows)
    assert plan.bytes_written(6) == 3 * (mover.keys + mover.values) + 6 * mover.host
    assert plan.num_spare_pages <= spares
    return plan


def permutation(order: list[int], delta: int = 0, page_size: int = SIZE) -> list[Move]:
    return [Move(source, 0, page_size, target, 0, delta) for source, target in enumerate(order)]


@st.composite
def page_moves(draw: st.DrawFn) -> list[Move]:
    """Whole pages to distinct targets; sources may repeat, be targets, or stay."""
    pages = draw(st.integers(1, 12))
    targets = draw(st.lists(st.integers(0, pages - 1), unique=True, min_size=1))
    sources = draw(st.lists(st.integers(0, pages - 1), min_size=len(targets), max_size=len(targets)))
    deltas = draw(st.lists(st.integers(-2, 2), min_size=len(targets), max_size=len(targets)))
    return [Move(s, 0, SIZE, t, 0, d) for s, t, d in zip(sources, targets, deltas, strict=True)]


@st.composite
def row_moves(draw: st.DrawFn) -> list[Move]:
    """Runs of rows of few pages, which overlap in every way; no row is written twice."""
    pages = draw(st.integers(1, 4))
    moves = []
    for target in range(pages):
        borders = sorted(draw(st.sets(st.integers(0, SIZE), max_size=4)))
        for to, end in pairwise(borders):
            if draw(st.booleans()):
                lo = draw(st.integers(0, SIZE - end + to))
                source = draw(st.integers(0, pages - 1))
                moves.append(Move(source, lo, lo + end - to, target, to, draw(st.integers(-1, 1))))
    return draw(st.permutations(moves))


@settings(max_examples=300)
@given(page_moves() | row_moves(), st.integers(0, 5), st.integers(1, 4))
def test_any_moves_equal_the_copy_that_reads_everything_first(
    moves: list[Move], spares: int, width: int
) -> None:
    plan = carried_out(moves, spares=spares, width=width)
    again = plan_moves(moves, SIZE, spare=range(num_pages(moves), num_pages(moves) + spares), width=width)
    assert again == plan


@pytest.mark.parametrize("seed", range(4))
def test_large_permutations_with_duplicates_equal_the_obvious_copy(seed: int) -> None:
    rng = random.Random(seed)
    pages = 300
    targets = rng.sample(range(pages), rng.randint(150, pages))
    moves = [Move(rng.randrange(pages), 0, SIZE, target, 0, rng.randint(0, 3)) for target in targets]
    for spares in (0, 1, 40):
        carried_out(moves, spares=spares, width=16)
    whole = permutation(rng.sample(range(pages), pages), 7)
    assert carried_out(whole, spares=1).num_host_pages == 0


def test_copies_without_cycles_are_one_step_and_nothing_is_moved_twice() -> None:
    moves = [Move(page, 0, SIZE, 50 + 2 * page + k, 0, k) for page in range(10) for k in (0, 1)]
    plan = carried_out(moves)
    assert len(plan.steps) == 1 and plan.key_rows == plan.value_rows == plan.num_rows == 20 * SIZE


def test_a_source_is_read_by_all_its_readers_before_it_is_turned_in_place() -> None:
    moves = [Move(0, 0, SIZE, 0, 0, 5), Move(0, 0, SIZE, 1, 0, 9), Move(0, 0, SIZE, 2, 0, 0)]
    plan = carried_out(moves)
    assert [len(step.moves) for step in plan.steps] == [2, 1]
    assert plan.value_rows == 2 * SIZE, "V stays where K is turned in place"


def test_moves_in_place_come_last_in_a_step_and_those_that_change_nothing_are_left_out() -> None:
    moves = [Move(0, 0, SIZE, 0, 0, 3), Move(1, 0, SIZE, 1, 0, 0), Move(2, 0, SIZE, 3, 0, 3)]
    (step,) = carried_out(moves).steps
    assert [move.in_place for move in step.moves] == [False, True] and step.num_copies == 1


def test_one_giant_cycle_needs_one_spare_page_and_gets_wide_steps_from_more() -> None:
    cycle = permutation([*range(1, 256), 0], 3)
    one = carried_out(cycle, spares=1, width=16)
    assert one.num_spare_pages == 1 and one.num_host_pages == 0
    assert one.key_rows == one.num_rows + SIZE and len(one.steps) == 257
    many = carried_out(cycle, spares=64, width=16)
    assert many.num_spare_pages <= 16 and len(many.steps) <= 18
    assert many.key_rows <= one.num_rows * 17 // 16


def test_a_long_chain_without_a_cycle_is_cut_into_pieces_too() -> None:
    chain = [Move(page, 0, SIZE, page + 1, 0, 1) for page in range(255)]
    assert len(carried_out(chain).steps) == 255
    assert len(carried_out(chain, spares=16, width=16).steps) <= 18


def test_a_cycle_goes_through_the_host_where_there_is_no_spare_page() -> None:
    cycle = permutation([1, 2, 0], 3)
    plan = carried_out(cycle)
    assert [step.kind for step in plan.steps] == [
        StepKind.SAVE, StepKind.MOVE, StepKind.MOVE, StepKind.LOAD, StepKind.MOVE,
    ]  # fmt: skip
    assert plan.num_host_pages == 1 and plan.host_rows == 2 * SIZE


def test_what_no_spare_page_is_needed_for_never_waits_for_one() -> None:
    moves = [*permutation([1, 0, 3, 2]), Move(8, 0, SIZE, 9, 0)]
    plan = carried_out(moves, spares=1)
    assert Move(8, 0, SIZE, 9, 0) in plan.steps[0].moves


def test_many_small_cycles_share_runs_as_far_as_the_spare_pages_go() -> None:
    swaps = permutation([page ^ 1 for page in range(200)], 1)
    steps = {spares: len(carried_out(swaps, spares=spares, width=100).steps) for spares in (1, 10, 100)}
    assert steps == {1: 300, 10: 30, 100: 3}
    assert len(carried_out(swaps).steps) == 4, "and all through the host at once without any"


def test_rows_that_shift_within_their_own_page_are_saved_first() -> None:
    plan = carried_out([Move(0, 0, 3, 0, 1, 2)], spares=1)
    assert plan.num_spare_pages == 1 and len(plan.steps) == 2
    carried_out([Move(0, 0, 3, 0, 1, 2)])


def test_saved_pieces_of_pages_are_packed_into_spare_pages() -> None:
    moves = [Move(page, half, half + 2, page ^ 1, half) for page in range(8) for half in (0, 2)]
    plan = carried_out(moves, spares=8, width=100)
    assert plan.num_spare_pages == 4, "eight cycles of two pieces save two rows each"


def test_components_are_the_cycles_and_those_that_read_first_come_first() -> None:
    moves = [*permutation([1, 2, 0]), Move(2, 0, SIZE, 5, 0), Move(5, 0, SIZE, 6, 0)]
    graph = MoveGraph(moves)
    assert graph.components(range(5)) == [[4], [3], [0, 1, 2]]
    assert graph.islands() == [0, 0, 0, 0, 0]
    order, saved = graph.order()
    assert sorted(order) == list(range(5)) and len(saved) == 1 and order[:2] == [4, 3]


def test_a_cycle_deeper_than_the_recursion_limit() -> None:
    carried_out(permutation([*range(1, 5000), 0], page_size=1), page_size=1, spares=8)


@pytest.mark.parametrize(
    ("moves", "spare", "field"),
    [
        ([Move(0, 0, 5, 1, 0)], [], "moves[0]"),
        ([Move(0, 2, 2, 1, 0)], [], "moves[0]"),
        ([Move(0, 0, 3, 1, 2)], [], "moves[0]"),
        ([Move(0, 0, 1, 1, -1)], [], "moves[0]"),
        ([Move(-1, 0, 1, 1, 0)], [], "moves[0]"),
        ([Move(0, 0, 2, 1, 0), Move(2, 0, 2, 1, 1)], [], "moves[1].to"),
        ([Move(0, 0, 2, 1, 0)], [1], "moves[0]"),
        ([Move(0, 0, 2, 1, 0)], [2, 2], "spare"),
    ],
)
def test_moves_that_cannot_be_are_refused(moves: list[Move], spare: list[int], field: str) -> None:
    with refused("invalid_moves", field):
        plan_moves(moves, SIZE, spare=spare)


@pytest.mark.parametrize(("options", "field"), [({"page_size": 0}, "page_size"), ({"width": 0}, "width")])
def test_sizes_are_at_least_one(options: dict[str, int], field: str) -> None:
    with refused("invalid_size", field):
        plan_moves([], **{"page_size": SIZE, **options})
