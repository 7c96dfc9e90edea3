"""The graph cases that kernels are measured and planned on: batches whose sequences see the same pages in many ways.

Knows integers only. Every case is one decode step: a sequence's one row is its last own token. Documents, branches
and artifacts were produced at one place and are seen at another, so each has a delta of its own in each sequence.

    same-order    32 children see the same 32 documents of 2857 tokens in the same order
    own-order     as before, but each child sees them in its own random order
    subsets       each of 32 children sees 16 random ones of the 32 documents
    judges        16 judges see a root of 8192 tokens and 4 random ones of its 8 branches of 1024
    artifacts     24 children see a root of 32768 tokens and 24 artifacts of 300
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.spans import SequenceSpans, SpanTable

DOCUMENT = 2857


@dataclass(frozen=True, eq=False)
class Node:
    """Tokens of a graph in pages of their own, the first stored at position `stored`."""

    pages: tuple[int, ...]
    tokens: int
    stored: int


@dataclass
class GraphBuilder:
    """Makes nodes in pages that are anywhere, and batches that see them.

    Attributes:
        page_size: tokens per page.
        own: tokens of each sequence that only it sees, its row being the last.
        rng: what is random in a case, page numbers included.
    """

    page_size: int
    own: int
    rng: random.Random
    _nodes: list[tuple[int, int]] = field(default_factory=list)

    def node(self, tokens: int, stored: int = 0) -> int:
        """A new node; returns its number."""
        self._nodes.append((tokens, stored))
        return len(self._nodes) - 1

    def batch(self, contexts: Sequence[Sequence[int]]) -> SpanTable:
        """One decode step of sequences that see these nodes, in this order, and then their own tokens."""
        ends = [sum(self._nodes[number][0] for number in context) for context in contexts]
        tails = [self.node(self.own, end) for end in ends]
        nodes = self._place()
        sequences = []
        for context, tail, end in zip(contexts, tails, ends, strict=True):
            spans, view = [], 0
            for number in (*context, tail):
                node = nodes[number]
                if node.tokens:
                    spans.append((node.pages, 0, node.tokens, node.stored, view - node.stored))
                view += node.tokens
            sequences.append(SequenceSpans(max(end + self.own - 1, 0), 1, spans))
        return SpanTable.from_sequences(sequences, page_size=self.page_size)

    def _place(self) -> list[Node]:
        counts = [-(-tokens // self.page_size) for tokens, _ in self._nodes]
        free = list(range(sum(counts)))
        self.rng.shuffle(free)
        nodes = []
        for (tokens, stored), count in zip(self._nodes, counts, strict=True):
            nodes.append(Node(tuple(free[:count]), tokens, stored))
            del free[:count]
        return nodes


def same_order(build: GraphBuilder) -> SpanTable:
    documents = [build.node(DOCUMENT) for _ in range(32)]
    return build.batch([documents] * 32)


def own_order(build: GraphBuilder) -> SpanTable:
    documents = [build.node(DOCUMENT) for _ in range(32)]
    return build.batch([build.rng.sample(documents, 32) for _ in range(32)])


def subsets(build: GraphBuilder) -> SpanTable:
    documents = [build.node(DOCUMENT) for _ in range(32)]
    return build.batch([build.rng.sample(documents, 16) for _ in range(32)])


def judges(build: GraphBuilder) -> SpanTable:
    root = build.node(8192)
    branches = [build.node(1024, stored=8192) for _ in range(8)]
    return build.batch([[root, *sorted(build.rng.sample(branches, 4))] for _ in range(16)])


def artifacts(build: GraphBuilder) -> SpanTable:
    root = build.node(32768)
    made = [build.node(300, stored=32768) for _ in range(24)]
    return build.batch([[root, *made]] * 24)


GRAPH_CASES: dict[str, Callable[[GraphBuilder], SpanTable]] = {
    "same-order": same_order,
    "own-order": own_order,
    "subsets": subsets,
    "judges": judges,
    "artifacts": artifacts,
}


def graph_case(name: str, *, page_size: int = 64, own: int = 256, seed: int = 0) -> SpanTable:
    """The batch of a case; `SpanTable.to_segments` gives it as a SegmentTable.

    Args:
        name: a key of GRAPH_CASES.
        page_size: tokens per page; the pages of the batch are 0 .. n-1 in random order.
        own: tokens that only one sequence sees, at its end.
        seed: of what is random.
    Raises:
        KernelError: invalid_argument for an unknown name.
    """
    if name not in GRAPH_CASES:
        raise KernelError(INVALID_ARGUMENT, f"must be one of {', '.join(GRAPH_CASES)}, not {name!r}", "name")
    return GRAPH_CASES[name](GraphBuilder(page_size, own, random.Random(seed)))
