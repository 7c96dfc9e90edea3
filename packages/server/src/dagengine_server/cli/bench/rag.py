"""`dagengine bench rag`: the first token of a question over documents: cached, contiguous, cold, and in full.

All on fresh tokens, so that nothing is found again that a run does not mean to find:
    cached       every document is a state; each request reads all of them, in a new order
    contiguous   one state of the same total length
    cold         the documents and the question in one submission, nothing cached: documents do not attend each other
    full         one plain prompt of the same length: every token attends all before it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import CommandError, say
from . import arguments
from .arguments import Common, counts
from .publish import publish
from .record import Figure, circumstances, command_line
from .report import Bar, ratio_of, times_sooner, value_of
from .settings import WARM_UPS
from .target import (
    ANSWER_TOKENS,
    MARKS,
    Answer,
    ApiKey,
    EndpointOption,
    is_url,
    open_target,
    refuse_without_endpoint,
)

if TYPE_CHECKING:
    from dagengine import State
    from dagengine.request import Request

    from .bandwidth import Bandwidth
    from .probe import Probe, Trace

ANSWER = 2
DOCUMENTS = (1, 2, 4, 8, 16, 32)
MOST = "llama-3.1-8b, 32 documents x 2857"
CACHED, COLD = "first token, cached", "first token, cold"
FULL, CONTIGUOUS = "full prefill", "one contiguous state"
BARS = (
    Bar("cached, a new order each time: first token", MOST, CACHED, None, value_of, 20.0, "ms", False),
    Bar("cached against full prefill", MOST, CACHED, FULL, times_sooner, 280.0, "x sooner", True),
    Bar("cached against one contiguous state", MOST, CACHED, CONTIGUOUS, ratio_of, 1.02, "x its time", False),
    Bar("cold against full prefill", MOST, COLD, FULL, times_sooner, 2.55, "x sooner", True),
)


def rag(
    common: Common,
    documents: Annotated[
        list[int] | None, typer.Option(help="how many, repeatable  [default: 1, 2, 4, 8, 16, 32]")
    ] = None,
    tokens: Annotated[int, typer.Option(min=1, help="of each document")] = 2857,
    question: Annotated[int, typer.Option(min=1, help="own tokens of a request, with its marks")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="of cached and contiguous")] = 10,
    slow_repeats: Annotated[int, typer.Option(min=1, help="of cold and full")] = 3,
    endpoint: EndpointOption = None,
    api_key: ApiKey = None,
    answer: Answer = None,
) -> None:
    """First token over 1 to 32 documents: cached in a new order each time, contiguous, cold, and in full.

    With --endpoint the questions are span queries through a server, beside the same text as plain prompts.
    """
    sizes = counts(documents, DOCUMENTS, "documents")
    if endpoint is not None:
        _through_endpoint(
            common, endpoint, api_key, answer or ANSWER_TOKENS, sizes, tokens, question, repeats, slow_repeats
        )
        return
    refuse_without_endpoint(api_key=api_key, answer=answer)
    from .bandwidth import Bandwidth
    from .probe import Probe

    say(str(common.threads))
    where = circumstances(command_line("rag"), common.threads.count)
    page = common.page_size
    document = -(-tokens // page) * page
    room = 4 * (max(sizes) * document + question + page)
    with common.folder() as model:
        say(f"loading {common.label}")
        engine = common.engine(tokens=room, sequences=max(sizes) + 1)
        with Probe(model, seed=common.seed, options=engine) as probe:
            longest = max(sizes) * tokens + question + 1
            if longest > probe.core.max_model_len:
                limit = f"the model sees at most {probe.core.max_model_len} tokens"
                raise CommandError(f"{longest} tokens are too many: {limit}", "documents")
            bandwidth = Bandwidth.measured(probe)
            figures = [bandwidth.figure]
            for count in sizes:
                say(f"measuring {count} documents")
                case = f"{common.label}, {count} documents x {tokens}, question {question}"
                runs = _Runs(probe, count, tokens, question)
                figures += runs.measure(case, repeats, slow_repeats, bandwidth)
            device = probe.device
    publish("rag", figures, where.on(*device), common.destination, BARS)


command = arguments.command(rag)


def _through_endpoint(
    common: Common,
    target: str,
    api_key: str | None,
    answer: int,
    sizes: Sequence[int],
    tokens: int,
    question: int,
    repeats: int,
    slow_repeats: int,
) -> None:
    """Span queries and plain prompts through a server."""
    from .rag_queries import BARS as QUERY_BARS
    from .rag_queries import SYSTEM, RagQueries
    from .texts import Texts

    message = -(-(tokens + MARKS) // common.page_size) * common.page_size
    room = 4 * (max(sizes) * message + SYSTEM + question + answer + 3 * MARKS)
    where = circumstances(command_line("rag"), None if is_url(target) else common.threads.count)
    figures: list[Figure] = []
    with open_target(common, target, api_key, tokens=room, sequences=max(sizes) + 3) as server:
        texts = Texts(server.endpoint.count, server.endpoint.count_chat, common.seed)
        for count in sizes:
            say(f"measuring {count} documents")
            case = f"{server.label}, {count} documents x {tokens}, question {question}, through the endpoint"
            runs = RagQueries(
                server.endpoint,
                texts,
                common.seed,
                count=count,
                tokens=tokens,
                question=question,
                answer=answer,
            )
            figures += runs.measure(case, repeats, slow_repeats)
        device = server.device
    publish("rag", figures, where.on(*device), common.destination, QUERY_BARS)


class _Runs:
    """The runs over so many documents."""

    def __init__(self, probe: Probe, count: int, tokens: int, question: int) -> None:
        self._probe, self._count, self._tokens, self._question = probe, count, tokens, question

    def measure(self, case: str, repeats: int, slow_repeats: int, bandwidth: Bandwidth) -> list[Figure]:
        """All four, each with a warm-up; cached and contiguous take turns at going first, and cold and full do."""
        probe, backend = self._probe, self._probe.core.default_backend
        states = probe.prefill([probe.ids(self._tokens) for _ in range(self._count)])
        (whole,) = probe.prefill([probe.ids(self._count * self._tokens)])
        cached: list[Trace] = []
        contiguous: list[Trace] = []
        temporary = {"cached": 0, "contiguous": 0}
        added = 0
        for repeat in range(-WARM_UPS, repeats):
            pair = [("cached", cached, probe.shuffled(states)), ("contiguous", contiguous, [whole])]
            for name, traces, context in pair if repeat % 2 else reversed(pair):
                before = probe.pages_live()
                trace, used, peak = self._ask(context)
                if repeat >= 0:
                    traces.append(trace)
                    temporary[name] = max(temporary[name], used)
                    added = max(added, peak - before) if name == "cached" else added
        for state in (*states, whole):
            state.release()
        cold: list[float] = []
        full: list[float] = []
        for repeat in range(-1, slow_repeats):
            runs = [(cold, self._cold), (full, self._full)]
            for times, run in runs if repeat % 2 else reversed(runs):
                seconds = run()
                if repeat >= 0:
                    times.append(seconds)
        return self._figures(case, backend, cached, contiguous, cold, full, temporary, added, bandwidth)

    def _ask(self, context: Sequence[State]) -> tuple[Trace, int, int]:
        """A fresh question; the temporary bytes of attention, and the most pages in use at a token.

        A second token is asked for so that the request still holds its pages when the first comes.
        """
        from .probe import Trace

        probe = self._probe
        probe.temp_bytes(reset=True)
        request = probe.request(probe.ids(self._question), context=context, tokens=ANSWER)
        (trace,) = probe.run([request], [Trace(want_pages=True)])
        assert trace.choice is not None
        assert trace.choice.dag.reused == trace.choice.dag.visible == self._count * self._tokens
        return trace, probe.temp_bytes()[probe.core.default_backend], max(trace.pages)

    def _cold(self) -> float:
        """Seconds from submitting documents and question together to its first token."""
        from dagengine import ContextRef

        probe = self._probe
        parts: list[Request] = [probe.llm.request(probe.ids(self._tokens), None) for _ in range(self._count)]
        context = [ContextRef(request=part.id) for part in parts]
        question = probe.request(probe.ids(self._question), context=context)
        return probe.run([*parts, question])[-1].ttft

    def _full(self) -> float:
        probe = self._probe
        trace = probe.generate(probe.ids(self._count * self._tokens + self._question))
        return trace.ttft

    def _figures(
        self,
        case: str,
        backend: str,
        cached: Sequence[Trace],
        contiguous: Sequence[Trace],
        cold: Sequence[float],
        full: Sequence[float],
        temporary: dict[str, int],
        added: int,
        bandwidth: Bandwidth,
    ) -> list[Figure]:
        costs, visible = self._probe.costs, self._count * self._tokens

        def first(metric: str, seconds: Sequence[float]) -> Figure:
            return Figure.of(case, backend, metric, [s * 1e3 for s in seconds], "ms")

        whole = first("first token, contiguous", [t.ttft for t in contiguous])
        merged = first(CACHED, [t.ttft for t in cached])
        plain, apart = first("first token, full", full), first(COLD, cold)
        timings = [t.choice.dag.timing for t in cached if t.choice is not None]
        own = -(-(self._question + ANSWER) // self._probe.core.config.page_size)
        all_flops = costs.prefill_flops([(visible + self._question, 0)])
        part_flops = costs.prefill_flops([(self._tokens, 0)] * self._count + [(self._question, visible)])
        rates = [(visible + self._question) / s for s in full]
        return [
            merged,
            merged.against(FULL, plain.value),
            merged.against(CONTIGUOUS, whole.value),
            bandwidth.beside(merged, costs.step_bytes(visible)),
            whole,
            apart,
            apart.against(FULL, plain.value),
            plain,
            Figure.of(case, backend, "prefill rate, full", rates, "tokens/s"),
            Figure.count(case, "", "operations, full prefill", all_flops, "FLOP").against("cold", part_flops),
            Figure.of(case, "", "context compile", [t.compile for t in timings], "ms"),
            Figure.of(case, "", "position layout", [t.layout for t in timings], "ms"),
            Figure.of(case, "", "KV preparation", [t.kv_prepare for t in timings], "ms"),
            Figure.count(case, "", "KV pages added by a cached request", added, "pages").against("own", own),
            Figure.count(case, backend, "temporary bytes, cached", temporary["cached"], "B"),
            Figure.count(case, backend, "temporary bytes, contiguous", temporary["contiguous"], "B"),
        ]
