"""States stored again at other positions read as the states they were made of: pages, rotations and logits."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES, on_gpu
from torch import Tensor

from dagengine.errors import DagError
from dagengine.repositioning import PageMover
from dagengine.request import ContextRef
from dagengine_kernels import RotaryTable, build_table, rotate_by_delta
from dagengine_kvstore import Move, Read, plan_moves
from dagengine_kvstore.torch_arena import TorchArena

from .driver import Driver, request

PAGES, SIZE, DIM = 24, 8, 16
ROUNDING = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}


def row_moves(rng: random.Random, pages: int) -> list[Move]:
    """Pages in another order, all the same or in pieces; some sources occur often, others never."""
    moves, order = [], rng.sample(range(pages), pages)
    for target in range(pages):
        borders = sorted({0, rng.randrange(1, SIZE), SIZE}) if rng.random() < 0.3 else [0, SIZE]
        for to, end in pairwise(borders):
            lo = rng.randint(0, SIZE - end + to)
            source = order[target] if rng.random() < 0.9 else rng.randrange(pages)
            moves.append(Move(source, lo, lo + end - to, target, to, rng.choice((0, 3, -700))))
    return moves


def at_once(before: Tensor, moves: list[Move], rotary: RotaryTable | None) -> Tensor:
    """A layer in float64 after the moves, all of them read first."""
    before = before.double()
    after = before.clone()
    for page, lo, hi, target, to, delta in moves:
        k = before[page, 0, :, lo:hi].transpose(0, 1)
        if rotary is not None:
            k = rotate_by_delta(k, torch.full((hi - lo,), delta, device=k.device), rotary)
        after[target, 0, :, to : to + hi - lo] = k.transpose(0, 1)
        after[target, 1, :, to : to + hi - lo] = before[page, 1, :, lo:hi]
    return after


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ROUNDING, ids=str)
@pytest.mark.parametrize("spares", [0, 1, 6])
def test_a_plan_on_tensors_equals_the_copy_that_reads_everything_first(
    device: str, dtype: torch.dtype, spares: int
) -> None:
    rng, generator = random.Random(spares), torch.Generator().manual_seed(spares)
    arena = TorchArena(4, PAGES + spares, SIZE, 2, DIM, dtype, device)
    rotary = build_table([0.5**i for i in range(DIM // 2)], 1.2, 4, device=device)
    for i in range(4):
        arena.layer(i).copy_(torch.randn(arena.layer(i).shape, generator=generator).to(dtype))
    mover = PageMover(arena, [((0, 2), rotary), ((1, 3), None)])
    for deltas in (True, False):
        moves = [move if deltas else move._replace(delta=0) for move in row_moves(rng, PAGES)]
        want = [at_once(arena.layer(i), moves, None if i % 2 else rotary)[:PAGES] for i in range(4)]
        plan = plan_moves(moves, SIZE, spare=range(PAGES, PAGES + spares), width=3)
        assert plan.num_host_pages if not spares else plan.num_spare_pages
        mover.run(plan)
        for i, wanted in enumerate(want):
            have = arena.layer(i)[:PAGES].double()
            assert torch.equal(have[:, 1], wanted[:, 1])
            if i % 2 or not deltas:
                assert torch.equal(have[:, 0], wanted[:, 0]), "what is not turned keeps its bits"
            assert float((have - wanted).norm() / wanted.norm()) <= ROUNDING[dtype]


Place = dict[str, Any]
PLACES = [
    pytest.param({"device": "cpu"}, 1e-4, id="cpu"),
    pytest.param({"device": "cpu", "dtype": "bfloat16"}, 0.1, id="cpu-bfloat16"),
    on_gpu({"device": "cuda", "attention_backend": "reference"}, 1e-4, id="cuda"),
    on_gpu({"device": "cuda", "dtype": "bfloat16"}, 0.1, id="cuda-bfloat16"),
]
RULES, DOCUMENT, QUESTION = range(3, 16), range(20, 59), [7, 8, 9]


def drive(folder: Path, place: Place) -> Driver:
    driver = Driver(
        folder, **place, page_size=16 if place.get("attention_backend") is None else 4, kv_pages=200
    )
    driver.check_every_step = True
    return driver


def state_of(driver: Driver, name: str, tokens: Any, context: tuple[str, ...] = ()) -> str:
    refs = [ContextRef(state=state) for state in context]
    found = driver.choice(request(name, tokens, context=refs)).dag.state
    assert found is not None
    return found


def logits_of(driver: Driver, name: str, *context: str) -> Tensor:
    """Of the token behind a question over states, laid out `linear`."""
    refs = [ContextRef(state=state) for state in context]
    driver.choice(request(name, QUESTION, 1, context=refs, keep=False))
    return driver.logits[name][len(QUESTION) - 1].float().cpu()


@pytest.mark.parametrize(("place", "bar"), PLACES)
@pytest.mark.parametrize("copy", [True, False])
def test_a_repositioned_state_read_without_a_delta_gives_the_logits_of_reading_with_one(
    tiny_folder: Path, place: Place, bar: float, copy: bool
) -> None:
    driver = drive(tiny_folder, place)
    rules, document = (state_of(driver, n, t) for n, t in (("rules", RULES), ("document", DOCUMENT)))
    want = logits_of(driver, "with delta", rules, document)
    moved = driver.core.reposition(document, len(RULES), copy=copy)
    node, _ = driver.core.store.resolve(moved)
    assert node.own_start == len(RULES), "linear sees it where it is stored"
    with driver.core.store.lease([Read(node, 0, len(DOCUMENT))]) as lease:
        assert lease.extents(0)[0].stored == len(RULES)
    have = logits_of(driver, "without delta", rules, moved)
    assert float((have - want).abs().max()) <= bar
    driver.core.release_state(moved)
    again = logits_of(driver, "the source again", rules, document)
    assert float((again - want).abs().max()) <= bar, "kept, or computed again"


@pytest.mark.parametrize(("place", "bar"), PLACES)
def test_what_a_repositioned_state_read_moves_along_and_it_can_be_computed_again(
    tiny_folder: Path, place: Place, bar: float
) -> None:
    driver = drive(tiny_folder, place)
    rules = state_of(driver, "rules", RULES)
    answer = state_of(driver, "answer", DOCUMENT, (rules,))
    want = logits_of(driver, "before", answer)
    moved = driver.core.reposition(answer, 300, copy=True)
    assert float((logits_of(driver, "moved", moved) - want).abs().max()) <= bar
    for state in (rules, answer):
        driver.core.release_state(state)
    driver.evict_all()
    assert float((logits_of(driver, "recomputed", moved) - want).abs().max()) <= bar
    driver.core.release_state(moved)


def test_refusals_name_the_state_or_the_start(tiny_folder: Path) -> None:
    driver = drive(tiny_folder, {"device": "cpu"})
    document = state_of(driver, "document", DOCUMENT)
    reader = state_of(driver, "reader", QUESTION, (document,))
    moved = driver.core.reposition(document, 90, copy=True)
    for state, start, code, field in (
        ("st_unknown", 5, "state_not_found", "state"),
        (document, 5, "state_shared", "state"),
        (document, -1, "invalid_request", "start"),
        (document, 1024 - len(DOCUMENT) + 1, "position_overflow", "start"),
        (reader, len(DOCUMENT) - 1, "invalid_position", "start"),
        (moved, 5, "already_repositioned", "state"),
    ):
        with pytest.raises(DagError) as refused:
            driver.core.reposition(state, start)
        assert (refused.value.code, refused.value.field) == (code, field), refused.value
    driver.core.store.check()


def test_batch_invariant_states_are_never_found_on_turned_pages(tiny_folder: Path) -> None:
    driver = drive(tiny_folder, {"device": "cpu", "dtype": "bfloat16", "batch_invariant": True})
    rules, document = (state_of(driver, n, t) for n, t in (("rules", RULES), ("document", DOCUMENT)))
    want = logits_of(driver, "before", rules, document)
    moved = driver.core.reposition(document, 40, copy=True)
    driver.core.release_state(document)
    driver.evict_all()
    prompt = request("elsewhere", DOCUMENT, 1, position="explicit", keep=False)
    assert driver.choice(prompt).dag.reused == 0
    document = state_of(driver, "document again", DOCUMENT)
    assert torch.equal(logits_of(driver, "after", rules, document), want)
    driver.core.release_state(moved)
