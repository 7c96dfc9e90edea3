"""Graph documents (`dagengine.graph/v1`) to requests of one submission. Knows the document's fields, runs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dagengine_core_graph import GraphDocument, NodeDocument

from .errors import DagError
from .inputs import InputEncoder, build_request, new_request_id, parse_keep
from .request import ContextRef, Request
from .sampling import SamplingParams


@dataclass(frozen=True)
class GraphRequests:
    """A document's nodes as requests, in an order in which parents come first.

    Attributes:
        node_of: request id to node id.
    """

    requests: tuple[Request, ...]
    node_of: Mapping[str, str]


def graph_requests(
    document: GraphDocument,
    encoder: InputEncoder,
    *,
    default_policy: str = "linear",
    salt: str = "",
    max_nodes: int = 10_000,
) -> GraphRequests:
    """Build the requests of a document.

    Raises:
        DagError: with a JSON path such as `nodes[3].generate.max_tokens`.
    """
    if not document.nodes:
        raise DagError("invalid_request", "a graph has at least one node", "nodes")
    if len(document.nodes) > max_nodes:
        raise DagError("invalid_request", f"a graph has at most {max_nodes} nodes", "nodes")
    submission = new_request_id()
    index_of = {node.id: index for index, node in enumerate(document.nodes)}
    ids = {node.id: f"{submission}:{index}" for index, node in enumerate(document.nodes)}
    requests = []
    for node_id in document.order:
        index = index_of[node_id]
        path = f"nodes[{index}]"
        try:
            requests.append(_request(document.nodes[index], document, encoder, ids, default_policy, salt))
        except DagError as error:
            raise DagError(
                error.code, error.message, f"{path}.{error.field}" if error.field else path
            ) from None
    return GraphRequests(tuple(requests), {request: node for node, request in ids.items()})


def parse_position(
    value: Mapping[str, object] | None, default: str, field: str
) -> tuple[str, dict[str, object]]:
    """`{"policy": name, ...options}` to a policy name and its options."""
    if value is None:
        return default, {}
    if not isinstance(value, Mapping):
        raise DagError("invalid_request", "position is an object with a policy", field)
    options = dict(value)
    policy = options.pop("policy", default)
    if not isinstance(policy, str):
        raise DagError("invalid_request", "policy is the name of a position policy", f"{field}.policy")
    return policy, options


def _request(
    node: NodeDocument,
    document: GraphDocument,
    encoder: InputEncoder,
    ids: Mapping[str, str],
    default_policy: str,
    salt: str,
) -> Request:
    if node.input is None:
        raise DagError("invalid_request", "a node that is to run needs an input", "input")
    sampling = None if node.generate is None else SamplingParams.from_mapping(node.generate, "generate")
    policy, options = parse_position(node.position or document.position, default_policy, "position")
    return build_request(
        encoder,
        node.input,
        sampling=sampling,
        context=tuple(
            ContextRef(
                state=item.state,
                request=None if item.node is None else ids[item.node],
                mode=item.mode,  # type: ignore[arg-type]
                span=item.span,
                at=item.at,
                start=item.start,
            )
            for item in node.context
        ),
        position=policy,
        position_options=options,
        backend=node.backend or document.backend,
        keep=None if node.keep is None else parse_keep(node.keep, "keep"),
        salt=salt,
        add_special_tokens=node.add_special_tokens,
        request_id=ids[node.id],
    )
