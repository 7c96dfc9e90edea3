"""`dagengine replay`: run again what records say was done, and compare token by token."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options
from .console import CommandError, new_app, print_json, print_table, read_text
from .threads import choose_threads

if TYPE_CHECKING:
    from dagengine.replay import ReplayReport

app = new_app("Run records of answers again and compare.")


@app.command(context_settings=options.SETTINGS)
def replay(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="RECORD", help="records, or answers that have them: JSON or JSON lines; - is stdin"
        ),
    ],
    model: options.Model = None,
    device: options.Device = "auto",
    max_model_len: options.MaxModelLen = None,
    kv_pages: options.KvPages = None,
    kv_memory_gib: options.KvMemoryGib = None,
    gpu_memory_utilization: options.GpuMemoryUtilization = None,
    attention_backend: options.AttentionBackend = "auto",
    load_format: options.LoadFormat = "auto",
    seed: Annotated[int | None, typer.Option(help="of dummy weights")] = None,
    chat_template: Annotated[Path | None, typer.Option(help="a file; replaces the model's")] = None,
    threads: options.Threads = None,
    config: options.Config = None,
    as_json: options.Json = False,
) -> None:
    """Run records of answers again and compare; the exit status is 1 if an answer differs.

    Determinism mode, dtype and page size are those of the first record.
    """
    from dagengine import LLM
    from dagengine.replay import find_records
    from dagengine.replay import replay as run_replay

    records = find_records(read_lines(file))
    folder = options.require_model(model)
    chosen = choose_threads(threads)
    given = {**options.engine_options(context), **({} if seed is None else {"seed": seed})}
    template = read_text(chat_template) if chat_template is not None else None
    engine = {**as_recorded(records[0]), **given}
    with LLM(folder, threads=chosen.count, chat_template=template, **engine) as llm:
        report = run_replay(llm, records)
    print_json(report_data(report)) if as_json else _print(report)
    if not report.equal:
        raise typer.Exit(1)


def read_lines(file: Path) -> Any:
    """The JSON value of a file, or the list of its lines' values. Raises CommandError."""
    text = read_text(file)
    try:
        return json.loads(text)
    except RecursionError:
        raise CommandError(f"{file} is nested too deeply", "record") from None
    except ValueError:
        pass
    values = []
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                values.append(json.loads(line))
            except (ValueError, RecursionError) as error:
                raise CommandError(f"{file}:{number} is no JSON: {error}", "record") from None
    return values


def as_recorded(record: dict[str, Any]) -> dict[str, Any]:
    """Options of an engine as the record's was. Raises CommandError for what is no record."""
    try:
        return {
            "batch_invariant": record["batch_invariant"],
            "dtype": record["signature"]["dtype"],
            "page_size": record["page_size"],
        }
    except (KeyError, TypeError) as error:
        raise CommandError(f"the record is not whole: {error}", "record") from None


def report_data(report: ReplayReport) -> dict[str, Any]:
    """JSON."""
    return {
        "equal": report.equal,
        "exact": report.exact,
        "differences": list(report.differences),
        "answers": [
            {
                "name": answer.name,
                "index": answer.index,
                "equal": answer.equal,
                "first_difference": answer.first_difference,
                "expected": list(answer.expected),
                "found": list(answer.found),
            }
            for answer in report.answers
        ],
    }


def _print(report: ReplayReport) -> None:
    rows = [
        (
            answer.name,
            answer.index,
            len(answer.expected),
            "equal" if answer.equal else "differs",
            answer.first_difference,
        )
        for answer in report.answers
    ]
    print_table("replay", ("answer", "index", "tokens", "again", "from token"), rows)
    for note in report.differences:
        print(f"then and now: {note}")
    if not report.exact:
        print(
            "equality is promised in batch-invariant mode, on the same device, versions and implementation only"
        )
