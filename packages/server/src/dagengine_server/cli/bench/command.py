"""`dagengine bench dag`: which measurements run, in which order, and where their figures go."""

from __future__ import annotations

import gc
import shlex
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .. import options
from ..console import CommandError, new_app, print_json, print_table, say
from ..threads import choose_threads
from .baseline import Transformers, transformers_available
from .record import Circumstances, Figure, circumstances, dump_lines
from .report import markdown, number, verdicts
from .settings import Settings

if TYPE_CHECKING:
    from .probe import Probe

BACKENDS = ("naive", "packed", "segmented")
PARTS = ("planning", "chain", "backends", "first-token", "single-stream", "streams", "readers")
PAGES_TO_SPARE = 8

app = new_app("Measure one model on this machine, each figure beside its baseline.")


@app.callback()
def bench() -> None:
    """Measure one model on this machine, each figure beside its baseline."""


@app.command(context_settings=options.SETTINGS)
def dag(
    context: typer.Context,
    model: options.Model = None,
    only: Annotated[list[str] | None, typer.Option(help=f"a part, repeatable: {', '.join(PARTS)}")] = None,
    backends: Annotated[
        list[str] | None, typer.Option("--backend", help="repeatable  [default: naive, packed, segmented]")
    ] = None,
    attention_backend: options.AttentionBackend = "auto",
    fragments: Annotated[int, typer.Option(min=1)] = 16,
    fragment_length: Annotated[int, typer.Option(min=1)] = 256,
    question: Annotated[int, typer.Option(min=1, help="own tokens of a request over fragments")] = 64,
    decode: Annotated[int, typer.Option(min=1, help="tokens decoded over the fragments")] = 32,
    prompt: Annotated[int, typer.Option(min=1, help="tokens, where there is no context")] = 128,
    answer: Annotated[int, typer.Option(min=8, help="tokens, where there is no context")] = 64,
    streams: Annotated[int, typer.Option(min=2)] = 16,
    readers: Annotated[int, typer.Option(min=1)] = 32,
    shared: Annotated[int, typer.Option(min=1, help="tokens of the state that the readers share")] = 4096,
    repeats: Annotated[int, typer.Option(min=1)] = 10,
    baseline_repeats: Annotated[int, typer.Option(min=1, help="of plain prefills, which are slow")] = 3,
    transformers: Annotated[bool, typer.Option(help="measure transformers beside it, if installed")] = True,
    dtype: options.Dtype = "float32",
    page_size: options.PageSize = 64,
    load_format: options.LoadFormat = "auto",
    seed: Annotated[int, typer.Option(help="of the random inputs")] = 0,
    threads: options.Threads = None,
    config: options.Config = None,
    output: Annotated[
        Path | None, typer.Option(help="write figures as lines of JSON", dir_okay=False)
    ] = None,
    page: Annotated[Path | None, typer.Option("--markdown", help="write a page", dir_okay=False)] = None,
    check: Annotated[bool, typer.Option("--check", help="exit with 1 if a bar was missed")] = False,
    as_json: options.Json = False,
) -> None:
    """Compile, layout, KV preparation, first token, decode, and bytes, by backend, beside their baselines."""
    parts = _parts(only or [])
    settings = Settings(
        fragments=fragments,
        fragment_length=fragment_length,
        question=question,
        decode=decode,
        prompt=prompt,
        answer=answer,
        streams=streams,
        readers=readers,
        shared=shared,
        repeats=repeats,
        baseline_repeats=baseline_repeats,
    )
    if question > page_size:
        raise CommandError("at most a page, so that no run reuses another's", "question")
    chosen = choose_threads(threads)
    say(str(chosen))
    where = circumstances(shlex.join(["dagengine", "bench", "dag", *_arguments()]), chosen.count)
    engine = {
        "dtype": dtype,
        "page_size": page_size,
        "load_format": load_format,
        "seed": seed,
        "threads": chosen.count,
        "attention_backend": attention_backend,
        "max_num_seqs": max(64, streams, readers),
        "kv_pages": _pages(settings, page_size),
    }
    figures = _measure(
        options.require_model(model), settings, parts, tuple(backends or BACKENDS), engine, transformers, seed
    )
    _publish(figures, where, output, page, as_json)
    if check and any(verdict.word == "FAIL" for verdict in verdicts(figures)):
        raise typer.Exit(1)


