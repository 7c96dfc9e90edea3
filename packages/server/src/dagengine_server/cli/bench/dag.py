"""`dagengine bench dag`: the stages of a request over fragments by backend, and plain decoding, part by part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Annotated, Any

import typer

from ...garbage import seldom_collected
from ..console import CommandError, say
from . import arguments
from .arguments import Common
from .baseline import Transformers, transformers_available
from .publish import publish
from .record import Figure, circumstances, command_line
from .report import BARS
from .settings import Settings

if TYPE_CHECKING:
    from .probe import Probe

BACKENDS = ("naive", "packed", "segmented", "fused")
PARTS = ("planning", "chain", "backends", "first-token", "single-stream", "streams", "readers")


def dag(
    common: Common,
    only: Annotated[list[str] | None, typer.Option(help=f"a part, repeatable: {', '.join(PARTS)}")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(
            "--backend", help="repeatable  [default: naive, packed, segmented, fused, where they run]"
        ),
    ] = None,
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
    if question > common.page_size:
        raise CommandError("at most a page, so that no run reuses another's", "question")
    say(str(common.threads))
    where = circumstances(command_line("dag"), common.threads.count)
    with common.folder() as model:
        run = _Run(common, settings, parts, backend, transformers)
        figures = run.measure(model)
    publish("dag", figures, where.on(*run.device), common.destination, BARS)


command = arguments.command(dag)


class _Run:
    """The parts of one run, in their order."""

    def __init__(
        self,
        common: Common,
        settings: Settings,
        parts: list[str],
        backends: Sequence[str] | None,
        compare: bool,
    ) -> None:
        self._common, self._settings, self._parts = common, settings, parts
        self._asked, self._compare = backends, compare
        self.device: tuple[str, dict[str, str]] = ("", {})

    def measure(self, model: str) -> list[Figure]:
        from . import decoding, memory, merging, planned
        from .probe import Probe

        settings, figures = self._settings, []
        without_model: dict[str, Callable[[], list[Figure]]] = {
            "planning": lambda: planned.measure_planning(model, max(20, settings.repeats)),
            "chain": lambda: planned.measure_chain(max(5, settings.repeats)),
        }
        with seldom_collected():  # as `dagengine serve` does it
            for part in [part for part in self._parts if part in without_model]:
                say(f"measuring {part}")
                figures += _apart(without_model[part])
        if all(part in without_model for part in self._parts):
            return figures
        say(f"loading {self._common.label}")
        options = self._common.engine(
            tokens=_tokens(settings, self._common.page_size),
            sequences=max(settings.streams, settings.readers),
        )
        with Probe(model, seed=self._common.seed, options=options) as probe:
            self.device = probe.device
            baseline = self._baseline(model, probe)
            backends = list(self._asked) if self._asked else probe.usable(BACKENDS, say)
            with_model: dict[str, Callable[[Probe], list[Figure]]] = {
                "backends": lambda p: merging.measure_backends(p, settings, backends),
                "first-token": lambda p: merging.measure_first_token(p, settings, baseline),
                "single-stream": lambda p: decoding.measure_single_stream(p, settings, baseline),
                "streams": lambda p: decoding.measure_streams(p, settings),
                "readers": lambda p: memory.measure_readers(p, settings),
            }
            for part in [part for part in self._parts if part in with_model]:
                say(f"measuring {part}")
                figures += _apart(lambda part=part: with_model[part](probe))
        if "backends" in self._parts:
            say("comparing logits")
            with Probe(model, seed=self._common.seed, options=options, observe=True) as probe:
                figures += _apart(lambda: merging.measure_differences(probe, settings, backends))
        return figures

    def _baseline(self, model: str, probe: Probe) -> Transformers | None:
        if not self._compare or not {"first-token", "single-stream"} & set(self._parts):
            return None
        if probe.core.config.load_format == "dummy":
            say("transformers has no such random weights: its figures are left out")
            return None
        if not transformers_available():
            say("transformers is not installed: its figures are left out")
            return None
        from dagengine.model_files import find_model

        def on_engine(function: Callable[[], Any]) -> Any:
            return probe.llm.engine.call(lambda _: function()).result()

        return Transformers(
            str(find_model(model)), probe.core.config.dtype, probe.core.config.device, on_engine
        )


def _apart(measure: Callable[[], list[Figure]]) -> list[Figure]:
    """Measure on a thread that ends with the part, and with it the OpenMP workers that it may have started."""
    with ThreadPoolExecutor(1, "bench") as pool:
        return pool.submit(measure).result()


def _parts(asked: list[str]) -> list[str]:
    for part in asked:
        if part not in PARTS:
            raise CommandError(f"{part!r} is not one of {', '.join(PARTS)}", "only")
    return [part for part in PARTS if not asked or part in asked]


def _tokens(settings: Settings, page_size: int) -> int:
    """Enough for everything that is cached at once and for what runs over it, in every part, in whole pages."""

    def whole(tokens: int) -> int:
        return -(-tokens // page_size) * page_size

    own = whole(settings.question + settings.decode + 1)
    fragments = settings.fragments * whole(settings.fragment_length)
    plain = 2 * whole(settings.visible + settings.question + 1)
    stream = settings.streams * whole(settings.prompt + settings.answer + 1)
    shared = whole(settings.shared) + settings.readers * whole(64)
    return fragments + plain + own + max(stream, shared)
