"""`dagengine audit`: whether the order that a span query declares free changes what this model answers."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import options
from .console import new_app, print_json, print_table, say
from .queries import Corpus, RetrieverName, corpora_of, read_query
from .threads import choose_threads

if TYPE_CHECKING:
    from dagengine.audit import AuditReport, Change

app = new_app("Run a span query under permutations of every + and say what changes.")
SHOWN = 60


@app.command(context_settings=options.SETTINGS)
def audit(
    context: typer.Context,
    file: Annotated[Path, typer.Argument(help="a span query as JSON; - reads standard input")],
    model: options.Model = None,
    runs: Annotated[int, typer.Option(min=1, help="permutations to try")] = 8,
    seed: Annotated[int, typer.Option(help="of the permutations, and of calls that name none")] = 0,
    max_tokens: Annotated[int, typer.Option(min=1, help="of calls that name none")] = 256,
    reduce: Annotated[
        int | None, typer.Option(min=2, help="reduce judges that are declared closed to so many candidates")
    ] = None,
    corpus: Corpus = None,
    retriever: RetrieverName = "fts5",
    device: options.Device = "auto",
    dtype: options.Dtype = "auto",
    max_model_len: options.MaxModelLen = None,
    page_size: options.PageSize = 64,
    kv_pages: options.KvPages = None,
    kv_memory_gib: options.KvMemoryGib = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    batch_invariant: options.BatchInvariant = False,
    attention_backend: options.AttentionBackend = "auto",
    position_policy: options.PositionPolicy = "linear",
    load_format: options.LoadFormat = "auto",
    threads: options.Threads = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Run a span query under permutations of every + and say what changes."""
    query = read_query(file)
    folder = options.require_model(model)
    chosen = choose_threads(threads)

    from dagengine import LLM
    from dagengine.audit import audit as run_audit

    engine = {**options.engine_options(context), "seed": seed}
    with (
        closing(corpora_of(corpus, retriever)) as corpora,
        LLM(folder, position=position_policy, threads=chosen.count, **engine) as llm,
    ):
        report = run_audit(
            llm,
            query,
            runs=runs,
            seed=seed,
            max_tokens=max_tokens,
            reduce=reduce,
            retriever=corpora,
            on_run=lambda done, total: say(f"{done} of {total} runs"),
        )
    print_json(report.data()) if as_json else _print(report)


def _print(report: AuditReport) -> None:
    rows = [
        (
            call.path,
            "yes" if call.path in report.answers else "no",
            f"{call.agreement:.0%}",
            _where(list(call.changes)),
            _where([call.control] if call.control else []),
            _where([call.plain] if call.plain else []),
            _cut(call.text),
        )
        for call in report.calls
    ]
    columns = ("call", "in the result", "agreement", "changed", "control", "plain prompt", "answer")
    print_table(f"{report.runs} permutations", columns, rows)
    for call in report.calls:
        for change in call.changes:
            print(f"run {change.run}: {call.path} differs from token {change.first_difference} on: "
                  f"{_cut(change.text)!r}")  # fmt: skip
    print(f"least agreement of an answer: {report.agreement:.0%}")
    print(f"calls that answer a plain prompt the same: {report.plain_agreement:.0%}")
    if not report.batch_invariant:
        print("the engine ran without --batch-invariant: rounding may change an answer too, see the control")


def _where(changes: list[Change]) -> str:
    if not changes:
        return "-"
    first = min(change.first_difference for change in changes)
    return f"{len(changes)}, from token {first}"


def _cut(text: str) -> str:
    return text if len(text) <= SHOWN else text[: SHOWN - 1] + "…"
