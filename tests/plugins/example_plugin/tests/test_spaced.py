"""`spaced` keeps what every position policy keeps, and does what it says."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

import pytest

from dagengine_core_graph import Artifact, ContextGraph, Inherit, compile_context
from dagengine_example_plugin import SpacedPolicy
from dagengine_positions import Layout, PositionError, PositionPolicy, Segment, lay_out
from dagengine_positions.conformance import PolicyConformance


class TestSpaced(PolicyConformance):
    @pytest.fixture
    def policy(self) -> PositionPolicy:
        return SpacedPolicy()


class TestSpacedByAnyGap(PolicyConformance):
    @pytest.fixture
    def policy(self) -> PositionPolicy:
        return SpacedPolicy()

    def options(self, rng: Random) -> Mapping[str, object]:
        return {"gap": rng.randrange(5)}


@pytest.fixture
def graph() -> ContextGraph:
    graph = ContextGraph()
    graph.add("a", length=4, sealed=True)
    graph.add("b", length=3, sealed=True)
    return graph


def test_a_gap_lies_between_references_and_not_before_own_tokens(graph: ContextGraph) -> None:
    context = compile_context(graph, [Inherit("a"), Inherit("b")])
    assert lay_out("spaced", context, {"a": 0, "b": 0}.__getitem__, {"gap": 3}) == Layout(
        "spaced", (Segment("a", 0, 4, 0, 0), Segment("b", 0, 3, 7, 7)), own_start=10, num_visible=7
    )


def test_a_reference_that_places_nothing_leaves_no_gap(graph: ContextGraph) -> None:
    twice = compile_context(graph, [Inherit("a"), Inherit("a"), Inherit("b")])
    once = compile_context(graph, [Inherit("a"), Inherit("b")])
    starts = {"a": 0, "b": 0}.__getitem__
    assert lay_out("spaced", twice, starts) == lay_out("spaced", once, starts)


def test_without_a_gap_it_is_linear(graph: ContextGraph) -> None:
    context = compile_context(graph, [Artifact("a", (0, 2)), Artifact("a", (2, 4)), Inherit("b")])
    starts = {"a": 5, "b": 9}.__getitem__
    linear = lay_out("linear", context, starts)
    spaced = lay_out("spaced", context, starts, {"gap": 0})
    assert (spaced.segments, spaced.own_start) == (linear.segments, linear.own_start)


@pytest.mark.parametrize("gap", [-1, 1.5, True, "16", None])
def test_a_gap_that_cannot_be_is_refused(graph: ContextGraph, gap: object) -> None:
    with pytest.raises(PositionError) as caught:
        lay_out("spaced", compile_context(graph, []), {}.__getitem__, {"gap": gap})
    assert (caught.value.code, caught.value.field) == ("policy_unsupported", "gap")
