"""What all benchmarks that run an engine take: which model, how the engine is built, where figures go.

`command` adds these options to a benchmark's own, so that each is written once and resolved like every option.
"""

from __future__ import annotations

import inspect
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import options
from ..console import CommandError
from ..threads import ThreadChoice, choose_threads
from .publish import Destination, check_writable

DEFAULT_SEQUENCES = 64
POOL = ("kv_pages", "kv_memory_gib", "gpu_memory_utilization")

Shape = Annotated[
    str | None,
    typer.Option(
        help="random weights of this shape, made on the device, in place of a model",
        metavar="{llama-3.1-8b,qwen3-0.6b,tiny}",
    ),
]
Seed = Annotated[int, typer.Option(help="of the random inputs, and of random weights")]
Output = Annotated[Path | None, typer.Option(help="write figures as lines of JSON", dir_okay=False)]
Markdown = Annotated[Path | None, typer.Option(help="write a page", dir_okay=False)]
Check = Annotated[bool, typer.Option("--check", help="exit with 1 if a bar was missed")]

COMMON: dict[str, tuple[Any, Any]] = {
    "model": (options.Model, None),
    "shape": (Shape, None),
    "device": (options.Device, "auto"),
    "dtype": (options.Dtype, "auto"),
    "max_model_len": (options.MaxModelLen, None),
    "max_num_seqs": (options.MaxNumSeqs, None),
    "max_num_batched_tokens": (options.MaxNumBatchedTokens, None),
    "page_size": (options.PageSize, 64),
    "kv_pages": (
        Annotated[int | None, typer.Option(help="KV pages in the pool  [default: what the run needs]")],
        None,
    ),
    "kv_memory_gib": (
        Annotated[
            float | None, typer.Option(help="size of the pool of KV pages  [default: what the run needs]")
        ],
        None,
    ),
    "gpu_memory_utilization": (
        Annotated[
            float | None,
            typer.Option(help="size the pool by the GPU's memory, in place of what the run needs"),
        ],
        None,
    ),
    "attention_backend": (options.AttentionBackend, "auto"),
    "enforce_eager": (options.EnforceEager, False),
    "overlap": (options.Overlap, None),
    "batch_invariant": (options.BatchInvariant, False),
    "load_format": (options.LoadFormat, "auto"),
    "seed": (Seed, 0),
    "threads": (options.Threads, None),
    "config": (options.Config, None),
    "output": (Output, None),
    "markdown": (Markdown, None),
    "check": (Check, False),
    "as_json": (options.Json, False),
}


@contextmanager
def ended_in_order() -> Iterator[None]:
    """A SIGTERM unwinds what runs, as an interrupt does, so that nothing is left in the file system or on a server."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@dataclass(frozen=True)
class Common:
    """The values of the common options.

    Attributes:
        given: those of the engine that have a value.
        threads: the CPU threads to use, and why.
    """

    model: str | None
    shape: str | None
    seed: int
    page_size: int
    threads: ThreadChoice
    given: dict[str, Any]
    destination: Destination

    @property
    def label(self) -> str:
        """The model for people, without its folders."""
        return self.shape or Path(options.require_model(self.model)).name

    @contextmanager
    def folder(self) -> Iterator[str]:
        """The model's folder or Hub id; of a shape a folder that is there for the block. Raises CommandError."""
        if self.model and self.shape:
            raise CommandError("give a model or a shape, not both", "shape")
        if self.shape is None:
            yield options.require_model(self.model)
            return
        from dagengine.shapes import shape_config, write_config

        config = shape_config(self.shape)
        with ended_in_order(), tempfile.TemporaryDirectory(prefix="dagengine-bench-") as made:
            yield str(write_config(Path(made) / self.shape, config))

    def engine(self, *, tokens: int, sequences: int = 1) -> dict[str, Any]:
        """Fields of `EngineConfig` for a run that holds so many tokens at once, in so many sequences.

        The pool is what the run needs unless its size was given; every sequence's last page may be partly filled.
        """
        chosen = dict(self.given)
        if not any(name in chosen for name in POOL):
            chosen["kv_pages"] = -(-tokens // self.page_size) + 2 * sequences + 8
        if "max_num_seqs" not in chosen and sequences > DEFAULT_SEQUENCES:
            chosen["max_num_seqs"] = sequences
        if self.shape is not None:
            chosen["load_format"] = "dummy"
        return {**chosen, "seed": self.seed, "threads": self.threads.count}


def command(function: Callable[..., None]) -> Callable[..., None]:
    """A command with the parameters of `function`, whose first is a `Common`, and the common options after them."""
    own = list(inspect.signature(function, eval_str=True).parameters.values())[1:]
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    context = inspect.Parameter("context", kind, annotation=typer.Context)
    common = [inspect.Parameter(n, kind, default=d, annotation=a) for n, (a, d) in COMMON.items()]

    def run(context: typer.Context, **values: Any) -> None:
        if values["model"] and values["shape"]:
            raise CommandError("give a model or a shape, not both", "shape")
        taken = {name: values.pop(name) for name in COMMON}
        function(_common(context, taken), **values)

    run.__signature__ = inspect.Signature([context, *own, *common])  # type: ignore[attr-defined]
    run.__annotations__ = {p.name: p.annotation for p in (context, *own, *common)}
    run.__name__, run.__doc__ = function.__name__, function.__doc__
    return run


def counts(values: list[int] | None, default: tuple[int, ...], name: str) -> list[int]:
    """A list of counts in the order given, each once. Raises CommandError for one below 1."""
    found = list(dict.fromkeys(values or default))
    if min(found) < 1:
        raise CommandError(f"at least 1, not {min(found)}", name)
    return found


def _common(context: typer.Context, taken: dict[str, Any]) -> Common:
    counts([taken["page_size"]], (), "page_size")
    check_writable({"output": taken["output"], "markdown": taken["markdown"]})
    return Common(
        model=taken["model"],
        shape=taken["shape"],
        seed=taken["seed"],
        page_size=taken["page_size"],
        threads=choose_threads(taken["threads"]),
        given=options.engine_options(context),
        destination=Destination(taken["output"], taken["markdown"], taken["check"], taken["as_json"]),
    )