def _measure(
    model: str,
    settings: Settings,
    parts: list[str],
    backends: tuple[str, ...],
    engine: dict[str, object],
    compare: bool,
    seed: int,
) -> list[Figure]:
    from . import decoding, memory, merging, planned
    from .probe import Probe

    figures: list[Figure] = []
    without_model: dict[str, Callable[[], list[Figure]]] = {
        "planning": lambda: planned.measure_planning(model, max(20, settings.repeats)),
        "chain": lambda: planned.measure_chain(max(5, settings.repeats)),
    }
    # As `dagengine serve` does it.
    gc.collect()
    gc.freeze()
    for part in [part for part in parts if part in without_model]:
        say(f"measuring {part}")
        figures += _apart(without_model[part])
    if all(part in without_model for part in parts):
        return figures
    say(f"loading {model}")
    with Probe(model, seed=seed, options=engine) as probe:
        baseline = _baseline(model, str(engine["dtype"]), compare, parts, probe)
        with_model: dict[str, Callable[[Probe], list[Figure]]] = {
            "backends": lambda p: merging.measure_backends(p, settings, backends),
            "first-token": lambda p: merging.measure_first_token(p, settings, baseline),
            "single-stream": lambda p: decoding.measure_single_stream(p, settings, baseline),
            "streams": lambda p: decoding.measure_streams(p, settings),
            "readers": lambda p: memory.measure_readers(p, settings),
        }
        for part in [part for part in parts if part in with_model]:
            say(f"measuring {part}")
            figures += _apart(lambda part=part: with_model[part](probe))
    return figures


def _apart(measure: Callable[[], list[Figure]]) -> list[Figure]:
    """Measure on a thread that ends with the part, and with it the OpenMP workers that it may have started."""
    with ThreadPoolExecutor(1, "bench") as pool:
        return pool.submit(measure).result()


def _baseline(model: str, dtype: str, compare: bool, parts: list[str], probe: Probe) -> Transformers | None:
    if not compare or not {"first-token", "single-stream"} & set(parts):
        return None
    if not transformers_available():
        say("transformers is not installed: its figures are left out")
        return None
    from dagengine.build import find_model

    def on_engine(function: Callable[[], Any]) -> Any:
        return probe.llm.engine.call(lambda _: function()).result()

    return Transformers(str(find_model(model)), "float32" if dtype == "auto" else dtype, on_engine)


def _parts(asked: list[str]) -> list[str]:
    for part in asked:
        if part not in PARTS:
            raise CommandError(f"{part!r} is not one of {', '.join(PARTS)}", "only")
    return [part for part in PARTS if not asked or part in asked]


def _pages(settings: Settings, page_size: int) -> int:
    """Enough for everything that is cached at once and for what runs over it, in every part."""

    def pages(tokens: int) -> int:
        return -(-tokens // page_size)

    own = pages(settings.question + settings.decode + 1)
    fragments = settings.fragments * pages(settings.fragment_length)
    plain = 2 * pages(settings.visible + settings.question + 1)
    stream = settings.streams * pages(settings.prompt + settings.answer + 1)
    shared = pages(settings.shared) + settings.readers * pages(64)
    return fragments + plain + own + max(stream, shared) + PAGES_TO_SPARE


def _arguments() -> list[str]:
    """The arguments after `bench dag`, as they were given."""
    return sys.argv[3:] if sys.argv[1:3] == ["bench", "dag"] else []


def _publish(
    figures: list[Figure], where: Circumstances, output: Path | None, page: Path | None, as_json: bool
) -> None:
    if output is not None:
        output.write_text(dump_lines(figures, where), encoding="utf-8")
    if page is not None:
        page.write_text(markdown(figures, where, "`dagengine bench dag`"), encoding="utf-8")
    if as_json:
        for figure in figures:
            print_json(asdict(figure) | asdict(where), indent=None)
        return
    columns = ("case", "backend", "metric", "value", "unit", "n", "p95", "p99", "baseline", "ratio")
    rows = [
        (
            f.case,
            f.backend,
            f.metric,
            number(f.value),
            f.unit,
            f.n,
            number(f.p95),
            number(f.p99),
            f"{f.baseline}: {number(f.baseline_value)}" if f.baseline else "",
            number(f.ratio),
        )
        for f in figures
    ]
    print_table("figures", columns, rows)
    bars = [(v.bar.title, v.goal, v.measured, v.word) for v in verdicts(figures) if v.figure is not None]
    print_table("bars", ("bar", "goal", "measured", ""), bars)
    print(where.hardware)
