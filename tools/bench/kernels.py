"""tools/bench/kernels: builds the kernels, measures the ceilings, checks every implementation against float64, times
the matrix beside its baselines, and writes a page, JSON lines and pass or FAIL for every bar.

On a GPU: docs/benchmarks/kernels.md and kernels.jsonl; with --device cpu: kernels-cpu.md and kernels-cpu.jsonl.
Cases that bars read come first; what the budget leaves no time for is named. FlashAttention-3 (module `vfa3`),
FlashInfer and TileLang are used where Python finds them. The exit status is 1 if a bar was missed or a result was
wrong, 2 for arguments that make no sense.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tools"))

from bench import kernels_setup as setup  # noqa: E402
from bench.kernels_journal import Journal, supervise  # noqa: E402

if TYPE_CHECKING:
    from bench.kernels_bars import Bar

FOLDER = ROOT / "docs" / "benchmarks"
IMPLEMENTATIONS = ("cuda", "tilelang", "triton")
THREADS = (1, 2)
REPORT_SECONDS = 10

GPU_ABOUT = """Times are medians of CUDA graph replays of many calls, contenders in turns. Cold caches
(`µs`): a graph's calls go round input sets that together exceed the L2 cache four times; warm: every call
reads the same set. The floor is the larger of the fewest bytes (each token of K and V once, q, out) over
the read rate and the operations over the matmul rate (of transform, pack, copy and append: the bytes read
and written over the copy rate), all measured in this run. Baselines know neither
deltas nor slices: they read as many tokens, in the same pages where page lists allow it, as if K had been
rotated for free. `FA3 / this` takes FA3's fastest mode. `read ratio` is counted in the plan: tokens that
its tiles read over distinct tokens; every query tile of a prefill reads its context. `plan µs` is the
host's work once per batch, the upload included. Errors are relative L2 against float64 over the last rows
of the first and the last sequence. This page is generated from the JSON
lines beside it."""

CPU_ABOUT = """Times are medians by the wall clock, contenders in turns, on the heads of SmolLM2-135M (9
query, 3 kv, 64) and pages of 16; `packed` gathers the whole context in every call; `sdpa` reads contiguous
K and V that nobody had to gather. Errors are relative L2 against float64 over the last rows of the first
and the last sequence. This page is generated from the JSON lines beside it."""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="tools/bench/kernels", description=__doc__)
    p.add_argument("--out", type=Path, default=FOLDER, help="folder of the results (docs/benchmarks)")
    p.add_argument("--name", help="their file name without ending (kernels, or kernels-cpu)")
    p.add_argument(
        "--cases",
        default="",
        help="groups or names of cases, separated by commas (all); on the CPU names, checks or data",
    )
    p.add_argument("--implementations", default=",".join(IMPLEMENTATIONS), help="of `fused`, on the GPU")
    p.add_argument("--quick", action="store_true", help="fewer repeats and fewer checks")
    p.add_argument("--every-check", action="store_true", help="checks in all combinations of configurations")
    p.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    p.add_argument("--budget", type=float, default=480, help="seconds, the build and the report included")
    p.add_argument("--commit", help="recorded where git is not at hand")
    p.add_argument(
        "--fill-predictions",
        action="store_true",
        help="measure nothing: write the outcomes of kernels*.jsonl in --out into kernels-predictions.md",
    )
    p.add_argument("--report-only", action="store_true", help="write the report of a journal that was left")
    p.add_argument(
        "--bars-only",
        action="store_true",
        help="measure nothing: write the page and its bars anew from the JSON lines in --out; notes and checks stay",
    )
    p.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    p.add_argument("--until", type=float, default=0.0, help=argparse.SUPPRESS)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    options.name = options.name or ("kernels-cpu" if options.device == "cpu" else "kernels")
    unknown = set(_listed(options.implementations)) - set(IMPLEMENTATIONS)
    if unknown or options.budget < 30:
        print(
            f"--implementations are of {', '.join(IMPLEMENTATIONS)}; --budget is at least 30 s",
            file=sys.stderr,
        )
        return 2
    file = options.out / f"{options.name}.journal"
    if options.worker is not None:
        return work(options, Journal(file))
    started = time.monotonic()
    env = setup.environment()
    if options.fill_predictions or options.report_only or options.bars_only:
        return setup.call(env, __file__, [*given, "--worker", "0"])
    options.out.mkdir(parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    reason = setup.build(env)
    if reason is not None:
        Journal(file).note(f"The C++ module was not built: {reason}")
    for number in THREADS if options.device == "cpu" else (1,):
        left = options.budget - REPORT_SECONDS - (time.monotonic() - started)
        share = left / 2 if options.device == "cpu" and number == 1 else left
        command = [sys.executable, "-W", "ignore", __file__, *given, "--worker", str(number)]
        if options.device == "cpu":
            env = {**env, "OMP_NUM_THREADS": str(number)}
        supervise([*command, "--until", str(time.time() + share)], file, share + 30, env)
    return setup.call(env, __file__, [*given, "--report-only", "--worker", "0"])


def work(options: argparse.Namespace, journal: Journal) -> int:
    """What the process with torch does: measure, or (worker 0) report."""
    if options.fill_predictions:
        return fill(options)
    if options.bars_only:
        return bars_only(options)
    if options.report_only:
        return report(options, journal)
    stop = time.monotonic() + options.until - time.time()
    try:
        return on_cpu(options, journal, stop) if options.device == "cpu" else on_gpu(options, journal, stop)
    except Exception as error:
        journal.note(f"In step {journal.open_step()!r}: {type(error).__name__}: {str(error)[:400]}")
        raise


def on_gpu(options: argparse.Namespace, journal: Journal, stop: float) -> int:
    import torch

    if not torch.cuda.is_available():
        journal.note("There is no CUDA device here; --device cpu measures the CPU.")
        return 0
    from bench import kernels_data, kernels_gpu, kernels_planner
    from bench.kernels_baselines import WORKSPACE_BYTES
    from bench.kernels_cases import matrix

    wanted = _listed(options.cases)
    try:
        cases = matrix([name for name in wanted if name != "data"] if wanted else ())
    except ValueError as error:
        return refuse(journal, error)
    if wanted and not set(wanted) - {"data", "checks"}:
        cases = []
    names = _listed(options.implementations)
    settings = kernels_gpu.Settings(tuple(names), options.quick, stop, options.every_check)
    bench = kernels_gpu.begin(journal, settings, WORKSPACE_BYTES)
    able = kernels_gpu.available(names, journal)
    if not wanted or "checks" in wanted:
        kernels_gpu.check_implementations(bench, able)
    if not wanted or "data" in wanted:
        if "planner" not in journal.ended():
            with journal.step("planner"):
                kernels_planner.time_planner(journal)
        kernels_data.run(bench)
    kernels_gpu.run_matrix(bench, cases, able)
    return 0


def on_cpu(options: argparse.Namespace, journal: Journal, stop: float) -> int:
    from bench import kernels_cpu
    from bench.kernels_planner import time_planner

    wanted = _listed(options.cases)
    try:
        cases = kernels_cpu.chosen(wanted)
    except ValueError as error:
        return refuse(journal, error)
    if options.worker == 1 and (not wanted or "data" in wanted) and "planner" not in journal.ended():
        with journal.step("planner"):
            time_planner(journal)
    check = not wanted or "checks" in wanted
    kernels_cpu.run(journal, cases, options.worker, stop, quick=options.quick, check=check)
    return 0


def refuse(journal: Journal, error: ValueError) -> int:
    """Say what is wrong with the arguments; the report ends with status 2."""
    if not journal.values("refused"):
        journal.add(refused=str(error))
    return 0


def report(options: argparse.Namespace, journal: Journal) -> int:
    """Write the page and the lines of a journal; print bars and notes."""
    from bench import kernels_bars, kernels_record, kernels_report
    from bench.kernels_machine import hardware

    for message in journal.values("refused"):
        print(message, file=sys.stderr)
        journal.file.unlink()
        return 2
    command = [a for a in sys.argv[1:] if a != "--report-only"]
    command = command[: command.index("--worker")] if "--worker" in command else command
    shown, extra = hardware(options.device)
    command = kernels_record.without(command, ("--out", "--commit"))
    where = kernels_record.circumstances(command, shown, extra)
    if options.commit:
        where = replace(where, commit=options.commit)
    figures, checked = journal.figures(), journal.values("checked")
    notes = [kernels_record.shortened(note) for note in journal.values("note")]
    table = kernels_record.Table(tuple(figures))
    cpu = options.device == "cpu"
    bars = (kernels_bars.evaluate_cpu if cpu else kernels_bars.evaluate)(table, checked)
    page = kernels_report.page(table, where, bars, checked, notes, CPU_ABOUT if cpu else GPU_ABOUT)
    (options.out / f"{options.name}.md").write_text(page, encoding="utf-8")
    if figures:
        lines = kernels_record.dump_lines(figures, where)
        (options.out / f"{options.name}.jsonl").write_text(lines, encoding="utf-8")
    for note in notes:
        print(f"note: {note}")
    show(bars)
    missed = any(bar.passed is False for bar in bars) or any(n.startswith("WRONG") for n in notes)
    if figures:
        journal.file.unlink()
    return 1 if missed or not figures else 0


def bars_only(options: argparse.Namespace) -> int:
    """Write the page of the JSON lines in --out anew, with the bars as they are now; 1 if one is missed."""
    from bench import kernels_bars, kernels_record, kernels_report

    lines, page = (options.out / f"{options.name}.{ending}" for ending in ("jsonl", "md"))
    if not lines.exists():
        print(f"there are no results in {options.out}", file=sys.stderr)
        return 2
    figures, where = kernels_record.load_lines(lines.read_text(encoding="utf-8"))
    table = kernels_record.Table(tuple(figures))
    cpu = options.device == "cpu"
    bars = (kernels_bars.evaluate_cpu if cpu else kernels_bars.evaluate)(table, [])
    old = page.read_text(encoding="utf-8") if page.exists() else ""
    text = kernels_report.rewritten(old, table, where, bars, CPU_ABOUT if cpu else GPU_ABOUT)
    page.write_text(text, encoding="utf-8")
    show(bars)
    return 1 if any(bar.passed is False for bar in bars) else 0


def show(bars: Sequence[Bar]) -> None:
    for bar in bars:
        print(f"{bar.word:12} {bar.name}: {bar.measured or '—'}, required {bar.goal}")


def fill(options: argparse.Namespace) -> int:
    """Write what the results in --out measured into the page of predictions."""
    from bench import kernels_predictions, kernels_record

    page = FOLDER / "kernels-predictions.md"
    figures = []
    for file in sorted(options.out.glob("kernels*.jsonl")):
        figures += kernels_record.load_lines(file.read_text(encoding="utf-8"))[0]
    if not figures:
        print(f"there are no results in {options.out}", file=sys.stderr)
        return 2
    text = kernels_predictions.fill(page.read_text(encoding="utf-8"), kernels_record.Table(tuple(figures)))
    page.write_text(text, encoding="utf-8")
    return 0


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    sys.exit(main())
