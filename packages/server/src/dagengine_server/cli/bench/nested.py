"""`dagengine bench nested`: a judge over candidates that were just generated, as states, declared, and as text.

    as states      the judge reads the shared prompt and an artifact of every candidate; of its own it has a question
    declared       the same, submitted together with its candidates before they were generated: the engine knows
                   meanwhile that a judge will read them
    prefix reuse   the same tokens as a plain prompt: the shared prompt's pages are found again, and the candidates,
                   which were sampled behind other tokens than those that now precede them, are computed again

As states and as text the same candidates are judged, in the same order, and timed from when the judge is submitted,
once all of them have ended. Those of a declared judge are others, sampled likewise, and it is timed from their last
token. All are of a full length each. Nothing is cropped.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import say
from . import arguments
from .arguments import Common, counts
from .publish import publish
from .record import Figure, circumstances, command_line
from .report import Bar, times_sooner
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

    from .probe import Probe, Trace

FAN_OUTS = (1, 2, 4, 8, 16, 24)
LENGTHS = (256,)
TASK = 8
TEMPERATURE = 0.5
SWEPT_FAN_OUTS = (1, 24)
SWEPT_TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5)
AS_STATES, REUSE = "judge's first token, as states", "prefix reuse"
DECLARED = "judge's first token, declared with its candidates"
WIDE, NARROW = "llama-3.1-8b, 24 candidates x 256", "llama-3.1-8b, 1 candidates x 256"
BARS = tuple(
    Bar(f"{judge} {sizes} against prefix reuse", case, metric, REUSE, times_sooner, goal, "x sooner", True)
    for judge, metric in (("judge over", AS_STATES), ("judge declared with its", DECLARED))
    for sizes, case, goal in (("24 x 256", WIDE, 20.0), ("1 x 256", NARROW, 1.0))
)


def nested(
    common: Common,
    fan_out: Annotated[
        list[int] | None, typer.Option(help="candidates, repeatable  [default: 1, 2, 4, 8, 16, 24]")
    ] = None,
    length: Annotated[
        list[int] | None, typer.Option(help="tokens of a candidate, repeatable  [default: 256]")
    ] = None,
    temperature: Annotated[
        list[float] | None, typer.Option(min=0.0, help="of the candidates, repeatable  [default: 0.5]")
    ] = None,
    prompt: Annotated[int, typer.Option(min=1, help="tokens that all share")] = 512,
    question: Annotated[int, typer.Option(min=1, help="own tokens of the judge, with its marks")] = 32,
    repeats: Annotated[int, typer.Option(min=1, help="of new candidates, each judged every way")] = 10,
    endpoint: EndpointOption = None,
    api_key: ApiKey = None,
    answer: Answer = None,
) -> None:
    """A judge's first token over generated candidates: read as states, by a judge submitted after or with them, against
    a prompt with prefix reuse alone.

    With --endpoint candidates and judge are one span query through a server, beside separate calls and a prompt. Unless
    a fan-out or a temperature is given, temperatures from 0 to 1.5 at 1 and 24 candidates, and all fan-outs at 0.5.
    """
    lengths = counts(length, LENGTHS, "length")
    fans = counts(fan_out, FAN_OUTS, "fan_out")
    if endpoint is not None:
        chosen = points(fans if fan_out else None, temperature)
        sizes = _Sizes(prompt, question, answer or ANSWER_TOKENS)
        _through_endpoint(common, endpoint, api_key, chosen, lengths, sizes, repeats)
        return
    refuse_without_endpoint(api_key=api_key, answer=answer)
    from .probe import Probe

    say(str(common.threads))
    where = circumstances(command_line("nested"), common.threads.count)
    page = common.page_size
    candidate = -(-(max(lengths) + TASK) // page) * page
    room = 3 * (prompt + question + page + max(fans) * candidate)
    figures: list[Figure] = []
    with common.folder() as model:
        say(f"loading {common.label}")
        engine = common.engine(tokens=room, sequences=max(fans) + 1)
        with Probe(model, seed=common.seed, options=engine) as probe:
            for fan, size, heat in itertools.product(fans, lengths, temperature or (TEMPERATURE,)):
                say(f"measuring {fan} candidates of {size}")
                says = f"{fan} candidates x {size}, prompt {prompt}, question {question}"
                case = f"{common.label}, {says}, temperature {heat:g}"
                runs = _Judging(probe, fan, size, prompt, question, heat)
                figures += runs.measure(case, repeats)
            device = probe.device
    publish("nested", figures, where.on(*device), common.destination, BARS)


command = arguments.command(nested)


def points(fan_outs: list[int] | None, temperatures: list[float] | None) -> list[tuple[int, float]]:
    """Fan-outs with temperatures: all pairs of what is given. Without either, temperatures at 1 and 24, and fan-outs
    at 0.5, each pair once."""
    if fan_outs is None and temperatures is None:
        swept = [(fan, heat) for fan in SWEPT_FAN_OUTS for heat in SWEPT_TEMPERATURES]
        return list(dict.fromkeys([*swept, *((fan, TEMPERATURE) for fan in FAN_OUTS)]))
    return [(fan, heat) for fan in fan_outs or FAN_OUTS for heat in temperatures or (TEMPERATURE,)]


@dataclass(frozen=True)
class _Sizes:
    """Tokens of what all share, of the judge's question and of its answer."""

    prompt: int
    question: int
    answer: int


