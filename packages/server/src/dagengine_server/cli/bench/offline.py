"""`dagengine bench offline`: plain prompts of token ids, so many streams at once, in this process.

For every number of streams: the rate of output tokens until all are done, the rate of input tokens of the same
requests when one token is asked for (prefill), and the decode step, the time that the further tokens took:

    decode step = (seconds with all outputs - seconds with one token each) / (longest output - 1)

These three need nothing of an engine but that it takes a list of requests, so that other engines are measured the same
way. Of ours there are TTFT, ITL, TPOT and E2E too, and with one stream the time per token beside the bytes it reads. On
a GPU there is the host time not hidden: the share of decode steps that it waited, at most, until a step was queued.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated

import typer

from ..console import CommandError, say, suggestion
from . import arguments
from .arguments import Common, counts
from .latency import latency_figures
from .lengths import Lengths, fixed, fixed_sizes, sharegpt
from .peers import PEERS, Peer
from .publish import publish
from .record import Figure, circumstances, command_line
from .report import Bar, ratio_of, value_of

if TYPE_CHECKING:
    from .bandwidth import Bandwidth
    from .load import OwnEngine

STREAMS = (1, 8, 64)
ENGINES = ("dagengine", *PEERS)
FLOOR = "its bytes at the measured bandwidth"
HOST_TIME = "host time not hidden"
PUBLISHED = {
    "llama-3.1-8b": {1: 192.0, 8: 1208.0, 64: 3280.0, 256: 3913.0},
    "qwen3-0.6b": {1: 501.0, 8: 4054.0, 64: 11966.0, 256: 14789.0},
}
"""Output tokens a second at so many streams of 1,024 and 128 tokens: the better of vLLM 0.26.0 and SGLang 0.5.17 on an
H200, 2026-11-29, with random weights in bfloat16, CUDA graphs and prefix caching."""

PREFILL = 45_000.0
BARS = (
    Bar("single-stream decode step, 8B shape", "llama-3.1-8b, 1 stream,", "time per token", FLOOR, ratio_of, 1.2,
        "x", False),
    Bar("decode step of 64 streams, 8B shape", "llama-3.1-8b, 64 streams,", "decode step", FLOOR, ratio_of, 1.25,
        "x", False),
    Bar("share of a decode step of 64 streams that a GPU waits for the host, 8B shape", "llama-3.1-8b, 64 streams,",
        HOST_TIME, None, value_of, 3.0, "%", False),
    *(
        Bar(f"prefill of {n} x 1024 on an H200, 8B shape", f"llama-3.1-8b, {n} streams, {n} requests, in 1024,",
            "prefill rate", None, value_of, PREFILL, "tokens/s", True)
        for n in (8, 64)
    ),
    *(
        Bar(f"{shape}, {n} stream{'s' if n > 1 else ''} on an H200: the better peer",
            f"{shape}, {n} stream{'s' if n > 1 else ''}, {n} requests, in 1024, out 128", "output rate", None,
            value_of, rate, "tokens/s", True)
        for shape, rates in PUBLISHED.items()
        for n, rate in rates.items()
    ),
)  # fmt: skip


def offline(
    common: Common,
    streams: Annotated[
        list[int] | None, typer.Option(help="requests at once, repeatable  [default: 1, 8, 64]")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="in all, per number of streams  [default: as many as streams]")
    ] = None,
    lengths: Annotated[str, typer.Option(metavar="{sharegpt,fixed}")] = "fixed",
    input_len: Annotated[
        int | None, typer.Option(min=1, help="tokens of every prompt, with fixed lengths  [default: 1024]")
    ] = None,
    output_len: Annotated[
        int | None, typer.Option(min=2, help="tokens of every answer, with fixed lengths  [default: 128]")
    ] = None,
    repeats: Annotated[int, typer.Option(min=1)] = 3,
    engine: Annotated[str, typer.Option(metavar="{dagengine,vllm,sglang}")] = "dagengine",
) -> None:
    """Throughput and latency of plain prompts, here or in another engine that is installed."""
    if engine not in ENGINES:
        raise CommandError(
            f"one of {', '.join(ENGINES)}, not {engine!r}{suggestion(engine, ENGINES)}", "engine"
        )
    input_tokens, output_tokens = fixed_sizes(lengths, input_len, output_len)
    many = counts(streams, STREAMS, "streams")
    total = {count: requests or count for count in many}
    if engine != "dagengine" and any(total[count] > count for count in many):
        message = (
            f"{engine} is given all requests at once: leave it out, and say with --streams how many there are"
        )
        raise CommandError(message, "requests")
    sizes = {
        count: sharegpt(total[count], common.seed)
        if lengths == "sharegpt"
        else fixed(total[count], input_tokens, output_tokens)
        for count in many
    }
    says = "ShareGPT-like lengths" if lengths == "sharegpt" else f"in {input_tokens}, out {output_tokens}"
    say(str(common.threads))
    where = circumstances(command_line("offline"), common.threads.count)
    figures: list[Figure] = []
    with ExitStack() as stack:
        model = stack.enter_context(common.folder())
        say(f"loading {common.label} into {engine}")
        peer, own, bandwidth = _engine(stack, engine, model, common, sizes, max(many))
        if bandwidth is not None:
            figures.append(bandwidth.figure)
        for count in many:
            say(f"measuring {count} streams")
            name = f"{count} stream{'s' if count > 1 else ''}"
            case = f"{common.label}, {name}, {total[count]} requests, {says}"
            runs = _Runs(peer, own, bandwidth, case, count, sizes[count])
            figures += runs.measure(repeats)
        device, versions = peer.device
    promised = () if common.given.get("batch_invariant") else BARS
    publish("offline", figures, where.on(device, versions), common.destination, promised)


command = arguments.command(offline)


def _engine(
    stack: ExitStack,
    name: str,
    model: str,
    common: Common,
    sizes: dict[int, list[Lengths]],
    streams: int,
) -> tuple[Peer, OwnEngine | None, Bandwidth | None]:
    """What to measure; of our own engine also what it tells beside its answers, and the device's bandwidth."""
    longest = max(size.input + size.output for found in sizes.values() for size in found)
    if name != "dagengine":
        dummy = common.shape is not None or common.given.get("load_format") == "dummy"
        return stack.enter_context(PEERS[name](model, common, longest, dummy=dummy)), None, None
    from .bandwidth import Bandwidth
    from .load import OwnEngine
    from .probe import Probe

    page = common.page_size
    room = streams * (-(-(longest + 1) // page) + 1) * page
    options = common.engine(tokens=2 * room, sequences=streams)
    probe = stack.enter_context(Probe(model, seed=common.seed, options=options))
    own = OwnEngine(probe)
    return own, own, Bandwidth.measured(probe)


class _Runs:
    """The runs of one number of streams."""

    def __init__(
        self,
        peer: Peer,
        own: OwnEngine | None,
        bandwidth: Bandwidth | None,
        case: str,
        streams: int,
        sizes: Sequence[Lengths],
    ) -> None:
        self._peer, self._own, self._bandwidth = peer, own, bandwidth
        self._case, self._streams, self._sizes = case, streams, sizes

    def measure(self, repeats: int) -> list[Figure]:
        """Prefill alone, then everything, in turns; the first turn is a warm-up. All prompts are fresh."""
        peer, sizes, case = self._peer, self._sizes, self._case
        prefills: list[float] = []
        wholes: list[float] = []
        steps: list[float] = []
        if self._own is not None:
            self._own.streams.clear()
            self._own.host_shares.clear()
        longest = max(size.output for size in sizes)
        for repeat in range(-1, repeats):
            short = self._seconds([Lengths(size.input, 1) for size in sizes], told=False)
            whole = self._seconds(sizes, told=repeat >= 0)
            if repeat < 0:
                continue
            prefills.append(sum(size.input for size in sizes) / short)
            wholes.append(sum(size.output for size in sizes) / whole)
            if len(sizes) <= self._streams:
                steps.append((whole - short) / (longest - 1) * 1e3)
        backend = peer.name
        figures = [
            Figure.of(case, backend, "output rate", wholes, "tokens/s"),
            Figure.of(case, backend, "prefill rate", prefills, "tokens/s"),
        ]
        if steps:
            step = Figure.of(case, backend, "decode step", steps, "ms")
            figures.append(self._beside(step) if len(set(sizes)) == 1 else step)
        if self._own is not None:
            figures += latency_figures(case, backend, self._own.streams)
            if self._own.host_shares:
                shares = [100 * share for share in self._own.host_shares]
                figures.append(Figure.of(case, backend, HOST_TIME, shares, "%"))
            if self._streams == 1:
                gaps = [gap * 1e3 for stream in self._own.streams for gap in stream.intervals_s]
                figures.append(self._beside(Figure.of(case, backend, "time per token", gaps, "ms")))
        return figures

    def _beside(self, figure: Figure) -> Figure:
        """A step's time beside the time to read the weights once and what its streams see on average."""
        if self._own is None or self._bandwidth is None:
            return figure
        mean = sum(size.input + size.output / 2 for size in self._sizes) / len(self._sizes)
        return self._bandwidth.beside(figure, self._own.costs.step_bytes(round(self._streams * mean)))

    def _seconds(self, sizes: Sequence[Lengths], *, told: bool) -> float:
        """Until all are done; where `told`, our own engine's streams are kept."""
        peer = self._peer
        jobs = [(peer.ids(size.input), size.output) for size in sizes]
        begin = time.perf_counter()
        if self._own is not None:
            self._own.run(jobs, self._streams, keep=told)
        else:
            peer.run(jobs, self._streams)
        return time.perf_counter() - begin
