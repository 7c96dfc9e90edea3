"""tools/test: everything that must hold before a change lands, on one machine without a GPU.

Runs the stages in order, goes on after a failed one, and ends with each stage's time and result and with the
line `N passed, N failed, N skipped`, where a stage that is not a test suite counts as one test.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import environment
from environment import CACHE, ROOT, python, say

PACKAGES = ("core-graph", "kvstore", "positions", "kernels", "engine", "server")
REPORTS = CACHE / "reports"
TWO_CORES = ("--numprocesses=2", "--dist=loadfile")
SHARED_OUT = ("--numprocesses=2", "--dist=worksteal")
PARALLEL = {"kvstore": SHARED_OUT, "kernels": SHARED_OUT, "engine": TWO_CORES, "server": TWO_CORES}
PYTEST_OPTIONS = ("-q", "--durations=5", "--timeout=600")


@dataclass(frozen=True)
class Result:
    passed: int
    failed: int
    skipped: int = 0
    advice: str = ""


@dataclass(frozen=True)
class Stage:
    name: str
    title: str
    run: Callable[[Sequence[str]], Result]


def command_stage(name: str, title: str, command: Sequence[str], advice: str) -> Stage:
    """A stage that passes if the command, run by .venv's Python, exits with 0."""

    def run(_: Sequence[str]) -> Result:
        done = subprocess.run([str(python()), *command], cwd=ROOT)
        return Result(1, 0) if done.returncode == 0 else Result(0, 1, advice=advice)

    return Stage(name, title, run)


def pytest_stage(name: str, title: str, paths: Sequence[str], options: Sequence[str] = ()) -> Stage:
    """A stage that passes if pytest finds tests under the paths and none fails."""

    def run(arguments: Sequence[str]) -> Result:
        report = REPORTS / f"{name}.xml"
        report.unlink(missing_ok=True)
        command = [
            str(python()),
            "-m",
            "pytest",
            *paths,
            *PYTEST_OPTIONS,
            *options,
            f"--junitxml={report}",
            *arguments,
        ]
        again = " ".join(["pytest", *paths, *arguments])
        done = subprocess.run(command, cwd=ROOT)
        counted = read_report(report)
        if done.returncode != 0 and counted.failed == 0:
            counted = Result(counted.passed, 1, counted.skipped)
        return Result(counted.passed, counted.failed, counted.skipped, f".venv/bin/python -m {again}")

    return Stage(name, title, run)


def read_report(report: Path) -> Result:
    """Sums a JUnit file; a missing or broken one is one failure."""
    try:
        suites = list(ElementTree.parse(report).iter("testsuite"))
    except (FileNotFoundError, ElementTree.ParseError):
        return Result(0, 1)
    total, failed, skipped = (
        sum(int(suite.get(key, "0")) for suite in suites for key in keys)
        for keys in (("tests",), ("failures", "errors"), ("skipped",))
    )
    return Result(total - failed - skipped, failed, skipped)


def stages() -> list[Stage]:
    code = ["packages", "tools", "tests"]
    return [
        command_stage("lint", "ruff check", ["-m", "ruff", "check", *code], ".venv/bin/ruff check --fix"),
        command_stage(
            "format", "ruff format", ["-m", "ruff", "format", "--check", *code], ".venv/bin/ruff format"
        ),
        command_stage(
            "types", "mypy --strict on core-graph, kvstore, positions", ["-m", "mypy"], ".venv/bin/mypy"
        ),
        command_stage(
            "imports",
            "import directions",
            ["-c", "from importlinter.cli import lint_imports_command as main; main()"],
            ".venv/bin/lint-imports says which import is not allowed; docs/architecture.md says why",
        ),
        command_stage(
            "model",
            "the demo model",
            ["tools/demo_model.py"],
            "the end-to-end tests need it: see the message above",
        ),
        *(
            pytest_stage(name, f"tests of {name}", [f"packages/{name}/tests"], PARALLEL.get(name, ()))
            for name in PACKAGES
        ),
        pytest_stage("root", "tests across the packages, on two cores", ["tests"], TWO_CORES),
        command_stage(
            "wheels",
            "each package's wheel, alone in an empty environment",
            ["tools/wheels.py"],
            "tools/wheels NAME runs one package again",
        ),
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    known = stages()
    parser = argparse.ArgumentParser(
        prog="tools/test",
        description="Set up the environment, then run every check. Arguments after -- go to pytest.",
    )
    parser.add_argument("stage", nargs="*", help=f"only these: {', '.join(stage.name for stage in known)}")
    parser.add_argument("--fast", action="store_true", help="leave out slow tests and the wheels")
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options, pytest_arguments = parser.parse_args(given[:split]), given[split + 1 :]
    unknown = set(options.stage) - {stage.name for stage in known}
    if unknown:
        parser.error(f"no such stage: {', '.join(sorted(unknown))}")
    chosen = [stage for stage in known if not options.stage or stage.name in options.stage]
    if options.fast:
        chosen = [stage for stage in chosen if stage.name != "wheels"]
        pytest_arguments = ["-m", "not slow", *pytest_arguments]

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    try:
        environment.ensure("test")
    except environment.SetupFailed as error:
        print(f"\nset-up {error}", file=sys.stderr)
        return 1
    times = [("environment", time.monotonic() - started, Result(1, 0))]
    REPORTS.mkdir(exist_ok=True)
    for number, stage in enumerate(chosen, 1):
        say(f"[{number}/{len(chosen)}] {stage.title}")
        began = time.monotonic()
        result = stage.run(pytest_arguments)
        times.append((stage.name, time.monotonic() - began, result))
    return report(times, time.monotonic() - started)


def report(times: Sequence[tuple[str, float, Result]], total_s: float) -> int:
    """Prints the summary; returns the exit status."""
    say("summary")
    for name, seconds, result in times:
        counts = f"{result.passed} passed, {result.failed} failed, {result.skipped} skipped"
        print(f"{'FAILED' if result.failed else 'ok':>6}  {name:<12} {seconds:7.1f} s  {counts}")
    for name, _, result in times:
        if result.failed:
            print(f"{name} failed; next: {result.advice}")
    print(f"{total_s:.0f} s in all")
    results = [result for _, _, result in times]
    passed, failed, skipped = (
        sum(getattr(result, key) for result in results) for key in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
