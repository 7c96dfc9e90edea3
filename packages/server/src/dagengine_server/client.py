"""`Client`: a server over HTTP, with the names that `LLM` has for an engine in the same process.

    with Client("http://127.0.0.1:8000") as client:
        docs = client.prefill(["...", "..."])
        answer = client.generate("Question: ...", context=docs, max_tokens=32)

States live on the server. What this client keeps ends `ttl_s` after it was made, or when it is released;
dropping the Python object releases nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from types import TracebackType
from typing import Any, TypeVar

import httpx

from dagengine import DagError, Explanation, Keep, NodeRef
from dagengine.calls import keep_of, listed
from dagengine_core_graph.query import Query

from .remote import ContextItem, Result, State, Usage, context_objects, position_object, without_none
from .remote_queries import QueryResult, query_document, query_params, result_query, usage_of

__all__ = ["Client", "Graph", "Result", "State", "Usage"]

T = TypeVar("T")
Prompt = str | Sequence[int] | Sequence[Mapping[str, Any]]
DEFAULT_TTL_S = 3600.0
MOST_AT_ONCE = 32
FORMAT = "dagengine.graph/v1"


@dataclass
class Graph:
    """Nodes built first and sent at once, when the `with` block ends. `results` maps each node to its result.

    A node that failed has its error in `errors`; leaving the block raises the first of them unless
    `raise_errors` is false.
    """

    client: Client
    raise_errors: bool = True
    nodes: list[dict[str, Any]] = field(default_factory=list)
    results: dict[NodeRef, Result] = field(default_factory=dict)
    errors: dict[NodeRef, DagError] = field(default_factory=dict)

    def node(
        self,
        prompt: Prompt,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: bool | Keep = True,
        **options: Any,
    ) -> NodeRef:
        """Add a node. It samples iff a sampling option such as `max_tokens` is given; n is 1.

        Raises:
            DagError: `unsupported` for several answers, which only `run_graph` returns.
        """
        if options.get("n", 1) != 1:
            raise DagError("unsupported", "a node of a graph block has one answer; use run_graph", "n")
        node = {
            "id": f"n{len(self.nodes)}",
            "input": _json_input(prompt),
            "context": context_objects(context),
            "generate": options or None,
            "keep": self.client.keep_object(keep),
            "position": position_object(position, position_options),
            "backend": backend,
        }
        self.nodes.append(without_none(node))
        return NodeRef(str(node["id"]))

    def __enter__(self) -> Graph:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None or not self.nodes:
            return
        answers = self.client.run_graph({"format": FORMAT, "nodes": self.nodes})
        for node, answer in answers.items():
            if isinstance(answer, DagError):
                self.errors[NodeRef(node)] = answer
            elif isinstance(answer, Result):
                self.results[NodeRef(node)] = answer
        if self.errors and self.raise_errors:
            raise next(iter(self.errors.values()))


class Client:
    """A server. Methods raise DagError with the server's code and field, `connection_failed`, or `timeout`.

    Args:
        base_url: such as `http://127.0.0.1:8000`; the paths below it are `/v1/...`.
        timeout: seconds that an answer may take; None waits for ever.
        cache_salt: states and reuse are shared only within one salt.
        ttl_s: how long states live that are kept without a `Keep`; None keeps them until they are released.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str | None = None,
        timeout: float | None = 600.0,
        *,
        cache_salt: str | None = None,
        ttl_s: float | None = DEFAULT_TTL_S,
    ) -> None:
        headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self.base_url, self.cache_salt, self._ttl_s = base_url.rstrip("/"), cache_salt, ttl_s
        limits = httpx.Limits(max_connections=MOST_AT_ONCE)
        self._http = httpx.Client(base_url=self.base_url, headers=headers, timeout=timeout, limits=limits)

    def prefill(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: Keep | None = None,
    ) -> Any:
        """Compute inputs and keep them as states: a list for a list of inputs, one `State` for one."""
        dag = self._dag(context, position, position_options, backend, keep or True)

        def one(prompt: Prompt) -> State:
            body = {"input": _json_input(prompt), "dag": dag, "cache_salt": self.cache_salt}
            return self.state_of(self.post("/v1/states", body))

        return _each(one, prompts)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: bool | Keep = True,
        **options: Any,
    ) -> Any:
        """Generate from each prompt over the same context.

        Args:
            prompts: text, token ids or messages, or a list of these.
            options: sampling options by the endpoint's names; what is left out is the server's default.

        Returns:
            One `Result` for one prompt, a list for a list; with n > 1 a list of n in place of each.
        """
        if options.get("stream"):
            raise DagError("unsupported", "answers are whole here; stream with an OpenAI client", "stream")
        dag = self._dag(context, position, position_options, backend, keep)

        def one(prompt: Prompt) -> Any:
            common = {**options, "dag": dag, "cache_salt": self.cache_salt, "return_token_ids": True}
            if _is_messages(prompt):
                top = common.pop("logprobs", None)
                if top is not None:
                    common |= {"logprobs": True, "top_logprobs": top}
                answer = self.post("/v1/chat/completions", {"messages": _json_input(prompt), **common})
            else:
                answer = self.post("/v1/completions", {"prompt": _json_input(prompt), **common})
            results = [self._result(choice, answer) for choice in answer["choices"]]
            return results if options.get("n", 1) > 1 else results[0]

        return _each(one, prompts)

    chat = generate

    def graph(self, *, raise_errors: bool = True) -> Graph:
        """Build a graph of nodes in a `with` block; it is sent when the block ends."""
        return Graph(self, raise_errors)

    def run_graph(self, document: Mapping[str, Any]) -> dict[str, Result | DagError | list[Result]]:
        """Run a `dagengine.graph/v1` document: per node its result, a list of n results, or its error."""
        answer = self.post("/v1/graphs", _document(document, stream=False, cache_salt=self.cache_salt))
        found: dict[str, Result | DagError | list[Result]] = {}
        for node in answer["nodes"]:
            if "error" in node:
                found[node["node"]] = _error_of(node["error"])
            elif "choices" in node:
                found[node["node"]] = [self._result(choice, node) for choice in node["choices"]]
            else:
                found[node["node"]] = self._result(node, node)
        return found

    def compile(self, document: Mapping[str, Any]) -> dict[str, Any]:
        """What a `dagengine.graph/v1` document would do, by node; the model does not run."""
        return self.post("/v1/graphs/compile", _document(document, cache_salt=self.cache_salt))

    def query(
        self,
        query: Query | str,
        *,
        position: str | None = None,
        backend: str | None = None,
        reduce: int | None = None,
        keep_ttl_s: float | None = None,
    ) -> QueryResult:
        """Run a span query on the server as one graph.

        Args:
            query: built with `dagengine_core_graph.query`; a text is a user's message.
            reduce: reduce wide judges that are declared closed to groups of so many candidates; not exact.
            keep_ttl_s: keep the answers' states for so many seconds; None does not keep them.
        """
        params = query_params(self.cache_salt, position, backend, reduce, keep_ttl_s)
        answer = self.call("POST", "/v1/query/execute", json=query_document(query), params=params)
        return QueryResult(
            result_query(answer),
            tuple(self._result(choice, answer) for choice in answer["choices"]),
            usage_of(answer),
            answer["dag"]["record"],
        )

    def prepare(self, query: Query | str, *, position: str | None = None, backend: str | None = None) -> None:
        """Compute what of a span query needs no call, and let the server keep it for a while."""
        params = query_params(self.cache_salt, position, backend, None, None)
        self.call("POST", "/v1/query/prepare", json=query_document(query), params=params)

    def explain(
        self,
        prompt: Prompt | None = None,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        **options: Any,
    ) -> Explanation:
        """What a request would see, where, and at what cost. Without a prompt one token stands for it."""
        node = {
            "id": "request",
            "input": [0] if prompt is None else _json_input(prompt),
            "context": context_objects(context),
            "position": position_object(position, position_options),
            "generate": options or None,
        }
        found = self.compile({"format": FORMAT, "nodes": [without_none(node)]})["nodes"][0]
        if "error" in found:
            raise _error_of(found["error"])
        return _explanation(found)

    def states(self) -> list[State]:
        """All states of this key and salt, in order of arrival."""
        listed: list[State] = []
        more = True
        while more:
            after = {"after": listed[-1].id} if listed else {}
            page = self.get("/v1/states", {**self.salted(), **after})
            listed += [self.state_of(info) for info in page["data"]]
            more = page["has_more"]
        return listed

    def close(self) -> None:
        """Close the connections. States stay on the server."""
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def get(self, path: str, params: Mapping[str, str] | None = None) -> dict[str, Any]:
        return self.call("GET", path, params=dict(params or {}))

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        return self.call("POST", path, json=without_none(body))

    def call(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        """One HTTP request. Raises DagError."""
        if self._http.is_closed:
            raise DagError("connection_failed", "this client is closed")
        try:
            request = self._http.build_request(method, path, **options)
        except (TypeError, ValueError) as error:
            raise DagError("invalid_request", f"the request is no JSON: {error}") from None
        try:
            answer = self._http.send(request)
        except httpx.TimeoutException:
            raise DagError("timeout", f"{self.base_url} did not answer in time") from None
        except httpx.HTTPError as error:
            raise DagError("connection_failed", f"{self.base_url}: {error}") from None
        try:
            value = answer.json()
        except ValueError:
            value = None
        if isinstance(value, dict) and answer.is_success:
            return value
        found = value.get("error") if isinstance(value, dict) else None
        if isinstance(found, dict):
            raise _error_of(found)
        status = f"{method} {path}: status {answer.status_code}"
        raise DagError("internal", f"{status}, and no answer of this API")

    def salted(self) -> dict[str, str]:
        """The query parameter that names the salt."""
        return {} if self.cache_salt is None else {"cache_salt": self.cache_salt}

    def keep_object(self, keep: bool | Keep) -> dict[str, Any] | None:
        """`keep` of a request; None does not keep. Raises DagError `invalid_request`."""
        kept = keep_of(keep)
        if isinstance(keep, Keep):
            return without_none(asdict(keep))
        return None if kept is None else without_none({"ttl_s": self._ttl_s})

    def state_of(self, info: Mapping[str, Any]) -> State:
        return State(self, info["id"], info["spans"], info["tokens"])

    def _dag(
        self,
        context: Sequence[ContextItem],
        position: str | None,
        position_options: Mapping[str, object] | None,
        backend: str | None,
        keep: bool | Keep,
    ) -> dict[str, Any]:
        return without_none(
            {
                "context": context_objects(context),
                "position": position_object(position, position_options),
                "backend": backend,
                "keep": self.keep_object(keep),
            }
        )

    def _result(self, choice: Mapping[str, Any], answer: Mapping[str, Any]) -> Result:
        dag, used = choice.get("dag") or answer["dag"], answer["usage"]
        spans, message = dag["spans"], choice.get("message") or {}
        return Result(
            text=choice.get("text", message.get("content")) or "",
            token_ids=tuple(choice.get("token_ids") or ()),
            logprobs=choice.get("logprobs"),
            finish_reason=choice["finish_reason"],
            stop_reason=choice.get("stop_reason"),
            usage=Usage(
                used["prompt_tokens"],
                used["prompt_tokens_details"]["cached_tokens"],
                used["completion_tokens"],
            ),
            state=State(self, dag["state"], spans) if dag["state"] else None,
            dag=dag,
        )


def _explanation(node: Mapping[str, Any]) -> Explanation:
    layout, tokens = node["layout"], node["tokens"]
    return Explanation(
        request_id=node["node"],
        visible=tuple(tuple(row) for row in node["visible"]),
        passed=tuple(tuple(row) for row in node["passed"]),
        segments=tuple(tuple(row) for row in layout["segments"]),
        policy=layout["policy"],
        own_start=layout["own_start"],
        num_visible=tokens["visible"],
        num_input=tokens["input"],
        planned_tokens=tokens["planned"],
        reused=tokens["reused"],
        num_pages=node["pages"],
        compile_ms=node["timing_ms"]["compile"],
        layout_ms=node["timing_ms"]["layout"],
    )


def _error_of(error: Mapping[str, Any]) -> DagError:
    return DagError(str(error.get("code") or "internal"), str(error.get("message")), error.get("param"))


def _each(function: Callable[[Prompt], T], prompts: Prompt | Sequence[Prompt]) -> Any:
    """The result for one prompt, a list for a list. Raises DagError, also for what is neither."""
    found, single = listed(prompts)
    return function(found[0]) if single else _at_once(function, found)


def _at_once(function: Callable[[Prompt], T], prompts: Sequence[Prompt]) -> list[T]:
    """Results in order. If one fails, what the others kept is released, and the first error is raised."""
    if not prompts:
        return []
    with ThreadPoolExecutor(min(len(prompts), MOST_AT_ONCE)) as pool:
        futures = [pool.submit(function, prompt) for prompt in prompts]
    errors = [error for future in futures if (error := future.exception()) is not None]
    if not errors:
        return [future.result() for future in futures]
    for future in futures:
        if future.exception() is None:
            found: Any = future.result()
            for item in found if isinstance(found, list) else [found]:
                item.release()
    raise errors[0]


def _json_input(prompt: Prompt) -> Any:
    """A prompt as JSON has it. Raises DagError `invalid_request` for what is no sequence."""
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, Sequence) or isinstance(prompt, bytes):
        message = f"a prompt is text, token ids, or messages, not {type(prompt).__name__}"
        raise DagError("invalid_request", message, "prompts")
    return list(prompt)


def _document(document: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """A document with more fields. Raises DagError `invalid_request` for what is no mapping."""
    if not isinstance(document, Mapping):
        raise DagError(
            "invalid_request", f"a document is a mapping, not {type(document).__name__}", "document"
        )
    return {**document, **more}


def _is_messages(prompt: Prompt) -> bool:
    return isinstance(prompt, Sequence) and bool(prompt) and isinstance(prompt[0], Mapping)
