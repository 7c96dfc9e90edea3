"""tools/bench/linear: checks the linear layers against float64 on a GPU, times them beside torch, and writes a page.

docs/benchmarks/linear.md and linear.jsonl. The exit status is 1 if a result was wrong (nothing is timed then), 2 for
arguments that make no sense or without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools")]

from bench import kernels_setup as setup  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
SWEPT = ("gemv", "streamed")


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="tools/bench/linear", description=__doc__)
    p.add_argument("--out", type=Path, default=FOLDER, help="folder of the results (docs/benchmarks)")
    p.add_argument("--name", default="linear", help="their file name without ending (linear)")
    p.add_argument(
        "--models", default="", help="names or parts of names of models, separated by commas (all)"
    )
    p.add_argument("--layers", default="", help="qkv, out, gate_up, down, head, separated by commas (all)")
    p.add_argument("--rows", default="", help="numbers of rows, separated by commas (1 to 1024)")
    p.add_argument("--quick", action="store_true", help="Llama only, fewer rows and fewer repeats")
    p.add_argument(
        "--sweep",
        nargs="?",
        const=",".join(SWEPT),
        default="",
        help="also time the layouts of gemv.cu and streamed.cu, or of one: gemv, streamed",
    )
    p.add_argument("--budget", type=float, default=50, help="seconds after which no further case is timed")
    p.add_argument("--commit", help="recorded where git is not at hand")
    p.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    if not options.worker:
        env = setup.environment()
        reason = setup.build(env)
        if reason is not None:
            print(f"the C++ module was not built: {reason}", file=sys.stderr)
            return 2
        return setup.call(env, __file__, [*given, "--worker"])
    return work(options, [argument for argument in given if argument != "--worker"])


def work(options: argparse.Namespace, given: Sequence[str]) -> int:
    """What the process with torch does."""
    import torch

    from bench import kernels_machine as machine
    from bench import kernels_record as record
    from bench import linear_cases as cases
    from bench import linear_gpu, linear_report

    models, names = _listed(options.models), _listed(options.layers)
    if options.quick and not models:
        models = [cases.LLAMA[0].model]
    layers = [
        layer
        for name, listed in cases.MODELS.items()
        for layer in listed
        if (not models or any(part in name for part in models)) and (not names or layer.name in names)
    ]
    try:
        rows = [int(n) for n in _listed(options.rows)] or list(
            cases.QUICK_ROWS if options.quick else cases.ROWS
        )
    except ValueError:
        rows = []
    if not layers or not rows or min(rows) < 1:
        print("--models, --layers or --rows leave nothing to measure", file=sys.stderr)
        return 2
    sweep = _listed(options.sweep)
    if not set(sweep) <= set(SWEPT):
        print(f"--sweep takes {' and '.join(SWEPT)}, not {options.sweep}", file=sys.stderr)
        return 2
    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU", file=sys.stderr)
        return 2
    run = linear_gpu.measure(layers, rows, quick=options.quick, sweep=sweep, seconds=options.budget)
    hardware, extra = machine.hardware("cuda")
    where = record.Circumstances(
        record.shortened(hardware),
        record.versions() | extra,
        options.commit or record.commit(),
        record.shortened(" ".join(["tools/bench/linear", *record.without(given, ("--out", "--commit"))])),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    lines = record.dump_lines(run.figures, where)
    page = linear_report.page(run.figures, where, [*run.faults, *run.notes])
    (options.out / f"{options.name}.jsonl").write_text(lines, encoding="utf-8")
    (options.out / f"{options.name}.md").write_text(page, encoding="utf-8")
    print(page)
    for fault in run.faults:
        print(f"FAIL {fault}", file=sys.stderr)
    return 1 if run.faults else 0


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]


if __name__ == "__main__":
    raise SystemExit(main())
