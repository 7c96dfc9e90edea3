"""tools/bench/reposition: moves KV pages of a model's shape by plans, checks them, times them beside plain copies.

Writes docs/benchmarks/reposition.md and reposition.jsonl. The exit status is 1 if a result was wrong, 2 for arguments
that make no sense. The whole of it needs an NVIDIA GPU with 32 GB free; `--device cpu` measures a small form.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), *map(str, sorted(ROOT.glob("packages/*/src")))]

from bench import kernels_record as record  # noqa: E402

FOLDER = ROOT / "docs" / "benchmarks"
PAGES = {"cuda": 1428, "cpu": 48}
LAYERS = {"cuda": 32, "cpu": 4}
REPEATS = {"cuda": 100, "cpu": 10}


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="tools/bench/reposition", description=__doc__)
    p.add_argument("--out", type=Path, default=FOLDER, help="folder of the results (docs/benchmarks)")
    p.add_argument("--name", default="reposition", help="their file name without ending (reposition)")
    p.add_argument("--device", choices=("cuda", "cpu"), help="(cuda where there is one)")
    p.add_argument("--pages", type=int, help="pages that hold tokens (1428; on a CPU 48)")
    p.add_argument("--layers", type=int, help="(32; on a CPU 4)")
    p.add_argument("--repeats", type=int, help="runs of each case (100; on a CPU 10)")
    p.add_argument("--width", type=int, default=32, help="pages a step should move, and spare pages (32)")
    p.add_argument("--cases", default="", help="only those whose names contain this")
    p.add_argument("--commit", help="recorded where git is not at hand")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    import torch

    from bench import kernels_machine as machine
    from bench import reposition_report
    from bench.reposition_run import Shape, measure

    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    pages, layers, repeats = (
        defaults[device] if value is None else value
        for value, defaults in ((options.pages, PAGES), (options.layers, LAYERS), (options.repeats, REPEATS))
    )
    if min(pages, layers, repeats, options.width) < 1 or pages < 2:
        print("--pages must be at least 2, --layers, --repeats and --width at least 1", file=sys.stderr)
        return 2
    if device == "cuda" and not torch.cuda.is_available():
        print("--device cuda needs an NVIDIA GPU", file=sys.stderr)
        return 2
    shape = Shape(layers=layers)
    run = measure(shape, device, pages, repeats, options.width, options.cases)
    hardware, extra = machine.hardware(device)
    where = record.Circumstances(
        record.shortened(hardware),
        record.versions() | extra,
        options.commit or record.commit(),
        record.shortened(" ".join(["tools/bench/reposition", *record.without(given, ("--out", "--commit"))])),
    )
    options.out.mkdir(parents=True, exist_ok=True)
    page = reposition_report.page(run.figures, where, shape, run.faults)
    lines = record.dump_lines(run.figures, where)
    (options.out / f"{options.name}.jsonl").write_text(lines, encoding="utf-8")
    (options.out / f"{options.name}.md").write_text(page, encoding="utf-8")
    print(page)
    for fault in run.faults:
        print(f"FAIL {fault}", file=sys.stderr)
    return 1 if run.faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