def _through_endpoint(
    common: Common,
    target: str,
    api_key: str | None,
    chosen: Sequence[tuple[int, float]],
    lengths: Sequence[int],
    sizes: _Sizes,
    repeats: int,
) -> None:
    """Span queries, and calls with plain prompts, through a server."""
    from .nested_queries import BARS as QUERY_BARS
    from .nested_queries import NestedQueries
    from .texts import Texts

    most = max(fan for fan, _ in chosen)
    candidate = -(-(max(lengths) + TASK + 2 * MARKS) // common.page_size) * common.page_size
    room = 3 * (2 * sizes.prompt + sizes.question + sizes.answer + 4 * MARKS + most * candidate)
    where = circumstances(command_line("nested"), None if is_url(target) else common.threads.count)
    figures: list[Figure] = []
    with open_target(common, target, api_key, tokens=room, sequences=most + 4) as server:
        texts = Texts(server.endpoint.count, server.endpoint.count_chat, common.seed)
        for (fan, heat), length in itertools.product(chosen, lengths):
            say(f"measuring {fan} candidates of {length} at temperature {heat:g}")
            says = f"{fan} candidates x {length}, prompt {sizes.prompt}, question {sizes.question}"
            case = f"{server.label}, {says}, temperature {heat:g}, through the endpoint"
            runs = NestedQueries(
                server.endpoint, texts, common.seed, fan=fan, length=length, temperature=heat, **asdict(sizes)
            )
            figures += runs.measure(case, repeats)
        device = server.device
    publish("nested", figures, where.on(*device), common.destination, QUERY_BARS)


class _Judging:
    """New candidates for every repeat, judged as states, declared, and as text."""

    def __init__(
        self, probe: Probe, fan: int, length: int, prompt: int, question: int, temperature: float
    ) -> None:
        self._probe, self._fan, self._length = probe, fan, length
        self._question, self._temperature = question, temperature
        self._prompt = probe.ids(prompt)
        self._seeds = itertools.count(1)

    def measure(self, case: str, repeats: int) -> list[Figure]:
        """As states and as text take turns at going first, as the two together and declared do; the first two repeats
        are warm-ups.
        """
        probe, backend = self._probe, self._probe.core.default_backend
        (shared,) = probe.prefill([self._prompt])
        inner: list[float] = []
        states: list[Trace] = []
        plain: list[Trace] = []
        declared: list[_Declared] = []
        for repeat in range(-WARM_UPS, repeats):
            together = self._declared(shared) if repeat % 2 == 0 else None
            candidates, seconds = self._candidates(shared)
            question = probe.ids(self._question)
            as_states, as_text = self._both_ways(shared, candidates, question, repeat % 2 == 1)
            for candidate in candidates:
                candidate[0].release()
            together = together or self._declared(shared)
            if repeat >= 0:
                inner.append(seconds)
                states.append(as_states)
                plain.append(as_text)
                declared.append(together)
        shared.release()

        def times(metric: str, seconds: Sequence[float]) -> Figure:
            return Figure.of(case, backend, metric, [s * 1e3 for s in seconds], "ms")

        def first(metric: str, traces: list[Trace]) -> Figure:
            return times(metric, [t.ttft for t in traces])

        def query(metric: str, traces: list[Trace]) -> Figure:
            return times(metric, [s + t.ttft for s, t in zip(inner, traces, strict=True)])

        def computed(metric: str, traces: list[Trace]) -> Figure:
            found = [
                t.choice.dag.input + t.choice.dag.visible - t.choice.dag.reused for t in traces if t.choice
            ]
            return Figure.of(case, backend, metric, found, "tokens")

        text = first("judge's first token, prefix reuse", plain)
        whole = query("candidates and judge, prefix reuse", plain)
        again = computed("judge's tokens computed, prefix reuse", plain)
        judges = [run.judge for run in declared]
        return [
            first(AS_STATES, states).against(REUSE, text.value),
            times(DECLARED, [run.first for run in declared]).against(REUSE, text.value),
            text,
            query("candidates and judge, as states", states).against(REUSE, whole.value),
            first("candidates and judge, declared", judges).against(REUSE, whole.value),
            whole,
            computed("judge's tokens computed, as states", states).against(REUSE, again.value),
            computed("judge's tokens computed, declared", judges).against(REUSE, again.value),
            again,
            times("candidates generated", inner),
            Figure.count(case, "", "judge's input, nothing cropped", self._seen, "tokens"),
        ]

    @property
    def _seen(self) -> int:
        """Tokens that a judge sees."""
        return len(self._prompt) + self._fan * self._length + self._question

    def _candidate(self, shared: State, *, keep: bool) -> Request:
        """A new one, of another task and seed than all before it."""
        probe = self._probe
        return probe.request(
            probe.ids(TASK),
            context=[shared],
            tokens=self._length,
            temperature=self._temperature,
            seed=next(self._seeds),
            keep=keep,
        )

    def _candidates(self, shared: State) -> tuple[list[tuple[State, tuple[int, ...]]], float]:
        """States and outputs of new candidates, all generated at once, and the seconds that took."""
        from dagengine.state import make_result

        probe = self._probe
        traces = probe.run([self._candidate(shared, keep=True) for _ in range(self._fan)])
        found = []
        for trace in traces:
            assert trace.choice is not None and len(trace.choice.token_ids) == self._length
            result = make_result(probe.llm.engine, trace.choice)
            assert result.state is not None
            found.append((result.state, result.token_ids))
        return found, traces[0].end - traces[0].begin

    def _both_ways(
        self,
        shared: State,
        candidates: list[tuple[State, tuple[int, ...]]],
        question: list[int],
        text_first: bool,
    ) -> tuple[Trace, Trace]:
        probe = self._probe
        context = [shared, *(state.artifact("output") for state, _ in candidates)]
        ids = [*self._prompt, *(token for _, output in candidates for token in output), *question]
        text = probe.generate(ids, fresh=False) if text_first else None
        as_states = probe.generate(question, context=context)
        as_text = text or probe.generate(ids, fresh=False)
        for trace in (as_states, as_text):
            assert trace.choice is not None
            dag = trace.choice.dag
            assert dag.visible + dag.input == len(ids) == self._seen, "both ways see the same tokens"
        return as_states, as_text

    def _declared(self, shared: State) -> _Declared:
        """New candidates and their judge as one submission."""
        from dagengine import ContextRef

        probe = self._probe
        candidates = [self._candidate(shared, keep=False) for _ in range(self._fan)]
        outputs = [ContextRef(request=one.id, mode="artifact", span="output") for one in candidates]
        judge = probe.request(probe.ids(self._question), context=[shared, *outputs])
        *traces, judged = probe.run([*candidates, judge])
        for trace in traces:
            assert trace.choice is not None and len(trace.choice.token_ids) == self._length
        assert judged.choice is not None
        dag = judged.choice.dag
        assert dag.visible + dag.input == self._seen, "it sees as many tokens as the other two"
        return _Declared(judged, max(trace.sampled[-1] for trace in traces))


@dataclass(frozen=True)
class _Declared:
    """A judge that was submitted with its candidates; `ended` is when their last token reached the host."""

    judge: Trace
    ended: float

    @property
    def first(self) -> float:
        """Seconds from then to the judge's first token."""
        return self.judge.sampled[0] - self.ended
