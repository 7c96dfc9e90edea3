"""What every route works with: the engine, the model's facts, tenants, and the requests in work."""

from __future__ import annotations

import asyncio
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import TypeVar, cast, get_args

from dagengine import DagError
from dagengine.async_engine import EngineThread
from dagengine.core import EngineCore
from dagengine.fragments import FragmentStates
from dagengine.inputs import InputEncoder
from dagengine.prompt_cache import PromptCache
from dagengine.request import ContextRef, SpanName
from dagengine.tokenizer import Tokenizer
from dagengine_core_graph.query import FindFragments

from .metrics import Metrics
from .protocol import DagOptions
from .settings import ServerSettings
from .submission import Locate, Submission

T = TypeVar("T")
MESSAGE_NAME = re.compile(r"""message(\.name\b|\[['"]name['"]\])""")


@dataclass(frozen=True)
class ModelInfo:
    """Facts of the engine's model that do not change."""

    tokenizer: Tokenizer | None
    vocab_size: int
    max_model_len: int
    page_size: int
    num_pages: int
    max_num_seqs: int
    default_backend: str
    default_implementation: str
    default_backend_reason: str
    default_policy: str
    dtype: str
    architecture: str


@dataclass(frozen=True)
class Tenant:
    """Who asks.

    Attributes:
        identity: of the API key; empty where no keys are asked for.
    """

    identity: str = ""

    def salt(self, cache_salt: str | None) -> str:
        """What keeps states and pages apart: tagged, length-prefixed fields; none can pose as another."""
        if not self.identity and cache_salt is None:
            return ""
        fields = (("key", self.identity), ("salt", cache_salt or ""))
        return ";".join(f"{tag}:{len(value)}:{value}" for tag, value in fields)

    @staticmethod
    def of_key(key: str) -> Tenant:
        return Tenant(hashlib.sha256(b"dagengine-api-key:" + key.encode()).hexdigest()[:32])


class Service:
    """The shared parts of one application.

    Attributes:
        retriever: finds the fragments of span queries' retrievals; None refuses them.
        fragments: those that are kept; used on the engine's thread.
        draining: nothing new is taken; set once, when the server is told to stop.
        open_requests: HTTP requests in work.
    """

    def __init__(
        self, engine: EngineThread, settings: ServerSettings, retriever: FindFragments | None = None
    ) -> None:
        self.engine, self.settings, self.retriever = engine, settings, retriever
        self.fragments = FragmentStates(settings.max_fragments, settings.fragment_ttl_s)
        self.model = engine.call(_model_info).result()
        self.encoder = InputEncoder(self.model.tokenizer)
        self.prompts = PromptCache(self.model.tokenizer)
        self.metrics = Metrics()
        self.created = int(time.time())
        self.draining = False
        self.open_requests = 0
        self._submissions: dict[str, tuple[Tenant, Submission]] = {}

    @property
    def uses_message_names(self) -> bool:
        tokenizer = self.model.tokenizer
        return bool(tokenizer and MESSAGE_NAME.search(tokenizer.template_source or ""))

    def check_effort(self, effort: str | None) -> None:
        """Raises DagError `unsupported` for an effort that the model's chat template would heed: it is not told."""
        tokenizer = self.model.tokenizer
        if effort is not None and tokenizer and "reasoning_effort" in (tokenizer.template_source or ""):
            message = "this model's chat template has such a setting, and it cannot be set here; leave it out"
            raise DagError("unsupported", message, "reasoning_effort")

    def check_model(self, name: str | None) -> None:
        """Raises DagError `model_not_found` for another model than the one that is served."""
        served = self.settings.served_model_name
        if name is not None and name != served:
            raise DagError("model_not_found", f"this server serves {served!r}, not {name[:200]!r}", "model")

    async def call(self, function: Callable[[EngineCore], T]) -> T:
        """Run `function` on the engine's thread, between steps."""
        return await asyncio.wrap_future(self.engine.call(function))

    @contextmanager
    def submission(
        self,
        http_id: str,
        tenant: Tenant,
        *,
        locate: Locate,
    ) -> Iterator[Submission]:
        """A submission that the HTTP request's id cancels, and that an error in the block ends.

        When the block ends well it goes on; `end` is then the caller's to call.
        """
        submission = Submission(
            self.engine,
            self.metrics.observe,
            locate=locate,
            timeout_s=self.settings.request_timeout_s,
        )
        self._submissions[http_id] = (tenant, submission)
        try:
            yield submission
        except BaseException:
            self.end(http_id)
            raise

    def end(self, http_id: str) -> None:
        """The HTTP request is over, one way or the other. Ending twice is no error."""
        found = self._submissions.pop(http_id, None)
        if found is not None:
            found[1].close()

    def cancel(self, http_id: str, tenant: Tenant) -> bool:
        """Cancel a tenant's request. Returns whether it was running."""
        found = self._submissions.get(http_id)
        if found is None or found[0] != tenant:
            return False
        return found[1].cancel(DagError("cancelled", "the request was cancelled"))

    def cancel_all(self, error: DagError) -> None:
        for _, submission in list(self._submissions.values()):
            submission.cancel(error)

    def context(self, dag: DagOptions) -> tuple[ContextRef, ...]:
        """The references of a request. Raises DagError."""
        if len(dag.context) > self.settings.max_context:
            most = self.settings.max_context
            raise DagError("invalid_request", f"a request has at most {most} references", "dag.context")
        return tuple(
            ContextRef(
                state=item.state,
                mode=item.mode,
                span=parse_span(item.span, f"dag.context[{index}].span"),
                at=item.at,
                start=item.start,
            )
            for index, item in enumerate(dag.context)
        )

    def health(self) -> DagError | None:
        """Why the engine does not serve, if so."""
        if self.engine.dead is not None:
            return self.engine.dead
        silent = self.engine.seconds_since_beat()
        if silent > self.settings.heartbeat_timeout_s:
            return DagError("engine_dead", f"the engine has not come round for {silent:.0f} seconds")
        return None


def parse_span(value: object, path: str) -> SpanName | tuple[int, int] | None:
    """A span from JSON: a name or `[start, stop]`. Raises DagError."""
    if value is None:
        return None
    if isinstance(value, str) and value in get_args(SpanName):
        return cast(SpanName, value)
    if isinstance(value, list) and len(value) == 2 and all(type(item) is int for item in value):
        if not 0 <= value[0] <= value[1]:
            raise DagError(
                "span_out_of_range", f"a span is [start, stop] with 0 <= start <= stop, not {value}", path
            )
        return (value[0], value[1])
    raise DagError("invalid_request", "a span is prompt, output, turn, all, or [start, stop]", path)


def registered(group: str) -> list[str]:
    """Names of the plug-ins of an entry point group."""
    return sorted({point.name for point in entry_points(group=group)})


def _model_info(core: EngineCore) -> ModelInfo:
    return ModelInfo(
        tokenizer=core.tokenizer,
        vocab_size=core.geometry.vocab_size,
        max_model_len=core.max_model_len,
        page_size=core.store.page_size,
        num_pages=core.store.num_pages,
        max_num_seqs=core.config.max_num_seqs,
        default_backend=core.default_backend,
        default_implementation=core.attention.implementation,
        default_backend_reason=core.attention.reason,
        default_policy=core.config.position_policy,
        dtype=core.config.dtype,
        architecture=core.geometry.architecture,
    )
