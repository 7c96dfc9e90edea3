"""Where an option's value comes from: the command line, `DAGENGINE_NAME`, `--config FILE`, or its default.

In this order. The options of a command are its parameters and nothing else: an unknown key of the file, or an
unknown `DAGENGINE_` variable, is an error with a suggestion. Values are converted and checked the same way
wherever they come from.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import CommandError

PREFIX = "DAGENGINE_"
FOREIGN = (
    "DAGENGINE_CACHE",
    "DAGENGINE_CPU_ISA",
    "DAGENGINE_NATIVE",
    "DAGENGINE_PYTHON",
    "DAGENGINE_REQUIRE_NVCC",
    "DAGENGINE_REQUIRE_TILELANG",
)
SECRET = ("api_key",)
SETTINGS = {"auto_envvar_prefix": PREFIX.rstrip("_")}
ENGINE_FIELDS = (
    "device",
    "dtype",
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "page_size",
    "kv_pages",
    "kv_memory_gib",
    "gpu_memory_utilization",
    "cpu_kv_gib",
    "kv_directory",
    "kv_directory_gib",
    "eviction",
    "enforce_eager",
    "overlap",
    "batch_invariant",
    "attention_backend",
    "load_format",
)


@dataclass(frozen=True)
class Resolved:
    """One option, its value, and where that comes from: command line, environment NAME, FILE or default."""

    name: str
    value: Any
    source: str

    @property
    def shown(self) -> str:
        """The value for people; secrets are counted, not shown."""
        if self.name in SECRET and self.value:
            return f"({len(self.value)} given)" if isinstance(self.value, list) else "(given)"
        return "-" if self.value is None else str(self.value)


def use_config(context: typer.Context, value: Path | None) -> Path | None:
    """The callback of `--config`: the file's values become defaults. Raises typer.BadParameter."""
    for variable in os.environ:
        if variable.startswith(PREFIX):
            _check_variable(variable, context)
    if value is None:
        return None
    try:
        found = tomllib.loads(value.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise typer.BadParameter(f"{value} cannot be read: {error}") from None
    known = _names(context)
    defaults: dict[str, Any] = {}
    for key, setting in found.items():
        name = key.replace("-", "_")
        if name not in known or name == "config":
            flags = [other.replace("_", "-") for other in known]
            raise typer.BadParameter(f"{value} sets {key!r}, which is no option here{_close(key, flags)}")
        if isinstance(setting, Mapping):
            raise typer.BadParameter(f"{value}: {key!r} must be a value, not a table")
        if name in defaults:
            raise typer.BadParameter(f"{value} sets {key!r} twice, with - and with _; leave one out")
        defaults[name] = setting
    context.default_map = defaults
    return value


def resolved(context: typer.Context) -> list[Resolved]:
    """Every option of the command that runs, in its order."""
    config = context.params.get("config")
    found = []
    for name in _names(context):
        source = getattr(context.get_parameter_source(name), "name", "DEFAULT")
        where = {
            "COMMANDLINE": "command line",
            "ENVIRONMENT": f"environment {PREFIX}{name.upper()}",
            "DEFAULT_MAP": str(config),
        }.get(source, "default")
        if name != "config":
            found.append(Resolved(name, context.params[name], where))
    return found


def engine_options(context: typer.Context) -> dict[str, Any]:
    """The options that are fields of the engine's configuration, apart from those without a value."""
    return {
        name: context.params[name]
        for name in ENGINE_FIELDS
        if name in context.params and context.params[name] is not None
    }


def require_model(model: str | None) -> str:
    """Raises CommandError if no model is named."""
    if not model:
        raise CommandError("name a model: a Hugging Face folder or a Hub id", "model")
    return model


def _names(context: typer.Context) -> list[str]:
    return [parameter.name for parameter in context.command.params if parameter.name not in (None, "help")]


def _check_variable(variable: str, context: typer.Context) -> None:
    known = [PREFIX + name.upper() for name in _names(context)]
    if variable in known or variable in FOREIGN:
        return
    everywhere = {PREFIX + name.upper() for name in (*ENGINE_FIELDS, *_SHARED)}
    if variable not in everywhere:
        hint = _close(variable, [*known, *everywhere])
        raise typer.BadParameter(f"the environment sets {variable}, which is no option{hint}; unset it")


def _close(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1)
    return f"; did you mean {close[0]!r}?" if close else ""


Model = Annotated[
    str | None,
    typer.Option("--model", "-m", envvar="DAGENGINE_MODEL", help="a Hugging Face folder, or a Hub id"),
]
Config = Annotated[
    Path | None,
    typer.Option(
        help="a TOML file with values of these options",
        callback=use_config,
        is_eager=True,
        dir_okay=False,
        metavar="FILE.toml",
    ),
]
Device = Annotated[
    str,
    typer.Option(
        help="auto: the GPU if an attention backend runs there, else the CPU",
        metavar="{auto,cpu,cuda,cuda:N}",
    ),
]
Dtype = Annotated[
    str,
    typer.Option(
        help="of weights and KV; auto: the checkpoint's on a GPU, float32 on a CPU",
        metavar="{auto,float32,bfloat16,float16,float64}",
    ),
]
MaxModelLen = Annotated[
    int | None, typer.Option(help="tokens a request may see and sample together  [default: the model's]")
]
MaxNumSeqs = Annotated[
    int | None, typer.Option(help="most sequences in one step  [default: 64 on a CPU, 256 on a GPU]")
]
MaxNumBatchedTokens = Annotated[
    int | None, typer.Option(help="most tokens computed in one step  [default: 512 on a CPU, 8192 on a GPU]")
]
PageSize = Annotated[int, typer.Option(help="tokens per KV page")]
KvPages = Annotated[
    int | None,
    typer.Option(help="KV pages in the pool, in place of --kv-memory-gib, --gpu-memory-utilization"),
]
KvMemoryGib = Annotated[
    float | None,
    typer.Option(help="size of the pool of KV pages  [default: 2 on a CPU; on a GPU what is left]"),
]
GpuMemoryUtilization = Annotated[
    float | None,
    typer.Option(help="fraction of the GPU's memory for weights, pool and a step's own  [default: 0.9]"),
]
CpuKvGib = Annotated[
    float, typer.Option(help="host memory for KV pages that leave the device; 0: they are computed again")
]
KvDirectory = Annotated[
    str | None,
    typer.Option(help="a folder that keeps KV pages of the host beyond this run; needs --cpu-kv-gib"),
]
KvDirectoryGib = Annotated[float | None, typer.Option(help="most that --kv-directory takes  [default: 64]")]
Eviction = Annotated[str, typer.Option(help="which states leave the device first", metavar="{lru,next_use}")]
EnforceEager = Annotated[bool, typer.Option("--enforce-eager", help="never capture CUDA graphs")]
Overlap = Annotated[
    bool | None,
    typer.Option(
        "--overlap/--no-overlap",
        help="launch a step before the results of the one before it are read  [default: on a GPU]",
    ),
]
BatchInvariant = Annotated[
    bool, typer.Option("--batch-invariant", help="the same bits for a request in any batch")
]
AttentionBackend = Annotated[
    str,
    typer.Option(
        help="or one that a plug-in brings", metavar="{auto,fused,segmented,packed,naive,reference}"
    ),
]
PositionPolicy = Annotated[
    str, typer.Option(help="of requests that name none", metavar="{linear,native,explicit}")
]
LoadFormat = Annotated[str, typer.Option(help="dummy: seeded random weights", metavar="{auto,dummy}")]
Threads = Annotated[
    int | None,
    typer.Option(help="CPU threads  [default: OMP_NUM_THREADS, or the cores that this process may use]"),
]
Json = Annotated[bool, typer.Option("--json", help="print JSON")]

_SHARED = ("model", "config", "threads", "position_policy", "chat_template", "seed", "host", "port")
