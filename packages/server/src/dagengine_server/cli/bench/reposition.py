"""`dagengine bench reposition`: what it takes to read and to store KV at other positions than it was computed at.

reading    documents read in a new order every time: queries are turned, and no byte of the documents moves
copy       `State.reposition`: one document stored again from another position on, through the engine
moves      plans over all pages of a model's shape, on an arena of their own, beside plain copies
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ..console import CommandError, say
from . import arguments
from .arguments import Common
from .judged_figures import table
from .publish import publish
from .rates import PUBLISHED, RATE, rate_of
from .record import Figure, circumstances, command_line
from .report import Bar, number, value_of

if TYPE_CHECKING:
    from dagengine import State
    from dagengine.core import EngineCore
    from dagengine.move_trials import MoveTrial

    from .probe import Probe

ANSWER = 2
"""Tokens of a reader; while the first comes it still holds its pages."""
MOVED = "bytes moved"
OF_COPY, COPY = "of the plain copy", "plain copy of this run"
COPIED = "copied through the engine"
BARS = (
    Bar(
        "reading in a new order: bytes that move",
        "read in a new order",
        MOVED,
        None,
        value_of,
        0.0,
        "B",
        False,
    ),
    Bar(
        "copies to other positions, pages shuffled",
        "llama-3.1-8b, copy, shuffled",
        RATE,
        PUBLISHED,
        value_of,
        10_000.0,
        RATE,
        True,
    ),
)
COLUMNS = (
    ("p50", RATE, "p50"),
    ("p95", RATE, "p95"),
    ("p99", RATE, "p99"),
    (OF_COPY, OF_COPY, "value"),
    ("GB/s", "bandwidth", "value"),
    ("steps", "steps", "value"),
    ("spare pages", "spare pages", "value"),
    ("host pages", "host pages", "value"),
    ("bytes written, of those asked for", "bytes written, of those asked for", "value"),
    ("planning, ms", "planning", "value"),
    ("with planning", "tokens/ms with planning", "p50"),
)
ABOUT = """Rates are tokens a millisecond of wall-clock time over all layers: the plan's arrays, their upload, every
step, and waiting for the device. They count the tokens asked for, however often a plan moves them; p95 and p99 are the
rates of the slow ends. Planning is pure Python on the host; the last columns say what it takes. Rows were checked
against float64 first. *Copied through the engine* is planning, moving and the store's own work. Beside the rates stand
500 tokens/ms, which were published for CIDRA and not measured here. Reading moves nothing and needs none of this.
"""


def reposition(
    common: Common,
    documents: Annotated[int, typer.Option(min=2, help="that are read, and whose pages are moved")] = 32,
    tokens: Annotated[int, typer.Option(min=1, help="of each document")] = 2857,
    question: Annotated[int, typer.Option(min=1, help="own tokens of a reader")] = 64,
    repeats: Annotated[int, typer.Option(min=1, help="of reads and copies")] = 10,
    moves: Annotated[int, typer.Option(min=1, help="runs of each plan of moves")] = 100,
    width: Annotated[int, typer.Option(min=1, help="pages a step should move, and spare pages")] = 32,
    cases: Annotated[str, typer.Option(help="only plans of moves whose names contain this")] = "",
) -> None:
    """KV at other positions: read there, copied there, moved there; in tokens a millisecond, beside plain copies."""
    from dagengine.move_cases import cases as all_cases
    from dagengine.move_trials import ArenaShape, try_moves

    from .probe import Probe

    page = common.page_size
    pages = documents * -(-tokens // page)
    if not any(cases in case.name for case in all_cases(pages, page, width)):
        raise CommandError(f"no plan's name contains {cases!r}", "cases")
    say(str(common.threads))
    where = circumstances(command_line("reposition"), common.threads.count)
    room = (pages + -(-tokens // page)) * page + 2 * (question + page)
    with common.folder() as model:
        say(f"loading {common.label}")
        with Probe(model, seed=common.seed, options=common.engine(tokens=room, sequences=documents)) as probe:
            longest = documents * tokens + question + ANSWER
            if longest > probe.core.max_model_len:
                limit = f"the model sees at most {probe.core.max_model_len} tokens"
                raise CommandError(f"{longest} tokens are too many: {limit}", "documents")
            say("reading and copying")
            figures = _read_and_copy(probe, common.label, documents, tokens, question, repeats)
            shape, device = ArenaShape.of(probe.core.arena), probe.device
    faults, copied = [], None
    for trial in try_moves(shape, pages, moves, width, cases):
        say(f"moved: {trial.case}")
        if trial.right:
            copied = copied or trial
            figures += _of_trial(common.label, trial, copied)
        else:
            faults.append(
                f"{trial.case}: K's error is {trial.error:.3g}, at most {trial.limit} is rounding; or V changed"
            )
    publish("reposition", figures, where.on(*device), common.destination, BARS, _summary(figures))
    if faults:
        raise CommandError("; ".join(faults), None, "wrong_result")


command = arguments.command(reposition)


def _read_and_copy(
    probe: Probe, label: str, documents: int, tokens: int, question: int, repeats: int
) -> list[Figure]:
    """Reads of all documents in a new order each; then copies of one document each to another position."""
    from .probe import Trace

    backend = probe.core.default_backend
    states = probe.prefill([probe.ids(tokens) for _ in range(documents)])
    before = _rows(probe, states)
    own = -(-(question + ANSWER) // probe.core.config.page_size)
    added, first = 0, []
    for repeat in range(-1, repeats):
        live = probe.pages_live()
        request = probe.request(
            probe.ids(question), context=probe.shuffled(states), tokens=ANSWER, position="linear"
        )
        (trace,) = probe.run([request], [Trace(want_pages=True)])
        assert trace.choice is not None
        assert trace.choice.dag.reused == trace.choice.dag.visible == documents * tokens
        added = max(added, max(trace.pages) - live - own)
        if repeat >= 0:
            first.append(trace.ttft * 1e3)
    changed = sum(
        int((old != new).sum()) * old.element_size()
        for old, new in zip(before, _rows(probe, states), strict=True)
    )
    del before
    copying = []
    room = probe.core.max_model_len - 2 * tokens
    for repeat in range(-1, repeats):
        source = states[repeat % documents]
        begin = time.perf_counter()
        moved = source.reposition(tokens + 37 * (repeat + 2) % room, copy=True)
        seconds = time.perf_counter() - begin
        moved.release()
        if repeat >= 0:
            copying.append(seconds * 1e3)
    for state in states:
        state.release()
    case = f"{label}, {documents} documents x {tokens}, read in a new order each time"
    return [
        Figure.count(case, backend, MOVED, changed + added * probe.page_bytes, "B"),
        Figure.count(case, backend, "tokens read", documents * tokens, "tokens"),
        Figure.of(case, backend, "first token", first, "ms"),
        rate_of(f"{label}, one document of {tokens}, {COPIED}", "", RATE, tokens, copying),
    ]


def _rows(probe: Probe, states: Sequence[State]) -> list[Any]:
    """Copies of the rows of states in every layer."""

    def copy(core: EngineCore) -> list[Any]:
        nodes = [core.store.resolve(state.id)[0] for state in states]
        pages = [page for node in nodes for page in node.pages]
        assert None not in pages, "the documents are resident"
        return [core.arena.layer(i)[pages] for i in range(core.arena.num_layers)]

    return probe.llm.engine.ask(copy)


def _of_trial(label: str, trial: MoveTrial, copied: MoveTrial) -> list[Figure]:
    """A trial's figures; `copied` is the plain copy."""
    case, ran, plan = f"{label}, {trial.case}", trial.implementation, trial.plan
    rate = rate_of(case, ran, RATE, trial.tokens, trial.running)
    bandwidth = 2 * trial.bytes_written / median(trial.running) / 1e6
    figures = [rate, Figure.count(case, ran, "bandwidth", bandwidth, "GB/s")]
    if plan is None:
        return figures
    plain = copied.tokens / median(copied.running)
    both = [a + b for a, b in zip(trial.planning, trial.running, strict=True)]
    asked = trial.tokens * trial.token_bytes
    figures += [
        Figure.count(case, ran, OF_COPY, rate.value / plain, "x").against(COPY, 1.0),
        rate_of(case, ran, "tokens/ms with planning", trial.tokens, both),
        Figure.of(case, ran, "planning", trial.planning, "ms"),
    ]
    for metric, value, unit in (
        ("error", trial.error, ""),
        ("tokens", trial.tokens, "tokens"),
        ("steps", len(plan.steps), ""),
        ("spare pages", plan.num_spare_pages, "pages"),
        ("host pages", plan.num_host_pages, "pages"),
        ("bytes written", trial.bytes_written, "B"),
        ("bytes written, of those asked for", trial.bytes_written / asked, "x"),
    ):
        figures.append(Figure.count(case, ran, metric, value, unit))
    if trial.layer_by_layer:
        alone = rate_of(case, "cuda, layer by layer", RATE, trial.tokens, trial.layer_by_layer)
        figures += [
            alone,
            Figure.count(case, alone.backend, OF_COPY, alone.value / plain, "x").against(COPY, 1.0),
        ]
    return figures


def _summary(figures: Sequence[Figure]) -> str:
    """A row for every case and what ran it."""
    known = {(figure.case, figure.backend, figure.metric): figure for figure in figures}
    rows = []
    for case, backend in dict.fromkeys((f.case, f.backend) for f in figures if f.metric in (RATE, MOVED)):
        found = [(known.get((case, backend, metric)), field) for _, metric, field in COLUMNS]
        rows.append([case, backend, *("" if f is None else number(getattr(f, field)) for f, field in found)])
        moved = known.get((case, backend, MOVED))
        if moved is not None:
            rows[-1][2] = f"{number(moved.value)} B moved"
    return f"{ABOUT}\n{table(['case', 'what ran', *(title for title, _, _ in COLUMNS)], rows)}"
