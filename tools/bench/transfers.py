"""tools/bench/transfers: checks copies of KV pages between a GPU and pinned host memory, times them, and writes a page.

docs/benchmarks/transfers.md and transfers.jsonl. The exit status is 1 if a byte was wrong (the run ends there) or, with
--check, if a bar was missed; 2 for arguments that make no sense or without a GPU.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "packages" / "kvstore" / "src")]

FOLDER = ROOT / "docs" / "benchmarks"


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="tools/bench/transfers", description=__doc__)
    p.add_argument("--out", type=Path, default=FOLDER, help="folder of the results (docs/benchmarks)")
    p.add_argument("--name", default="transfers", help="their file name without ending (transfers)")
    p.add_argument("--repeats", type=int, default=5, help="samples of each contender (5)")
    p.add_argument("--megabytes", type=int, default=256, help="bytes of one sample, in MiB (256)")
    p.add_argument("--quick", action="store_true", help="fewer extents and shapes, 3 samples of 64 MiB")
    p.add_argument("--budget", type=float, default=45, help="seconds after which no further case is timed")
    p.add_argument("--check", action="store_true", help="exit with 1 if a bar is missed")
    p.add_argument("--commit", help="recorded where git is not at hand")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    options = parser().parse_args(given)
    if options.repeats < 1 or options.megabytes < 1:
        print("--repeats and --megabytes must be at least 1", file=sys.stderr)
        return 2
    import torch

    if not torch.cuda.is_available():
        print("needs an NVIDIA GPU", file=sys.stderr)
        return 2
    from bench import kernels_machine as machine
    from bench import kernels_record as record
    from bench import transfers_gpu, transfers_report

    size, repeats = (64, 3) if options.quick else (options.megabytes, options.repeats)
    run = transfers_gpu.measure(size << 20, repeats, quick=options.quick, seconds=options.budget)
    hardware, extra = machine.hardware("cuda")
    where = record.Circumstances(
        record.shortened(hardware),
        record.versions() | extra,
        options.commit or record.commit(),
        record.shortened(" ".join(["tools/bench/transfers", *record.without(given, ("--out", "--commit"))])),
    )
    missed = transfers_report.missed(run.figures)
    options.out.mkdir(parents=True, exist_ok=True)
    page = transfers_report.page(run.figures, where, [*run.faults, *run.notes, *missed])
    lines = record.dump_lines(run.figures, where)
    (options.out / f"{options.name}.jsonl").write_text(lines, encoding="utf-8")
    (options.out / f"{options.name}.md").write_text(page, encoding="utf-8")
    print(page)
    for fault in run.faults:
        print(f"FAIL {fault}", file=sys.stderr)
    return 1 if run.faults or (options.check and (missed or not run.figures)) else 0


if __name__ == "__main__":
    raise SystemExit(main())
