"""How contexts are shared: what is compiled once stays, and only what is new costs anything."""

import gc
import random
import sys
from collections.abc import Callable
from itertools import pairwise
from types import FrameType

import pytest

from dagengine_core_graph import (
    Artifact,
    ContextGraph,
    Digest,
    Inherit,
    TokenRange,
    compile_context,
    passed,
    visible,
)
from dagengine_core_graph.ranges import RangeList, claim


def lines_run(work: Callable[[], object]) -> int:
    """Lines of this package that run: a measure of work that does not depend on the machine."""
    lines = 0

    def trace(frame: FrameType, event: str, _: object) -> object:
        nonlocal lines
        if "dagengine_core_graph" not in frame.f_code.co_filename:
            return None
        lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def chain(graph: ContextGraph, length: int) -> None:
    for index in range(length):
        graph.add(index, [Inherit(index - 1)] if index else [], length=2, sealed=True)
        assert visible(graph, index).num_tokens == passed(graph, index).num_tokens == 2 * index


def chain_with_documents(graph: ContextGraph, length: int) -> None:
    for index in range(length):
        graph.add(("doc", index), length=3, sealed=True)
        references = [Inherit(index - 1), Inherit(("doc", index))] if index else []
        graph.add(index, references, length=2, sealed=True)


def chain_of_diamonds(graph: ContextGraph, length: int) -> None:
    for index in range(length):
        graph.add(
            index, [Inherit(("l", index)), Inherit(("r", index))] if index else [], sealed=True, length=1
        )
        for side in "lr":
            graph.add((side, index + 1), [Inherit(index)], length=2, sealed=True)


def siblings_after_a_document(graph: ContextGraph, length: int) -> None:
    chain(graph, length)
    graph.add("doc", length=3, sealed=True)
    for index in range(length):
        graph.add(("leaf", index), [Inherit(length - 1)], length=2, sealed=True)
    leaves = [Inherit(("leaf", index)) for index in range(length)]
    assert compile_context(graph, leaves).num_tokens == 4 * length
    assert compile_context(graph, [Inherit("doc"), *leaves]).num_tokens == 4 * length + 3


@pytest.mark.parametrize("shape", [chain, chain_with_documents, chain_of_diamonds, siblings_after_a_document])
def test_growing_a_graph_is_linear_in_its_nodes(shape: Callable[[ContextGraph, int], None]) -> None:
    small, large = (lines_run(lambda length=n: shape(ContextGraph(), length)) for n in (400, 1600))
    assert large < 4.2 * small


def test_a_chain_of_10_000_nodes_is_compiled_from_shared_prefixes() -> None:
    graph = ContextGraph()
    chain(graph, 10_000)
    for index in range(1, 10_000):
        assert passed(graph, index).prefix is passed(graph, index - 1)
        assert passed(graph, index) is visible(graph, index).placed
    assert len(visible(graph, 9_999).ranges) == 9_999
    assert sum(run.stop - run.start for run in passed(graph, 9_999)) == 19_998


def test_depth_needs_no_recursion_to_build_read_or_collect() -> None:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(200)
    try:
        graph = ContextGraph()
        chain(graph, 50_000)
        list(passed(graph, 49_999))
        del graph
        gc.collect()
    finally:
        sys.setrecursionlimit(limit)


def test_many_references_cost_linear_work() -> None:
    def work(count: int) -> int:
        graph = ContextGraph()
        graph.add("long", length=20 * count, sealed=True)
        for index in range(count):
            graph.add(index, length=10, sealed=True)
        spans = [Artifact("long", (20 * i, 20 * i + 10)) for i in range(count)]
        random.Random(0).shuffle(spans)
        nodes = [Inherit(i) for i in range(count)]
        random.Random(1).shuffle(nodes)
        return lines_run(lambda: compile_context(graph, spans + nodes))

    assert work(1200) < 4.3 * work(300)


def test_parts_skip_what_earlier_references_placed() -> None:
    graph = ContextGraph()
    graph.add("s", length=2, sealed=True)
    graph.add("u", [Inherit("s")], length=8, sealed=True)
    context = compile_context(graph, [Artifact("u", (3, 6)), Inherit("u"), Inherit("u")])
    assert [ranges for _, ranges in context.parts] == [
        (TokenRange("u", 3, 6),),
        (TokenRange("s", 0, 2), TokenRange("u", 0, 3), TokenRange("u", 6, 8)),
        (),
    ]
    assert context.num_tokens == 10


def test_adjacent_spans_are_one_run_but_two_parts() -> None:
    graph = ContextGraph()
    graph.add("u", length=6, sealed=True)
    context = compile_context(graph, [Artifact("u", (0, 3)), Artifact("u", (3, 6))])
    assert context.ranges == (TokenRange("u", 0, 6),)
    assert [ranges for _, ranges in context.parts] == [(TokenRange("u", 0, 3),), (TokenRange("u", 3, 6),)]


def test_no_references_see_nothing() -> None:
    context = compile_context(ContextGraph(), [])
    assert (context.parts, context.ranges, context.num_tokens) == ((), (), 0)


def test_passing_order_ignores_what_was_digested() -> None:
    graph = ContextGraph()
    for node in "ab":
        graph.add(node, length=4, sealed=True)
    graph.add("v", [Digest("a"), Artifact("b", (0, 2)), Artifact("a", (0, 2))], length=1, sealed=True)
    assert visible(graph, "v").ranges == (TokenRange("a", 0, 4), TokenRange("b", 0, 2))
    assert tuple(passed(graph, "v")) == (TokenRange("b", 0, 2), TokenRange("a", 0, 2))


def test_extending_a_list_leaves_the_shorter_one_as_it_was() -> None:
    graph = ContextGraph()
    node = graph.add("u", length=9, sealed=True)
    short = RangeList().extend(node, 0, 2)
    long = short.extend(node, 2, 4).extend(node, 5, 9)
    other = short.extend(node, 7, 8)
    assert tuple(short) == (TokenRange("u", 0, 2),)
    assert tuple(long) == (TokenRange("u", 0, 4), TokenRange("u", 5, 9))
    assert tuple(other) == (TokenRange("u", 0, 2), TokenRange("u", 7, 8))
    assert (short.num_tokens, long.num_tokens, other.num_tokens) == (2, 8, 3)
    assert long.since(short) == (TokenRange("u", 2, 4), TokenRange("u", 5, 9))


def test_claiming_offsets_is_set_union() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        bounds: list[int] = []
        held: set[int] = set()
        for _ in range(12):
            start = rng.randint(0, 20)
            stop = rng.randint(start + 1, 22)
            new = claim(bounds, start, stop)
            offsets = [offset for a, b in new for offset in range(a, b)]
            assert offsets == sorted(set(range(start, stop)) - held)
            held |= set(range(start, stop))
            runs = list(zip(bounds[::2], bounds[1::2], strict=True))
            assert {offset for a, b in runs for offset in range(a, b)} == held
            assert all(stop < start for (_, stop), (start, _) in pairwise(runs))
