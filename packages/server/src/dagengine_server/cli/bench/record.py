"""Figures: one measured number each, with its baseline and its circumstances, as lines of JSON."""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path, PurePath
from statistics import median
from typing import Any, Self

DISTRIBUTIONS = (
    "dagengine",
    "dagengine-core-graph",
    "dagengine-kernels",
    "dagengine-kvstore",
    "dagengine-positions",
    "dagengine-server",
    "torch",
    "triton",
    "transformers",
    "vllm",
    "sglang",
)
UNTOLD = ("--output", "--markdown", "--json", "--api-key")
"""Options that say nothing of what was measured."""


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        bench: which command measured it; `publish` fills it in.
        case: what was run; `backend` is the attention backend, or empty where none is involved.
        value: the median of `n` samples, or the one count; in `unit`.
        baseline, baseline_value: what it is compared with, in the same unit and the same run.
        ratio: value / baseline_value.
        p50, p95, p99: of the samples, linearly interpolated.
    """

    bench: str
    case: str
    backend: str
    metric: str
    value: float
    unit: str
    baseline: str | None = None
    baseline_value: float | None = None
    ratio: float | None = None
    n: int = 1
    p50: float | None = None
    p95: float | None = None
    p99: float | None = None

    @classmethod
    def of(cls, case: str, backend: str, metric: str, samples: Sequence[float], unit: str) -> Self:
        """The median of samples, with its percentiles."""
        assert samples, f"{case}, {metric}: no samples"
        ordered = sorted(samples)
        p50, p95, p99 = (percentile(ordered, q) for q in (0.5, 0.95, 0.99))
        return cls(
            "", case, backend, metric, median(ordered), unit, n=len(ordered), p50=p50, p95=p95, p99=p99
        )

    @classmethod
    def count(cls, case: str, backend: str, metric: str, value: float, unit: str) -> Self:
        """One number that is not a sample of many."""
        return cls("", case, backend, metric, value, unit)

    def against(self, baseline: str, value: float) -> Figure:
        """The same figure beside its baseline."""
        ratio = self.value / value if value else None
        return replace(self, baseline=baseline, baseline_value=value, ratio=ratio)


@dataclass(frozen=True)
class Circumstances:
    """Where figures come from; the same for all figures of one run."""

    hardware: str
    versions: dict[str, str]
    commit: str
    command: str

    def on(self, device: str, versions: Mapping[str, str]) -> Circumstances:
        """The same with a GPU, described in words, and the versions that belong to it."""
        if not device:
            return self
        return replace(self, hardware=f"{device}, {self.hardware}", versions={**self.versions, **versions})


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted samples, linear between them."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def circumstances(command: str, threads: int | None) -> Circumstances:
    """This machine, these versions, this commit; paths below the working folder or the home say no more than that.

    Args:
        threads: CPU threads of the engine; None where none runs in this process.
    """
    shown = command.replace(f"{Path.cwd()}{os.sep}", "").replace(str(Path.home()), "~")
    return Circumstances(hardware(threads), versions(), commit(), shown)


def command_line(bench: str, given: Sequence[str] | None = None) -> str:
    """`dagengine bench BENCH` with the arguments as they were given, less those that say nothing of what was
    measured; of a path that leads out of the working folder and the home only the last part."""
    arguments = list(sys.argv[1:] if given is None else given)
    kept: list[str] = []
    skip = False
    for argument in arguments[2:] if arguments[:2] == ["bench", bench] else []:
        name, equals, _ = argument.partition("=")
        if not skip and name not in UNTOLD:
            kept.append(_without_folders(argument))
        skip = not skip and name in UNTOLD and not equals and name != "--json"
    return shlex.join(["dagengine", "bench", bench, *kept])


def hardware(threads: int | None) -> str:
    """Processor, cores, threads used, memory, and how busy the machine is as the run begins."""
    parts = [_processor(), f"{os.cpu_count()} CPUs"]
    if threads is not None:
        parts.append(f"{threads} threads used")
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        parts.append(f"{pages * size / 2**30:.0f} GiB")
        parts.append(f"load {os.getloadavg()[0]:.1f} at the start")
    except (OSError, ValueError, AttributeError):
        pass
    return ", ".join(parts)


def versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def commit() -> str:
    """The commit of the checkout that this runs from, with `-dirty` where it was changed; or `unknown`."""
    folder = Path(__file__).resolve().parent
    try:
        head = _git(folder, "rev-parse", "HEAD")
        changed = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/packages")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head[:12]}-dirty" if changed else head[:12]


def dump_lines(figures: Iterable[Figure], where: Circumstances) -> str:
    """One JSON object a line."""
    rows = (asdict(figure) | asdict(where) for figure in figures)
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def load_lines(text: str) -> tuple[list[Figure], Circumstances]:
    """What `dump_lines` wrote, of one run."""
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    figures = [Figure(**{name: row[name] for name in Figure.__dataclass_fields__}) for row in rows]
    where: dict[str, Any] = {name: rows[0][name] for name in Circumstances.__dataclass_fields__}
    return figures, Circumstances(**where)


def _without_folders(argument: str) -> str:
    name, equals, value = argument.rpartition("=") if argument.startswith("--") else ("", "", argument)
    path = PurePath(value)
    if not path.is_absolute() or any(path.is_relative_to(f) for f in (Path.cwd(), Path.home())):
        return argument
    return f"{name}{equals}{path.name}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
