"""`dagengine bench branches`: fork one state into branches, run them at once, merge them, under policy `native`.

together   all branches in one submission, over the shared state
alone      some of them again, one at a time: greedy, so with --batch-invariant the tokens are the same
separate   plain requests of shared text and branch prompt, which find the shared text's pages again
merged     one request that reads the shared state and every branch, where they lie
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import say
from . import arguments
from .arguments import Common, counts
from .publish import publish
from .record import Figure, circumstances, command_line
from .report import Bar, value_of

if TYPE_CHECKING:
    from dagengine import State

    from .probe import Probe, Trace

ANSWER = 2
"""Tokens of the request that merges; while the first comes it still holds its pages."""

BRANCHES = (16, 64, 128)
EQUAL = "branches with the tokens of the branch alone"
BARS = tuple(
    Bar(
        f"{count} branches, tokens equal to each alone",
        f"{count} branches",
        EQUAL,
        None,
        value_of,
        1.0,
        "",
        True,
    )
    for count in BRANCHES
)


def branches(
    common: Common,
    branches: Annotated[
        list[int] | None, typer.Option("--branches", help="how many, repeatable  [default: 16, 64, 128]")
    ] = None,
    shared: Annotated[int, typer.Option(min=1, help="tokens of the state that is forked")] = 1024,
    prompt: Annotated[int, typer.Option(min=1, help="own input tokens of a branch")] = 16,
    tokens: Annotated[int, typer.Option(min=2, help="that a branch samples")] = 128,
    question: Annotated[int, typer.Option(min=1, help="own tokens of the request that merges")] = 16,
    alone: Annotated[int, typer.Option(min=1, help="branches that are run alone, at most")] = 16,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
) -> None:
    """Branches of one state at once under `native`: their tokens, their throughput, and merging them."""
    from .probe import Probe

    many = counts(branches, BRANCHES, "branches")
    say(str(common.threads))
    where = circumstances(command_line("branches"), common.threads.count)
    page = common.page_size
    tail = -(-(prompt + tokens) // page) * page + page
    room = 2 * (shared + page) + max(many) * 2 * tail + question + page
    figures: list[Figure] = []
    with common.folder() as model:
        say(f"loading {common.label}")
        engine = common.engine(tokens=room, sequences=max(many) + 1)
        with Probe(model, seed=common.seed, options=engine) as probe:
            for branch_count in many:
                say(f"measuring {branch_count} branches")
                sizes = f"{branch_count} branches of {tokens} over {shared}"
                runs = _Branching(probe, branch_count, shared, prompt, tokens, question)
                figures += runs.measure(f"{common.label}, {sizes}", min(alone, branch_count), repeats)
            device = probe.device
    promised = BARS if common.given.get("batch_invariant") else ()
    publish("branches", figures, where.on(*device), common.destination, promised)


command = arguments.command(branches)


class _Branching:
    """Branches of one state that is new to every instance."""

    def __init__(
        self, probe: Probe, count: int, shared: int, prompt: int, tokens: int, question: int
    ) -> None:
        self._probe, self._count, self._tokens, self._question = probe, count, tokens, question
        self._shared = probe.ids(shared)
        self._prompt = prompt

    def measure(self, case: str, alone: int, repeats: int) -> list[Figure]:
        """Together and separate take turns at going first; the first repeat is a warm-up, of new branches each."""
        probe, backend = self._probe, self._probe.core.default_backend
        (trunk,) = probe.prefill([self._shared])
        together: list[float] = []
        separate: list[float] = []
        merging: list[float] = []
        added: list[int] = []
        equal_alone = equal_plain = compared = 0
        for repeat in range(-1, repeats):
            prompts = [probe.ids(self._prompt) for _ in range(self._count)]
            if repeat % 2:
                plain = self._separate(prompts)
                traces = self._together(trunk, prompts)
            else:
                traces = self._together(trunk, prompts)
                plain = self._separate(prompts)
            seconds, pages, states = self._merge(trunk, traces)
            for state in states:
                state.release()
            if repeat < 0:
                continue
            together.append(self._rate(traces))
            separate.append(self._rate(plain))
            merging.append(seconds * 1e3)
            added.append(pages)
            equal_plain += sum(_tokens(a) == _tokens(b) for a, b in zip(traces, plain, strict=True))
            if repeat == 0:
                again = [self._branch(trunk, ids) for ids in prompts[:alone]]
                equal_alone += sum(_tokens(a) == _tokens(b) for a, b in zip(traces, again, strict=False))
                compared += len(again)
        trunk.release()
        rate = Figure.of(
            case, backend, "output rate, separate requests with prefix reuse", separate, "tokens/s"
        )
        total = repeats * self._count
        own = -(-(self._question + ANSWER) // probe.core.config.page_size)
        return [
            Figure.of(case, backend, "output rate", together, "tokens/s").against(
                "separate requests", rate.value
            ),
            rate,
            _fraction(case, backend, EQUAL, equal_alone, compared),
            _fraction(case, backend, "branches with the tokens of the separate request", equal_plain, total),
            Figure.of(case, backend, "first token of the merge", merging, "ms"),
            Figure.of(case, "", "KV pages added by the merge", added, "pages").against("own", own),
        ]

    def _rate(self, traces: Sequence[Trace]) -> float:
        """Output tokens a second from submission to the last of all tokens."""
        return self._count * self._tokens / (max(t.sampled[-1] for t in traces) - traces[0].begin)

    def _together(self, trunk: State, prompts: Sequence[list[int]]) -> list[Trace]:
        probe = self._probe
        return probe.run(
            [
                probe.request(ids, context=[trunk], tokens=self._tokens, position="native", keep=True)
                for ids in prompts
            ]
        )

    def _branch(self, trunk: State, ids: list[int]) -> Trace:
        probe = self._probe
        (trace,) = probe.run([probe.request(ids, context=[trunk], tokens=self._tokens, position="native")])
        return trace

    def _separate(self, prompts: Sequence[list[int]]) -> list[Trace]:
        probe = self._probe
        return probe.run([probe.request([*self._shared, *ids], tokens=self._tokens) for ids in prompts])

    def _merge(self, trunk: State, traces: Sequence[Trace]) -> tuple[float, int, list[State]]:
        """Seconds to the first token of a request over trunk and branches, the pages it added, and the branches."""
        from dagengine.state import make_result

        from .probe import Trace

        probe = self._probe
        states = []
        for trace in traces:
            assert trace.choice is not None
            state = make_result(probe.llm.engine, trace.choice).state
            assert state is not None
            states.append(state)
        before = probe.pages_live()
        request = probe.request(
            probe.ids(self._question), context=[trunk, *states], tokens=ANSWER, position="native"
        )
        (merged,) = probe.run([request], [Trace(want_pages=True)])
        assert merged.choice is not None
        dag = merged.choice.dag
        assert dag.reused == dag.visible, "a merge copies and computes nothing of what it reads"
        return merged.ttft, max(merged.pages) - before, states


def _fraction(case: str, backend: str, metric: str, found: int, n: int) -> Figure:
    return replace(Figure.count(case, backend, metric, found / n, "fraction"), n=n)


def _tokens(trace: Trace) -> tuple[int, ...]:
    assert trace.choice is not None
    return trace.choice.token_ids
