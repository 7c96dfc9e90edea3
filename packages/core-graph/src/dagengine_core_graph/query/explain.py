"""What would be done with a query, before anything runs: trees, graph, layout, reuse. As data and as text."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from ..compile import visible
from ..context import Artifact, Reference
from ..fields import Json
from ..render import mermaid
from .expressions import FindFragments, Query
from .lower import lower
from .lowered import LoweredQuery, Order, QueryNode
from .plan import MAX_NODES, Plan, plan
from .pretty import pretty, quoted
from .wire import dump_query

WIDEST = 12


@dataclass(frozen=True)
class Segment:
    """A run of what a node sees: another node's own tokens, all of them or its turn. Its length is that many tokens."""

    node: str
    span: str

    @property
    def length(self) -> str:
        """The length as a symbol: `|n3|`, `|n4.turn|`."""
        return f"|{self.node}|" if self.span == "all" else f"|{self.node}.{self.span}|"


@dataclass(frozen=True)
class Explanation:
    """A plan and its lowering, to be looked at.

    Attributes:
        layouts: per node that reads any, in order, what it sees. Under the policy `linear` each segment starts
            where the one before it ends, the first at 0, and the node's own input behind the last.
    """

    plan: Plan
    lowered: LoweredQuery
    layouts: tuple[tuple[str, tuple[Segment, ...]], ...]

    def data(self) -> dict[str, Json]:
        """JSON: `steps`, `reductions`, `notes`, `nodes`, `layouts`, `reuse`, `graph` (Mermaid)."""
        lowered = self.lowered
        return {
            "query": dump_query(self.plan.source)["query"],
            "exact": self.plan.exact,
            "steps": [
                {"rule": step.rule, "query": dump_query(step.query)["query"]} for step in self.plan.steps
            ],
            "reductions": [
                {
                    "path": found.path,
                    "width": found.width,
                    "arity": found.arity,
                    "calls_added": found.calls_added,
                    "rounds": found.rounds,
                }
                for found in self.plan.reductions
            ],
            "notes": list(self.plan.notes),
            "nodes": [_node(node) for node in lowered.nodes],
            "answers": list(lowered.answers),
            "layouts": [
                {
                    "node": node,
                    "segments": [{"node": part.node, "span": part.span} for part in segments],
                    "own_start": _sum(segments),
                }
                for node, segments in self.layouts
            ],
            "reuse": self.reuse(),
            "graph": mermaid(lowered.picture()),
        }

    def text(self) -> str:
        """The same for people."""
        plan, lowered = self.plan, self.lowered
        blocks = [("query", pretty(plan.source, widest=WIDEST))]
        blocks += [(f"after {step.rule}", pretty(step.query, widest=WIDEST)) for step in plan.steps]
        blocks += [
            (
                f"reduced {found.path}",
                f"{found.width} candidates, {found.arity} a call: {found.calls_added} calls more, "
                f"{found.rounds} rounds; not the same question\n",
            )
            for found in plan.reductions
        ]
        blocks += [("note", f"{quoted(text)}\n") for text in plan.notes]
        blocks.append(("nodes", "".join(f"{_line(node)}\n" for node in lowered.nodes)))
        blocks.append(("graph", mermaid(lowered.picture())))
        blocks.append(("layout (linear)", "".join(map(_layout, self.layouts))))
        counts = self.reuse()
        blocks.append(
            (
                "reuse",
                f"{counts['nodes']} nodes, {counts['calls']} of them calls\n"
                f"{counts['equal_inputs']} with an input that another has computed\n"
                f"{counts['left_out']} preparations left out: another node computes the same\n"
                f"{counts['read_more_than_once']} read more than once\n",
            )
        )
        indented = ("\n".join(f"  {line}" for line in body.splitlines()) for _, body in blocks)
        return "\n".join(f"{title}\n{body}" for (title, _), body in zip(blocks, indented, strict=True)) + "\n"

    def reuse(self) -> dict[str, Json]:
        """Counts of nodes, and of work that is done once."""
        nodes = self.lowered.nodes
        return {
            "nodes": len(nodes),
            "calls": sum(node.generate is not None for node in nodes),
            "equal_inputs": sum(node.reuses is not None for node in nodes),
            "left_out": self.lowered.left_out,
            "read_more_than_once": sum(count > 1 for count in self.readers().values()),
        }

    def readers(self) -> Counter[str]:
        """How many nodes see each node."""
        return Counter(name for _, segments in self.layouts for name in {part.node for part in segments})


def explain(
    query: Query,
    *,
    retriever: FindFragments | None = None,
    reduce: int | None = None,
    max_nodes: int = MAX_NODES,
) -> Explanation:
    """Plan and lower a query, and say what came of it. Takes and raises what `plan` does."""
    planned = plan(query, retriever=retriever, reduce=reduce, max_nodes=max_nodes)
    lowered = lower(planned)
    graph = lowered.graph()
    calls = {node.id for node in lowered.nodes if node.generate is not None}
    layouts = tuple(
        (
            node.id,
            tuple(
                Segment(str(run.node), "turn" if run.node in calls else "all")
                for run in visible(graph, node.id).ranges
            ),
        )
        for node in lowered.nodes
        if node.context
    )
    return Explanation(planned, lowered, layouts)


def _sum(segments: tuple[Segment, ...]) -> str:
    return " + ".join(part.length for part in segments) or "0"


def _layout(layout: tuple[str, tuple[Segment, ...]]) -> str:
    node, segments = layout
    starts = ["0", *(f"+{part.length}" for part in segments)]
    shown = segments if len(segments) <= WIDEST else segments[:WIDEST]
    words = [
        f"{start} {part.node}{'' if part.span == 'all' else '.' + part.span}"
        for start, part in zip(starts, shown, strict=False)
    ]
    if len(shown) < len(segments):
        words.append(f"… {len(segments) - len(shown)} more")
    return f"{node}: {', '.join(words)}, {starts[-1]} {node}\n"


def _line(node: QueryNode) -> str:
    words = [node.id, " ".join(f"{part.role} {quoted(part.text)}" for part in node.parts)]
    if node.generate is not None:
        words.append("generate")
    if node.reuses is not None:
        words.append(f"as {node.reuses}")
    return " ".join(word for word in [*words, f"({node.path})"] if word)


def _node(node: QueryNode) -> dict[str, Json]:
    return {
        "id": node.id,
        "path": node.path,
        "messages": list(node.messages),
        "context": [{"node": str(found.node), "mode": found.mode, **_span(found)} for found in node.context],
        "order": _order(node.order),
        "generate": node.sampling(None),
        "model": None if node.generate is None else node.generate.model,
        "continues": node.continues,
        "sample": node.sample,
        "reuses": node.reuses,
    }


def _span(reference: Reference) -> dict[str, Json]:
    return {"span": "turn"} if isinstance(reference, Artifact) else {}


def _order(order: Order) -> list[Json]:
    return [
        item if isinstance(item, int) else {"plus": [_order(group) for group in item.groups]}
        for item in order
    ]
