"""Figures: one measured number each, with its baseline and its circumstances, as lines of JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
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
    "transformers",
)


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
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
            "dag", case, backend, metric, median(ordered), unit, n=len(ordered), p50=p50, p95=p95, p99=p99
        )

    @classmethod
    def count(cls, case: str, backend: str, metric: str, value: float, unit: str) -> Self:
        """One number that is not a sample of many."""
        return cls("dag", case, backend, metric, value, unit)

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


def percentile(ordered: Sequence[float], q: float) -> float:
    """The q-quantile of sorted samples, linear between them."""
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def circumstances(command: str, threads: int) -> Circumstances:
    """This machine, these versions, this commit; paths below the working folder or the home say no more than that."""
    shown = command.replace(f"{Path.cwd()}{os.sep}", "").replace(str(Path.home()), "~")
    return Circumstances(hardware(threads), versions(), commit(), shown)


def hardware(threads: int) -> str:
    """Processor, cores, threads used, memory, and how busy the machine is as the run begins."""
    parts = [_processor(), f"{os.cpu_count()} CPUs", f"{threads} threads used"]
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
