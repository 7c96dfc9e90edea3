"""What requests would see, where, and at what cost, without running the model.

Runs on the engine's thread against its real states; nodes that refer to each other are laid out as if each sampled
as many tokens as it may.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dagengine_core_graph import NodeSpans

from .core import EngineCore
from .errors import DagError, as_dag_error
from .prepare import PlannedNode, Prepared
from .request import Request, check_parent

RangeRow = tuple[str, int, int]
SegmentRow = tuple[str, int, int, int, int]


@dataclass(frozen=True)
class Explanation:
    """One request, explained.

    Attributes:
        visible, passed: maximal runs (node, start, stop), in order; a node is named by a state id that the caller
            may use, by its request's id, or as `node:<number>` where it has no name.
        segments: maximal runs of constant delta (node, start, stop, view start, delta).
        reused: tokens whose KV is there already; of the own input only where all that it reads exists.
        num_pages: pages that must be resident at once.
        planned_tokens: own tokens that are counted on, most of them yet to be sampled.
        error: the refusal, if there is one; the rest is then empty.
    """

    request_id: str
    visible: tuple[RangeRow, ...] = ()
    passed: tuple[RangeRow, ...] = ()
    segments: tuple[SegmentRow, ...] = ()
    policy: str = ""
    own_start: int = 0
    num_visible: int = 0
    num_input: int = 0
    planned_tokens: int = 0
    reused: int = 0
    num_pages: int = 0
    compile_ms: float = 0.0
    layout_ms: float = 0.0
    error: DagError | None = None


def explain(core: EngineCore, requests: Sequence[Request], salt: str = "") -> list[Explanation]:
    """Explain requests that may refer to states and to earlier requests of the list. Changes nothing.

    A request that is refused is explained by its error; those that read it by `parent_failed`.
    """
    names = {info.node: info.id for info in reversed(core.store.states(salt=salt))}
    planned: dict[str, PlannedNode] = {}
    earlier: dict[str, Request] = {}
    result: list[Explanation] = []
    try:
        for request in requests:
            try:
                result.append(_explain_one(core, request, planned, names, earlier))
                earlier[request.id] = request
            except DagError as error:
                result.append(Explanation(request.id, error=error))
    finally:
        for node in planned.values():
            core.preparer.unplan(node)
    return result


def _explain_one(
    core: EngineCore,
    request: Request,
    planned: dict[str, PlannedNode],
    names: Mapping[int, str],
    earlier: Mapping[str, Request],
) -> Explanation:
    for ref in request.context:
        if ref.request is not None and ref.request not in planned:
            raise DagError("parent_failed", f"{ref.request!r}, which it reads, is refused", "context")
    core.check(request)
    for index, ref in enumerate(request.context):
        if ref.request is not None:
            check_parent(ref.request, earlier, f"context[{index}].request")
    refs = [
        core.preparer.resolve(ref, index, request.salt)
        if ref.request is None
        else core.preparer.resolve_planned(planned[ref.request], ref)
        for index, ref in enumerate(request.context)
    ]
    prepared = core.preparer.prepare(request, refs)
    own = len(request.input_ids) + prepared.max_tokens
    node = core.preparer.plan(prepared, request.id, own, _spans(request, own))
    planned[request.id] = node

    def name(uid: object) -> str:
        return names.get(uid, f"node:{uid}") if isinstance(uid, int) else uid[0]  # type: ignore[index]

    real = all(ref.request is None for ref in request.context)
    graph_node = core.preparer.graph.node(node.uid)
    return Explanation(
        request_id=request.id,
        visible=tuple((name(r.node), r.start, r.stop) for r in prepared.context.ranges),
        passed=tuple((name(r.node), r.start, r.stop) for r in graph_node.passed),
        segments=tuple(
            (name(s.node), s.start, s.stop, s.view_start, s.delta) for s in prepared.layout.segments
        ),
        policy=request.position,
        own_start=prepared.layout.own_start,
        num_visible=prepared.layout.num_visible,
        num_input=len(request.input_ids),
        planned_tokens=own,
        reused=_reused(core, request, prepared) if real else 0,
        num_pages=prepared.num_pages,
        compile_ms=prepared.compile_ms,
        layout_ms=prepared.layout_ms,
    )


def _spans(request: Request, own: int) -> NodeSpans:
    begin = len(request.input_ids)
    return NodeSpans(
        prompt=(0, begin),
        output=(begin, own) if request.sampling else None,
        turn=(request.turn_start, own) if request.turn_start is not None else None,
    )


def _reused(core: EngineCore, request: Request, prepared: Prepared) -> int:
    there = sum(read.stop - read.start for read in prepared.reads if core.preparer.is_there(read))
    try:
        return there + core.preparer.matching(request, prepared)
    except Exception as error:
        raise as_dag_error(error, "context") from None
