"""A group begins as far as the next step takes it, in order, and nobody who comes later passes it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from scripted_requests import EVERY_MODE, GREEDY, document, tokens
from simulator import Settings, World

from dagengine.request import Request

pytestmark = pytest.mark.usefixtures("step_mode")


def world() -> World:
    """Steps of 16 tokens."""
    return World(0, Settings(4, 200, 16, 8))


def begun(run: World, names: list[str]) -> list[str]:
    return [name for name in names if run.core._requests.by_id[name].sequences]


@EVERY_MODE
def test_a_step_does_not_wait_for_all_of_a_group() -> None:
    run = world()
    names = [f"d{i}" for i in range(9)]
    run.submit(*(document(name, 8, 100 + 20 * i) for i, name in enumerate(names)))
    assert begun(run, names) == [] and run.core.num_waiting == 9
    run.core._begin_ready()
    assert begun(run, names) == names[:2] and run.core.num_waiting == 9
    run.run()
    assert all(run.ends[name].error is None for name in names)


@EVERY_MODE
def test_who_comes_later_does_not_pass_a_group_and_who_is_more_urgent_does() -> None:
    run = world()
    names = [f"d{i}" for i in range(6)]
    run.submit(*(document(name, 8, 100 + 20 * i) for i, name in enumerate(names)))
    run.submit(document("later", 16, 400))
    run.submit(document("urgent", 16, 500, priority=-1))
    ends: list[str] = []
    while run.core.has_work:
        before = set(run.ends)
        run.step()
        ends += sorted(set(run.ends) - before)
    assert ends == ["urgent", *names, "later"]


@EVERY_MODE
def test_those_that_did_not_begin_can_be_cancelled() -> None:
    run = world()
    run.submit(*(document(f"d{i}", 8, 100 + 20 * i) for i in range(6)))
    run.core._begin_ready()
    assert run.abort("d4") and run.core.num_waiting == 5
    run.run()
    assert {name for name, end in run.ends.items() if end.error} == {"d4"}


@EVERY_MODE
def test_a_refusal_at_the_begin_ends_one_request_of_a_group() -> None:
    run = world()
    most = replace(GREEDY, max_tokens=10_000)
    run.submit(document("a", 8), Request("b", tokens(8, 300), most), document("c", 8, 200))
    run.run()
    assert run.ends["b"].error is not None and run.ends["b"].error.code in ("capacity", "position_overflow")
    assert run.ends["a"].error is None and run.ends["c"].error is None


@EVERY_MODE
def test_the_id_of_one_that_was_cancelled_before_it_began_is_free() -> None:
    run = world()
    run.submit(*(document(f"d{i}", 8, 100 + 20 * i) for i in range(6)))
    assert run.abort("d4")
    del run.ends["d4"]
    run.submit(document("d4", 12, 700))
    run.run()
    assert all(run.ends[f"d{i}"].error is None for i in range(6))
