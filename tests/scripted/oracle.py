"""What every node of a run has to be, from the definition alone.

Visible tokens come from core-graph's brute-force definition; view positions from a walk over single tokens
that is written here; tokens from the scripted model's formula over those. Knows no pages, segments, batches
or caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from scripted_model import MAX_POSITIONS, fold, mix, pick

from dagengine.request import ContextRef, Request
from dagengine_core_graph import ContextGraph, NodeSpans, definition, make_reference

Instance = tuple["OracleNode", int]


@dataclass(eq=False)
class OracleNode:
    """A sealed node.

    Attributes:
        tokens, facts: its tokens and what layer 0 made of each.
        sources: nodes that computing it again needs, recursively; itself included.
        shown: visible instances with their view positions.
    """

    name: str
    tokens: list[int]
    own_start: int
    facts: NDArray[np.int64]
    shown: tuple[tuple[OracleNode, int, int], ...]
    passes: frozenset[OracleNode] = frozenset()
    sources: frozenset[OracleNode] = frozenset()


@dataclass(frozen=True)
class View:
    """What a request sees before its first own token."""

    shown: tuple[tuple[OracleNode, int, int], ...]
    own_start: int


@dataclass
class Oracle:
    """All nodes of one graph, by a name of ours."""

    page_size: int
    num_pages: int
    graph: ContextGraph = field(default_factory=ContextGraph)
    nodes: dict[str, OracleNode] = field(default_factory=dict)

    def references(
        self, request: Request, parents: Sequence[OracleNode], ats: Sequence[int | None]
    ) -> list[object]:
        return [
            make_reference(parent.name, ref.mode, ref.span, at, ref.start)
            for ref, parent, at in zip(request.context, parents, ats, strict=True)
        ]

    def view(self, request: Request, parents: Sequence[OracleNode], ats: Sequence[int | None]) -> View:
        """Lay the visible tokens out one by one."""
        parts = definition.parts(self.graph, self.references(request, parents, ats))  # type: ignore[arg-type]
        shown: list[tuple[OracleNode, int, int]] = []
        for ref, part in zip(request.context, parts, strict=True):
            for index, (graph_node, offset) in enumerate(part):
                node = self.nodes[str(graph_node.id)]
                if request.position == "linear":
                    position = len(shown)
                elif request.position == "native":
                    position = node.own_start + offset
                else:
                    assert ref.start is not None
                    position = ref.start + index
                shown.append((node, offset, position))
        own_start = max((position for _, _, position in shown), default=-1) + 1
        wanted = request.position_options.get("own_start")
        return View(tuple(shown), own_start if wanted is None else int(wanted))  # type: ignore[call-overload]

    def refusal(self, request: Request, view: View) -> str | None:
        """The code that the request has to be refused with because of its size, if any."""
        asked = request.sampling.max_tokens or 0 if request.sampling else 0
        own = len(request.input_ids) + asked
        if view.own_start + own > MAX_POSITIONS:
            return "position_overflow"
        pages = {(node, offset // self.page_size) for node, offset, _ in view.shown}
        if len(pages) + self.pages(own) > self.num_pages:
            return "capacity"
        return None

    def most_pages(self, request: Request, view: View, pinned: Sequence[OracleNode]) -> int:
        """An upper bound of the pages that computing the request can need at once, everything evicted."""
        needed: set[OracleNode] = set()
        for node in {node for node, _, _ in view.shown}:
            needed |= node.sources
        for node in pinned:
            needed |= node.passes
        asked = request.sampling.max_tokens or 0 if request.sampling else 0
        return sum(self.pages(len(node.tokens)) for node in needed) + self.pages(
            len(request.input_ids) + asked
        )

    def pages(self, tokens: int) -> int:
        return -(-tokens // self.page_size)

    def check_tokens(self, request: Request, view: View, own: Sequence[int]) -> NDArray[np.int64]:
        """Whether every sampled token of `own` follows from what came before; returns layer 0's facts.

        Raises AssertionError naming the first token that does not.
        """
        tokens = np.array([node.tokens[offset] for node, offset, _ in view.shown] + list(own), np.int64)
        views = np.array(
            [position for _, _, position in view.shown] + [view.own_start + i for i in range(len(own))],
            np.int64,
        )
        queries = views[len(view.shown) :]
        relative = views[None, :] - queries[:, None]
        seen = np.concatenate(
            [
                np.ones((len(own), len(view.shown)), bool),
                np.tril(np.ones((len(own), len(own)), bool)),
            ],
            axis=1,
        )
        facts = fold(np.where(seen, mix(tokens, 0, relative), np.uint64(0)))
        all_facts = np.concatenate([[node.facts[offset] for node, offset, _ in view.shown], facts]).astype(
            np.int64
        )
        first, second = pick(fold(np.where(seen, mix(tokens, all_facts, relative), np.uint64(0))), queries)
        greedy = request.sampling is None or request.sampling.temperature == 0.0
        for index in range(len(request.input_ids) - 1, len(own) - 1):
            allowed = [int(first[index])] if greedy else [int(first[index]), int(second[index])]
            assert own[index + 1] in allowed, (
                f"token {index + 1} of {len(own)} is {own[index + 1]}, the definition says {allowed}"
            )
        return facts

    def add(
        self,
        name: str,
        request: Request,
        parents: Sequence[OracleNode],
        ats: Sequence[int | None],
        view: View,
        own: Sequence[int],
        returned: int,
    ) -> OracleNode:
        """The node that a finished answer became."""
        begin, end = len(request.input_ids), len(own)
        facts = self.check_tokens(request, view, own)
        self.graph.add(name, self.references(request, parents, ats))  # type: ignore[arg-type]
        self.graph.extend(name, end)
        self.graph.seal(
            name,
            NodeSpans(
                prompt=(0, begin),
                output=(begin, begin + returned) if request.sampling else None,
                turn=None if request.turn_start is None else (request.turn_start, end),
            ),
        )
        node = self.nodes[name] = OracleNode(name, list(own), view.own_start, facts, view.shown)
        sources = {node}
        for source in {source for source, _, _ in view.shown}:
            sources |= source.sources
        passes = {node} | {self.nodes[str(found.id)] for found, _ in definition.passed(self.graph, name)}
        node.sources, node.passes = frozenset(sources), frozenset(passes)
        return node


def reference_cut(ref: ContextRef, handle_at: int, length: int) -> int | None:
    """Where a reference through a handle on the first `handle_at` tokens cuts its node; None for nowhere."""
    at = handle_at if ref.at is None else ref.at
    return at if at < length else None
