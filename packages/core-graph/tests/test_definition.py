"""The compiler against the definition over random graphs, and the law that ties both kinds of artifact."""

import random

from dagengine_core_graph import (
    Artifact,
    ContextGraph,
    Digest,
    Inherit,
    Node,
    NodeSpans,
    Reference,
    compile_context,
    definition,
    passed,
    visible,
)

GRAPHS = 2500


def random_spans(rng: random.Random, length: int) -> NodeSpans:
    def within() -> tuple[int, int]:
        start, stop = sorted(rng.randint(0, length) for _ in range(2))
        return start, stop

    return NodeSpans(*(within() if rng.random() < 0.5 else None for _ in range(3)))


def random_references(rng: random.Random, nodes: list[Node]) -> list[Reference]:
    """Up to six references to any of the nodes, with forks, spans, duplicates; inherit and digest unmixed."""
    whole = rng.choice((Inherit, Inherit, Digest))
    references: list[Reference] = []
    for _ in range(rng.choice((0, 1, 1, 2, 2, 3, 6)) if nodes else 0):
        parent = rng.choice(nodes if rng.random() < 0.5 else nodes[-3:])
        at = rng.randint(0, parent.length) if rng.random() < 0.25 else None
        if rng.random() < 0.55:
            references.append(whole(parent.id, at=at))
            continue
        start, stop = sorted(rng.randint(0, parent.length) for _ in range(2))
        names = [None, "prompt", "output", "all", (start, stop), (start, stop)]
        if parent.spans.turn:
            names.append("turn")
        references.append(Artifact(parent.id, rng.choice(names), at=at))
    if references and rng.random() < 0.2:
        references.append(rng.choice(references))
    return references


def random_graph(rng: random.Random) -> tuple[ContextGraph, list[Node]]:
    """A graph and its nodes; sometimes a name is dropped, and sometimes used again."""
    graph = ContextGraph()
    added: list[Node] = []
    for index in range(rng.randint(1, 11)):
        name = index
        dropped = [node.id for node in added if node.id not in graph]
        if dropped and rng.random() < 0.5:
            name = rng.choice(dropped)
        node = graph.add(
            name, random_references(rng, list(graph.nodes())), length=rng.choice((0, 1, 2, 3, 5, 8, 13))
        )
        graph.extend(name, rng.randint(0, 2))
        graph.seal(name, random_spans(rng, node.length))
        added.append(node)
        if rng.random() < 0.08:
            graph.drop(rng.choice(graph.nodes()).id)
    return graph, added


def test_what_is_compiled_is_what_the_definition_says() -> None:
    for seed in range(GRAPHS):
        rng = random.Random(seed)
        graph, _ = random_graph(rng)
        for node in graph.nodes():
            tokens = definition.visible(graph, node.id)
            context = visible(graph, node.id)
            assert context.ranges == definition.runs(tokens), seed
            assert context.num_tokens == len(tokens), seed
            assert tuple(passed(graph, node.id)) == definition.runs(definition.passed(graph, node.id)), seed
            assert passed(graph, node.id).num_tokens == len(definition.passed(graph, node.id)), seed
        references = random_references(rng, list(graph.nodes()))
        parts = compile_context(graph, references).parts
        assert [reference for reference, _ in parts] == references, seed
        assert [runs for _, runs in parts] == [
            definition.runs(part) for part in definition.parts(graph, references)
        ], seed


def test_start_never_changes_what_is_seen() -> None:
    for seed in range(200):
        rng = random.Random(seed)
        graph, _ = random_graph(rng)
        references = random_references(rng, list(graph.nodes()))
        started = [
            Artifact(r.node, r.span, r.at, 7) if isinstance(r, Artifact) else type(r)(r.node, r.at, 7)
            for r in references
        ]
        assert compile_context(graph, started).ranges == compile_context(graph, references).ranges


def seen_as_in(graph: ContextGraph, reference: Reference, u: Node, pieces: dict[Node, int]) -> set[object]:
    """The tokens that a reference reads, those of u's pieces (each with its offset in u) as tokens of u."""
    offset_of = {piece.id: offset for piece, offset in pieces.items()}
    return {
        (u.id, offset_of[run.node] + offset) if run.node in offset_of else (run.node, offset)
        for run in compile_context(graph, [reference]).ranges
        for offset in range(run.start, run.stop)
    }


def test_splitting_a_node_at_a_span_shows_that_the_two_artifacts_are_one() -> None:
    """Split u into p, m and l: p reads what u does, m digests p, l inherits p and m.

    u   |  p  |   m   |  l  |       inherit(m) sees what artifact(u, span) shows
        0   start   stop             inherit(l) sees what inherit(u) shows
    """
    checked = 0
    for seed in range(1500):
        rng = random.Random(seed)
        graph, _ = random_graph(rng)
        for u in graph.nodes():
            digests = any(isinstance(reference, Digest) for reference in u.context)
            if digests or any(parent not in graph.nodes() for parent in u.parents):
                continue
            start, stop = sorted(rng.randint(0, u.length) for _ in range(2))
            p = graph.add(("p", u.id), u.context, length=start, sealed=True)
            m = graph.add(("m", u.id), [Digest(p.id)], length=stop - start, sealed=True)
            rest = graph.add(("l", u.id), [Inherit(p.id), Inherit(m.id)], length=u.length - stop, sealed=True)
            pieces = {p: 0, m: start, rest: stop}
            artifact = seen_as_in(graph, Artifact(u.id, (start, stop)), u, {})
            assert seen_as_in(graph, Inherit(m.id), u, pieces) == artifact, seed
            whole = seen_as_in(graph, Inherit(u.id), u, {})
            assert seen_as_in(graph, Inherit(rest.id), u, pieces) == whole, seed
            checked += 1
    assert checked > 3000
