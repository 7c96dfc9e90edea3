"""`dagengine bench serve`: load on any OpenAI-compatible server over HTTP, streamed: ours, vLLM's, SGLang's.

Requests come at a rate (a Poisson process from the seed) or as fast as `--streams` allows. Prompts are token ids, or
words, drawn from the seed; answers are greedy and of the full length (`ignore_eos`), so that runs are alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import options
from ..console import CommandError, print_table, say
from .arguments import Markdown, Output
from .latency import MEASURES, Objective, Stream, latency_figures
from .lengths import fixed, fixed_sizes, sharegpt
from .publish import Destination, check_writable, publish
from .record import Figure, circumstances, command_line, percentile
from .report import number

if TYPE_CHECKING:
    from .http_load import Outcome

QUANTILES = (0.5, 0.9, 0.99)


def command(
    context: typer.Context,
    url: Annotated[
        str, typer.Option(help="of the server, such as http://127.0.0.1:8000")
    ] = "http://127.0.0.1:8000",
    model: Annotated[
        str | None, typer.Option("--model", "-m", help="the name it serves  [default: its first]")
    ] = None,
    api_key: Annotated[str | None, typer.Option()] = None,
    streams: Annotated[int, typer.Option(min=1, help="most requests at once")] = 64,
    request_rate: Annotated[
        float | None, typer.Option(min=0.001, help="requests a second  [default: as fast as streams allow]")
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="in all")] = 256,
    warm_up: Annotated[int, typer.Option(min=0, help="requests before, not measured")] = 8,
    lengths: Annotated[str, typer.Option(metavar="{sharegpt,fixed}")] = "sharegpt",
    input_len: Annotated[
        int | None, typer.Option(min=1, help="tokens of every prompt, with fixed lengths  [default: 1024]")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=1, help="tokens of every answer, with fixed lengths  [default: 128]")
    ] = None,
    text: Annotated[
        bool, typer.Option("--text", help="prompts of random words, in place of token ids")
    ] = False,
    highest_id: Annotated[int, typer.Option(min=101, help="token ids are drawn below it")] = 30000,
    slo_ttft: Annotated[
        float | None, typer.Option(min=0.001, help="ms to the first token that count as served well")
    ] = None,
    slo_tpot: Annotated[float | None, typer.Option(min=0.001, help="ms per further token")] = None,
    slo_e2e: Annotated[float | None, typer.Option(min=0.001, help="ms to the last token")] = None,
    timeout: Annotated[float, typer.Option(min=1, help="seconds that one request may take")] = 600.0,
    seed: Annotated[int, typer.Option(help="of lengths, arrivals and prompts")] = 0,
    config: options.Config = None,
    output: Output = None,
    markdown: Markdown = None,
    as_json: options.Json = False,
) -> None:
    """Latency and throughput of any OpenAI-compatible server, streamed, at a rate or so many requests at once."""
    from .http_load import Load, run_load, served_model

    input_tokens, output_tokens = fixed_sizes(lengths, input_len, output_len)
    check_writable({"output": output, "markdown": markdown})
    sizes = (
        sharegpt(warm_up + requests, seed)
        if lengths == "sharegpt"
        else fixed(warm_up + requests, input_tokens, output_tokens)
    )
    objective = Objective(slo_ttft, slo_tpot, slo_e2e)
    where = circumstances(command_line("serve"), None)
    load = Load(
        url=url,
        model=served_model(url, api_key) if model is None else model,
        api_key=api_key,
        sizes=sizes[warm_up:],
        streams=streams,
        rate=request_rate,
        words=text,
        highest_id=highest_id,
        timeout_s=timeout,
        seed=seed + 1,
    )
    if warm_up:
        say(f"warming up with {warm_up} requests")
        run_load(replace(load, sizes=sizes[:warm_up], rate=None, seed=seed + 2))
    say(f"sending {requests} requests")
    outcomes, seconds = run_load(load)
    good = [outcome for outcome in outcomes if outcome.error is None]
    errors = [outcome.error for outcome in outcomes if outcome.error is not None]
    if errors:
        say(f"{len(errors)} of {requests} requests failed, the first: {errors[0]}")
    if not good:
        raise CommandError(f"every request failed, the first: {errors[0]}", "url", "unavailable")
    pace = f"{request_rate:g} requests/s" if request_rate is not None else f"{streams} streams"
    says = "ShareGPT-like lengths" if lengths == "sharegpt" else f"in {input_tokens}, out {output_tokens}"
    case = f"{Path(load.model).name}, {pace}, {requests} requests, {says}"
    figures = [
        *_rates(case, good, len(errors), seconds),
        *latency_figures(case, "", [o.stream for o in good]),
    ]
    if objective.given:
        figures += _goodput(case, good, requests, seconds, objective)
    if not as_json:
        _print_percentiles([outcome.stream for outcome in good])
    publish("serve", figures, where, Destination(output, markdown, False, as_json))
    if errors:
        raise typer.Exit(1)


def _rates(case: str, good: Sequence[Outcome], failed: int, seconds: float) -> list[Figure]:
    output = sum(outcome.stream.tokens or 0 for outcome in good)
    given = sum(outcome.input_tokens for outcome in good)
    return [
        Figure.count(case, "", "output rate", output / seconds, "tokens/s"),
        Figure.count(case, "", "input rate", given / seconds, "tokens/s"),
        Figure.count(case, "", "request rate", len(good) / seconds, "requests/s"),
        Figure.count(case, "", "failed requests", failed, "requests"),
    ]


def _goodput(
    case: str, good: Sequence[Outcome], requests: int, seconds: float, objective: Objective
) -> list[Figure]:
    """Of all requests that were sent; a failed one was not served well."""
    met = sum(objective.met(outcome.stream) for outcome in good)
    return [
        Figure.count(case, "", f"goodput, {objective}", met / seconds, "requests/s"),
        Figure.count(case, "", f"served well, {objective}", met / requests, "fraction"),
    ]


def _print_percentiles(streams: Sequence[Stream]) -> None:
    rows = []
    for name, measure in MEASURES.items():
        samples = sorted(value * 1e3 for stream in streams for value in measure(stream))
        if samples:
            mean = sum(samples) / len(samples)
            rows.append((name, *(number(v) for v in (mean, *(percentile(samples, q) for q in QUANTILES)))))
    print_table("milliseconds", ("", "mean", "p50", "p90", "p99"), rows)
