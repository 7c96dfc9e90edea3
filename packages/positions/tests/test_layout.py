"""What layouts refuse, and that a wrong layout of a plug-in is caught."""

import math
from dataclasses import replace

import pytest

from dagengine_core_graph import Artifact, ContextGraph, Inherit, compile_context
from dagengine_positions import (
    POSITION_LIMIT,
    Layout,
    LinearPolicy,
    PositionError,
    Segment,
    check_layout,
    lay_out,
)

STARTS = {"a": 0, "b": 4, "empty": 9}


def context(*references):
    graph = ContextGraph()
    graph.add("a", length=3, sealed=True)
    graph.add("b", length=4, sealed=True)
    graph.add("empty", length=0, sealed=True)
    return compile_context(graph, references)


def refusal(policy, references, options=None):
    with pytest.raises(PositionError) as caught:
        lay_out(policy, context(*references), STARTS.__getitem__, options or {})
    return caught.value.code, caught.value.field


def test_a_policy_object_serves_like_its_name():
    seen = context(Inherit("a"), Inherit("b"))
    assert lay_out(LinearPolicy(), seen, STARTS.__getitem__) == lay_out("linear", seen, STARTS.__getitem__)


@pytest.mark.parametrize("policy", ["linear", "native", "explicit"])
def test_a_node_that_sees_nothing_starts_at_zero(policy):
    assert lay_out(policy, context(), STARTS.__getitem__) == Layout(policy, (), 0, 0)


def test_a_reference_that_places_nothing_adds_nothing():
    layout = lay_out("explicit", context(Inherit("empty", start=50)), STARTS.__getitem__)
    assert layout == Layout("explicit", (), 0, 0)


def test_explicit_allows_overlap_and_gaps():
    layout = lay_out("explicit", context(Inherit("a", start=7), Inherit("b", start=8)), STARTS.__getitem__)
    assert layout.segments == (Segment("a", 0, 3, 7, 7), Segment("b", 0, 4, 8, 4))
    assert layout.own_start == 12


def test_explicit_joins_runs_of_one_delta_across_references():
    references = (Artifact("b", (0, 2), start=10), Artifact("b", (2, 4), start=12))
    layout = lay_out("explicit", context(*references), STARTS.__getitem__)
    assert layout.segments == (Segment("b", 0, 4, 10, 6),)


def test_explicit_own_start_may_leave_room():
    layout = lay_out("explicit", context(Inherit("a", start=2)), STARTS.__getitem__, {"own_start": 100})
    assert layout.own_start == 100


def test_explicit_own_start_holds_without_context():
    assert lay_out("explicit", context(), STARTS.__getitem__, {"own_start": 6}).own_start == 6


def test_explicit_refuses_an_own_start_that_a_token_reaches():
    assert refusal("explicit", [Inherit("a", start=2)], {"own_start": 4}) == (
        "policy_unsupported",
        "own_start",
    )


@pytest.mark.parametrize("value", [True, -1, 1.0, math.nan, "7", 10**400, POSITION_LIMIT])
def test_explicit_refuses_an_own_start_that_is_no_position(value):
    assert refusal("explicit", [], {"own_start": value}) == ("policy_unsupported", "own_start")


def test_explicit_refuses_a_missing_start_even_where_nothing_is_placed():
    references = [Inherit("a", start=0), Inherit("empty")]
    assert refusal("explicit", references) == ("policy_unsupported", "context[1].start")


def test_explicit_refuses_a_huge_start():
    assert refusal("explicit", [Inherit("a", start=10**400)]) == (
        "policy_unsupported",
        "context[0].start",
    )


def test_positions_beyond_the_limit_overflow():
    assert refusal("explicit", [Inherit("a", start=POSITION_LIMIT - 1)]) == ("position_overflow", None)


@pytest.mark.parametrize("policy", ["linear", "native"])
def test_a_start_is_refused_where_it_would_be_ignored(policy):
    assert refusal(policy, [Inherit("a"), Inherit("b", start=0)]) == (
        "policy_unsupported",
        "context[1].start",
    )


@pytest.mark.parametrize("policy", ["linear", "native", "explicit"])
def test_unknown_options_are_refused(policy):
    assert refusal(policy, [], {"own_strat": 3}) == ("policy_unsupported", "own_strat")


def test_an_unknown_option_suggests_the_close_one():
    with pytest.raises(PositionError, match="did you mean 'own_start'"):
        lay_out("explicit", context(), STARTS.__getitem__, {"own_strat": 3})


def test_an_unknown_policy_suggests_the_close_one():
    with pytest.raises(PositionError, match="did you mean 'linear'") as caught:
        lay_out("liner", context(), STARTS.__getitem__)
    assert caught.value.code == "policy_unsupported"


GOOD = Layout("mine", (Segment("a", 0, 3, 5, 5), Segment("b", 0, 4, 0, -4)), 8, 7)


def test_a_correct_layout_passes():
    check_layout(GOOD, context(Inherit("a"), Inherit("b")), STARTS.__getitem__)


def test_a_layout_may_cut_a_run_where_the_delta_changes():
    cut = (Segment("a", 0, 1, 5, 5), Segment("a", 1, 3, 0, -1), GOOD.segments[1])
    check_layout(replace(GOOD, segments=cut), context(Inherit("a"), Inherit("b")), STARTS.__getitem__)


A, B = GOOD.segments


@pytest.mark.parametrize(
    "change",
    [
        {"segments": (A,)},
        {"segments": ()},
        {"segments": (B, A)},
        {"segments": (A, A, B)},
        {"segments": (A, B, B)},
        {"segments": (A, Segment("b", 0, 3, 0, -4))},
        {"segments": (A, Segment("b", 1, 4, 1, -4))},
        {"segments": (A, Segment("b", 0, 5, 0, -4))},
        {"segments": (A, Segment("b", 0, 0, 0, -4), B)},
        {"segments": (A, Segment("b", 0, 2, 0, -4), Segment("b", 2, 4, 2, -4))},
        {"segments": (A, B._replace(delta=-3))},
        {"segments": (A, Segment("b", 0, 4, -1, -5))},
        {"own_start": 7},
        {"own_start": -1},
        {"num_visible": 6},
    ],
)
def test_a_wrong_layout_is_caught(change):
    layout = replace(GOOD, **change)

    class Mine:
        name = "mine"

        def lay_out(self, context, stored_start, options):
            return layout

    with pytest.raises(PositionError) as caught:
        lay_out(Mine(), context(Inherit("a"), Inherit("b")), STARTS.__getitem__)
    assert caught.value.code == "plugin_broken"


def test_a_policy_that_returns_no_layout_is_caught():
    class Mine:
        name = "mine"

        def lay_out(self, context, stored_start, options):
            return None

    with pytest.raises(PositionError, match="returned no Layout") as caught:
        lay_out(Mine(), context(), STARTS.__getitem__)
    assert caught.value.code == "plugin_broken"
