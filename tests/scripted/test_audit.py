"""An audit finds answers that an order changes, says where, and finds none where there is nothing to find."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from scripted_text import text_engine

from dagengine import LLM, DagError
from dagengine.audit import audit, permuted
from dagengine_core_graph.query import cross, g, plus, repeat, system


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with text_engine() as found:
        yield found


GREEDY: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0}


def test_an_order_that_matters_is_found(llm: LLM) -> None:
    judge = g(cross(system("s"), plus(*(f"piece {i} of them" for i in range(6))), "which?"), **GREEDY)
    report = audit(llm, judge, runs=6, seed=1)
    assert report.runs == 6 and report.answers == ("g",)
    (call,) = report.calls
    assert call.control is None and 0 <= call.agreement < 1, "the scripted model heeds the order under linear"
    assert len(call.changes) == round(6 * (1 - call.agreement))
    assert all(change.text != call.text and 1 <= change.run <= 6 for change in call.changes)
    assert report.agreement == call.agreement
    assert report.data()["calls"][0]["changes"][0]["first_difference"] == call.changes[0].first_difference


def test_an_order_that_does_not_matter_is_left_in_peace(llm: LLM) -> None:
    calls = plus(g("a", **GREEDY), g(cross("b", plus("c", "c")), **GREEDY), repeat(2, g("d", max_tokens=4)))
    report = audit(llm, calls, runs=5)
    assert report.agreement == 1.0 and report.runs >= 3 and len(report.calls) == 4
    assert all(call.control is None and not call.changes for call in report.calls)


@pytest.mark.parametrize("seed", [5, 2**63 - 1])
def test_calls_draw_what_the_query_run_with_the_seed_draws(llm: LLM, seed: int) -> None:
    drawn: dict[str, Any] = {"max_tokens": 8, "temperature": 100.0}
    calls = plus(g("a", **drawn), repeat(2, g("d", **drawn)), repeat(2, g("e", options={"seed": 7}, **drawn)))
    report = audit(llm, calls, runs=1, seed=seed)
    with llm.query(calls, seed=seed) as found:
        assert [call.text for call in report.calls] == [answer.text for answer in found.answers]


def test_a_query_without_a_free_order_has_nothing_to_permute(llm: LLM) -> None:
    report = audit(llm, g(cross("a", "b"), **GREEDY), runs=4)
    assert (report.runs, report.agreement, report.plain_agreement) == (0, 1.0, 1.0)


def test_a_plain_prompt_is_another_computation_and_only_where_parts_stand_alone(llm: LLM) -> None:
    inner = g(cross("draft", "of it"), **GREEDY)
    report = audit(
        llm, g(cross(system("s"), plus("one piece", "another", inner), "which?"), **GREEDY), runs=1
    )
    plain = {call.path: call.plain for call in report.calls}
    assert plain["g.input.cross[1].plus[2].g"] is None, "a chain is the plain prompt"
    assert plain["g"] is not None and plain["g"].run == 0
    assert 0 < report.plain_agreement < 1


def test_calls_keep_their_names_wherever_they_are_moved() -> None:
    query = g(plus(g("a"), cross("x", plus(g("b"), g("c"))), g("d")))
    moved, origin = permuted(query, random.Random(3))
    assert moved != query and sorted(origin.values()) == sorted(permuted(query, random.Random(4))[1].values())
    inverse = {old: new for new, old in origin.items()}
    assert inverse["g"] == "g" and len(origin) == 5


def test_progress_is_told_and_mistakes_are_refused(llm: LLM) -> None:
    seen: list[tuple[int, int]] = []
    audit(llm, g(plus("a", "b"), **GREEDY), runs=1, on_run=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)]
    for runs in (0, True, "2"):
        with pytest.raises(DagError, match="runs"):
            audit(llm, g("a"), runs=runs)  # type: ignore[arg-type]
    with pytest.raises(DagError) as error:
        audit(llm, g("a"), seed=None)  # type: ignore[arg-type]
    assert error.value.field == "seed"
