"""`LLM`: an engine in this process, called like a function. `AsyncLLM` is the same for asyncio.

with LLM("path/or/id") as llm:
    docs = llm.prefill(["...", "..."])
    answer = llm.generate("Question: ...", context=docs, max_tokens=32)
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

from dagengine_core_graph import GraphError
from dagengine_core_graph.query import MAX_TOKENS, FindFragments, Query, user

from .async_engine import EngineThread
from .build import build_core
from .bulk import BulkResult, run_bulk
from .calls import Call, Prompt, Prompts, keep_of, listed, sampling_params
from .config import EngineConfig
from .core import EngineCore
from .encoded_queries import EncodedQuery, QueryDraft, draft_query
from .errors import DagError, as_dag_error, shown
from .explain import Explanation, explain
from .fragments import FragmentStates
from .graph import Graph
from .inputs import InputEncoder, build_request, new_request_id
from .prompt_cache import PromptCache
from .queries import QueryOptions
from .query_results import QueryResult
from .query_run import OnText, QueryRun, result_of, texts_of
from .request import Event, FinishedEvent, Keep, Request
from .sampling import SamplingParams
from .state import ContextItem, context_refs
from .submitted import Submitted
from .tokenizer import require_unicode

T = TypeVar("T")


class LLM:
    """An engine with its own thread.

    Args:
        model: a Hugging Face folder, or a Hub id (with the extra `hub`).
        position: the position policy of requests that name none; by default `position_policy` of the options.
        options: any field of `EngineConfig`.
        core: an engine core to use instead of loading `model`; it is handed over.

    Raises:
        DagError: the model cannot be loaded, or an option is unknown or wrong.
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | None = None,
        *,
        position: str | None = None,
        chat_template: str | None = None,
        core: EngineCore | None = None,
        **options: Any,
    ) -> None:
        config = _engine_config(position, options)
        if core is None:
            if model is None:
                raise DagError("invalid_request", "give the folder or the Hub id of a model", "model")
            core = build_core(model, config, chat_template=chat_template)
        else:
            given = {"model": model, "chat_template": chat_template, **options}
            beside = next((name for name, value in given.items() if value is not None), None)
            if beside is not None:
                raise DagError(
                    "invalid_request", f"{beside} cannot be given beside a core, which has it", beside
                )
        self._position = core.config.position_policy if position is None else position
        self.tokenizer = core.tokenizer
        self._encoder = InputEncoder(core.tokenizer)
        self.engine = EngineThread(core)
        self.fragments = FragmentStates()
        self.prompts = PromptCache(core.tokenizer)
        self._pool: tuple[tuple[str, str | None], tuple[int, int]] | None = None

    def prefill(
        self,
        prompts: Prompts,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: Keep | None = None,
    ) -> Any:
        """Compute inputs and keep them as states: a list for a list of inputs, one `State` for one."""
        call = self.prefill_call(
            prompts,
            context=context,
            position=position,
            position_options=position_options,
            backend=backend,
            keep=keep,
        )
        return self._made(call.requests, call.states)

    def generate(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
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
            sampling: one for all, one per prompt, or None; `options` are fields of `SamplingParams`.
            keep: whether results keep their states, or how.

        Returns:
            One `Result` for one prompt, a list for a list; with n > 1 a list of n in place of each.
        """
        call = self.generate_call(
            prompts,
            sampling,
            context=context,
            position=position,
            position_options=position_options,
            backend=backend,
            keep=keep,
            **options,
        )
        return self._made(call.requests, call.results)

    chat = generate

    def graph(self, *, raise_errors: bool = True) -> Graph:
        """Build a graph of nodes in a `with` block; it runs when the block ends."""
        return Graph(raise_errors=raise_errors, llm=self)

    def query(
        self,
        query: Query | str,
        *,
        retriever: FindFragments | None = None,
        reduce: int | None = None,
        on_text: OnText | None = None,
        **options: Any,
    ) -> QueryResult:
        """Plan a span query and run it as one graph.

        Args:
            query: built with `dagengine_core_graph.query`; a text is a user's message.
            retriever: finds the fragments of its retrievals, such as a `dagengine.retrievers.Corpora`.
            reduce: reduce wide judges that are declared closed to groups of so many candidates; not exact.
            on_text: called with each answer's number and new text, on the engine's thread.
            options: `position`, `backend`, `max_tokens` of calls that name none (2048), `seed` of calls that name none,
                `keep` of the answers (True), `cache_salt`: fragments and pages are shared only within one.

        Raises:
            DagError: a refusal, or what the first node that failed ended with; the field is the path of the subtree.
        """
        came = time.perf_counter()
        encoded, settings = self.query_call(query, retriever=retriever, reduce=reduce, **options)
        run = QueryRun(self, [encoded], settings, on_event=texts_of(on_text))
        try:
            run.start()
            found = run.finish()
            return result_of(self.engine, run.submission, 0, found, came)
        except BaseException:
            run.cancel()
            raise

    def query_bulk(self, queries: Sequence[Query | str], **options: Any) -> BulkResult:
        """Run many span queries in an order in which they find each other's fragments. See `bulk.run_bulk`."""
        return run_bulk(self, queries, **options)

    def query_call(
        self,
        query: Query | str,
        *,
        retriever: FindFragments | None = None,
        reduce: int | None = None,
        **options: Any,
    ) -> tuple[EncodedQuery, QueryOptions]:
        """What `query` would run, which takes the same arguments; takes as long as tokenizing does."""
        settings = self.query_options(**options)
        return self.draft_query(query, settings, retriever=retriever, reduce=reduce).encode(), settings

    def query_options(
        self,
        *,
        position: str | None = None,
        backend: str | None = None,
        max_tokens: int = MAX_TOKENS,
        seed: int | None = None,
        keep: bool | Keep = True,
        cache_salt: str | None = None,
    ) -> QueryOptions:
        """How `query` would run any query, from the same options. Raises DagError for one that is wrong by itself."""
        if cache_salt is not None and not (isinstance(cache_salt, str) and cache_salt):
            raise DagError("invalid_request", f"cache_salt is a text, not {shown(cache_salt)}", "cache_salt")
        require_unicode(cache_salt or "", "cache_salt")
        checked = SamplingParams.from_mapping({"max_tokens": max_tokens, "seed": seed})
        return QueryOptions(
            position=self._position if position is None else position,
            backend=backend,
            salt=cache_salt or "",
            max_tokens=max_tokens,
            seed=checked.seed,
            keep=keep_of(keep),
            fragment_ttl_s=self.fragments.ttl_s,
        )

    def pool_of(self, options: QueryOptions) -> tuple[int, int]:
        """Page size and number of pages of the engine, which is not asked again after equal options.

        Raises: DagError for what it would refuse of any request with these options, or because it is dead.
        """
        self.engine.check_serving()
        asked = options.position, options.backend
        if self._pool is None or self._pool[0] != asked:
            self._pool = asked, self.engine.ask(partial(_pool, options=options))
        return self._pool[1]

    def draft_query(
        self,
        query: Query | str,
        options: QueryOptions,
        *,
        retriever: FindFragments | None = None,
        reduce: int | None = None,
    ) -> QueryDraft:
        """The query as it would run, but for its tokens. Raises as `encoded_queries.encode_query`."""
        if isinstance(query, str):
            try:
                query = user(query)
            except GraphError as error:
                raise as_dag_error(error) from None
        if not isinstance(query, Query):
            raise DagError("invalid_request", f"a query or a text is needed, not {shown(query)}", "query")
        return draft_query(query, self.prompts, salt=options.salt, retriever=retriever, reduce=reduce)

    def explain(
        self,
        prompt: Prompt | None = None,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        sampling: SamplingParams | None = None,
        **options: Any,
    ) -> Explanation:
        """What a request would see, where, and at what cost; the model does not run.

        Without a prompt a single token stands for it.
        """
        params = sampling_params(sampling, options) if sampling is not None or options else None
        request = self.request(
            [0] if prompt is None else prompt,
            params,
            context=context,
            position=position,
            position_options=position_options,
        )
        found = self.engine.ask(lambda core: explain(core, [request]))[0]
        if found.error is not None:
            raise found.error
        return found

    def prefill_call(self, prompts: Prompts, *, keep: Keep | None = None, **layout: Any) -> Call:
        """The requests of `prefill`, which takes the same arguments."""
        found, single = listed(prompts)
        kept = keep_of(True if keep is None else keep)
        return Call(tuple(self.request(prompt, None, keep=kept, **layout) for prompt in found), single)

    def generate_call(
        self,
        prompts: Prompts,
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: bool | Keep = True,
        **options: Any,
    ) -> Call:
        """The requests of `generate`, which takes the same arguments."""
        found, single = listed(prompts)
        given = list(sampling) if isinstance(sampling, Sequence) else [sampling] * len(found)
        if len(given) != len(found):
            message = f"{len(found)} prompts need as many sampling params, not {len(given)}"
            raise DagError("invalid_request", message, "sampling")
        requests = [
            self.request(
                prompt,
                sampling_params(params, options),
                context=context,
                position=position,
                position_options=position_options,
                backend=backend,
                keep=keep_of(keep),
            )
            for prompt, params in zip(found, given, strict=True)
        ]
        return Call(tuple(requests), single)

    def request(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None,
        *,
        context: Sequence[ContextItem] = (),
        position: str | None = None,
        position_options: Mapping[str, object] | None = None,
        backend: str | None = None,
        keep: Keep | None = None,
    ) -> Request:
        """The request that the other methods would submit."""
        return build_request(
            self._encoder,
            prompt,
            sampling=sampling,
            context=context_refs(context),
            position=self._position if position is None else position,
            position_options=position_options,
            backend=backend,
            keep=keep,
            request_id=new_request_id(),
        )

    def run(
        self, requests: Sequence[Request], on_event: Callable[[Event], None] | None = None
    ) -> list[FinishedEvent]:
        """Submit requests as one group and wait for their terminal events, in the order of the requests.

        An interrupt cancels what has not finished and releases the states of what has.
        """
        return self._made(requests, lambda engine, events: events, on_event)

    def _made(
        self,
        requests: Sequence[Request],
        make: Callable[[EngineThread, list[FinishedEvent]], T],
        on_event: Callable[[Event], None] | None = None,
    ) -> T:
        """What `make` makes of the terminal events, as `run`: an interrupt until it is made releases all states."""
        submitted = Submitted(self.engine, lambda core: requests, on_event)
        try:
            submitted.start()
            return make(self.engine, submitted.wait())
        except BaseException:
            submitted.cancel()
            raise

    def close(self) -> None:
        """Cancel what runs and stop the engine; states end with it."""
        self.engine.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _pool(core: EngineCore, options: QueryOptions) -> tuple[int, int]:
    any_request = Request(
        new_request_id(), (0,), None, position=options.position, backend=options.backend, salt=options.salt
    )
    core.check(any_request)
    core.preparer.prepare(any_request, [])
    return core.store.page_size, core.store.num_pages


def _engine_config(position: str | None, options: Mapping[str, Any]) -> EngineConfig:
    for name in options:
        if name not in EngineConfig.__dataclass_fields__:
            known = ", ".join(sorted(EngineConfig.__dataclass_fields__))
            raise DagError("invalid_request", f"unknown option {name!r}; known: {known}", name)
    if position is None:
        return EngineConfig(**options)
    if "position_policy" in options:
        raise DagError("invalid_request", "give position or position_policy, not both", "position_policy")
    return EngineConfig(position_policy=position, **options)
