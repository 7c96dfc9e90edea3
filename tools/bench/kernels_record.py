"""Figures of `tools/bench/kernels`: one measured number each, with its baseline and its circumstances, as JSON lines.

The fields are those of `dagengine bench`'s lines. This module runs where only the kernels package is there.
"""

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

ROOT = Path(__file__).resolve().parents[2]
DISTRIBUTIONS = (
    "dagengine-kernels",
    "torch",
    "triton",
    "tilelang",
    "numpy",
    "flashinfer-python",
    "nvidia-cuda-nvrtc",
    "nvidia-cudnn-cu13",
)
WARM = ", warm"
TIME = "time"
MERGE = "merge and partials of the time"


@dataclass(frozen=True)
class Figure:
    """One figure.

    Attributes:
        case: what was run; `backend` is what ran, as it names itself.
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
        ordered = sorted(samples)
        p50, p95, p99 = (percentile(ordered, q) for q in (0.5, 0.95, 0.99))
        values = {"n": len(ordered), "p50": p50, "p95": p95, "p99": p99}
        return cls("kernels", case, backend, metric, median(ordered), unit, **values)

    @classmethod
    def count(cls, case: str, backend: str, metric: str, value: float, unit: str) -> Self:
        """One number that is not a sample of many."""
        return cls("kernels", case, backend, metric, value, unit)

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


def circumstances(arguments: Sequence[str], hardware: str, extra: dict[str, str]) -> Circumstances:
    """This machine, these versions, this commit. Paths below the checkout, the working folder or the home say no
    more than that."""
    command = " ".join(["tools/bench/kernels", *arguments])
    return Circumstances(shortened(hardware), versions() | extra, commit(), shortened(command))


def without(arguments: Sequence[str], options: Sequence[str]) -> list[str]:
    """`arguments` less `options` and the value of each: those that say nothing of what was measured."""
    kept: list[str] = []
    skip = False
    for argument in arguments:
        if not skip and argument.partition("=")[0] not in options:
            kept.append(argument)
        skip = not skip and argument in options
    return kept


def shortened(text: str) -> str:
    """`text` without this machine's folders."""
    for folder in (ROOT, Path.cwd()):
        text = text.replace(f"{folder}{os.sep}", "").replace(str(folder), ".")
    return text.replace(str(Path.home()), "~")


def cpu_hardware() -> str:
    """Processor, cores, memory, and how busy the machine is as the report is written."""
    parts = [_processor(), f"{os.cpu_count()} CPUs"]
    try:
        pages, size = os.sysconf("SC_PHYS_PAGES"), os.sysconf("SC_PAGE_SIZE")
        parts.append(f"{pages * size / 2**30:.0f} GiB")
        parts.append(f"load {os.getloadavg()[0]:.1f} after the run")
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
    """The commit of the checkout, with `-dirty` where packages or this tool were changed; or `unknown`."""
    try:
        head = _git("rev-parse", "HEAD")
        changed = _git("status", "--porcelain", "--untracked-files=no", "--", "packages", "tools/bench")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return f"{head[:12]}-dirty" if changed else head[:12]


def dump_lines(figures: Iterable[Figure], where: Circumstances) -> str:
    """One JSON object a line."""
    rows = (asdict(figure) | asdict(where) for figure in figures)
    return "".join(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n" for row in rows)


def load_lines(text: str) -> tuple[list[Figure], Circumstances]:
    """What `dump_lines` wrote, of one run. Raises ValueError for an empty text."""
    rows = [json.loads(line) for line in text.splitlines() if line.strip()]
    if not rows:
        raise ValueError("no figures")
    figures = [Figure(**{name: row[name] for name in Figure.__dataclass_fields__}) for row in rows]
    where: dict[str, Any] = {name: rows[0][name] for name in Circumstances.__dataclass_fields__}
    return figures, Circumstances(**where)


@dataclass(frozen=True)
class Table:
    """Figures by case, backend and metric."""

    figures: tuple[Figure, ...]

    def find(self, case: str, metric: str, backend: str | None = None, prefix: str = "") -> Figure | None:
        """The first figure of a case and metric whose backend is `backend`, or begins with `prefix`."""
        for figure in self.figures:
            if figure.case == case and figure.metric == metric:
                if figure.backend == backend or (backend is None and figure.backend.startswith(prefix)):
                    return figure
        return None

    def fastest(self, case: str, prefix: str, metric: str = TIME) -> Figure | None:
        """The least value of a metric among the backends of a case that begin with `prefix`."""
        found = [
            f for f in self.figures if f.case == case and f.metric == metric and f.backend.startswith(prefix)
        ]
        return min(found, key=lambda f: f.value, default=None)

    def cases(self) -> list[str]:
        """In order of first appearance."""
        return list(dict.fromkeys(f.case for f in self.figures))


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
    return done.stdout.strip()
