"""tools/cuda_check.py: every CUDA kernel in use compiles for sm_90a, and the hot ones spill no registers.

Compiles what the kernel modules list with `variants()` by nvcc, prints registers, spills and static shared memory of
each, and exits with 1 if one does not compile or a hot one spills. Needs no GPU. Without nvcc it says so and exits
with 0, or with 2 where nvcc is required: `--require`, or CI set in the environment.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from dagengine_kernels.errors import KernelError
from dagengine_kernels.fused.cuda import driver

SOURCES = ("append", "merge", "transform", "advance", "attend")
ARCHITECTURE = "sm_90a"


@dataclass(frozen=True)
class Built:
    """What ptxas says of one variant, or the compiler's log if it did not compile."""

    variant: driver.Variant
    registers: int = 0
    spill_bytes: int = 0
    shared_bytes: int = 0
    log: str = ""

    @property
    def fault(self) -> str | None:
        if self.log:
            return "does not compile"
        if self.spill_bytes and self.variant.hot:
            return f"spills {self.spill_bytes} bytes"
        return None

    def line(self) -> str:
        macros = " ".join(f"{name}={value}" for name, value in self.variant.macros)
        if self.log:
            return f"{self.variant.name:12} {macros}: does not compile\n{self.log}"
        numbers = (
            f"{self.registers:3} registers  {self.spill_bytes:3} B spilled  {self.shared_bytes:6} B shared"
        )
        return f"{self.variant.name:12} {numbers}  {macros}"


def listed(sources: Iterable[str] = SOURCES) -> list[driver.Variant]:
    """The variants of the modules of these sources, in order."""
    found: list[driver.Variant] = []
    for source in sources:
        found += importlib.import_module(f"dagengine_kernels.fused.cuda.{source}").variants()
    return found


def build(variant: driver.Variant, nvcc: str) -> Built:
    """Compile one variant and read what ptxas says."""
    options = driver.compile_options(dict(variant.macros), ARCHITECTURE)
    with tempfile.TemporaryDirectory(prefix="dagengine-") as folder:
        source = Path(folder, f"{variant.source}.cu")
        source.write_text(driver.read_source(variant.source))
        command = [
            nvcc,
            "-cubin",
            "-Xptxas",
            "-v",
            *options,
            "-o",
            str(Path(folder, "out.cubin")),
            str(source),
        ]
        told = subprocess.run(command, capture_output=True, text=True, check=False)
    output = told.stdout + told.stderr
    if told.returncode != 0:
        return Built(variant, log=output)
    return read_ptxas(variant, output)


def read_ptxas(variant: driver.Variant, output: str) -> Built:
    """The numbers of `variant.name` in the output of ``-Xptxas -v``."""
    part = re.search(
        rf"Function properties for {re.escape(variant.name)}\n(.*?)(?=Compiling entry function|\Z)",
        output,
        re.S,
    )
    if part is None:
        return Built(variant, log=f"ptxas does not mention {variant.name}:\n{output}")
    numbers = {
        field: int(found[1]) if (found := re.search(pattern, part[1])) else 0
        for field, pattern in (
            ("registers", r"Used (\d+) registers"),
            ("stores", r"(\d+) bytes spill stores"),
            ("loads", r"(\d+) bytes spill loads"),
            ("shared", r"(\d+) bytes smem"),
        )
    }
    spilled = max(numbers["stores"], numbers["loads"])
    return Built(variant, numbers["registers"], spilled, numbers["shared"])


def check(variants: Sequence[driver.Variant], nvcc: str) -> list[Built]:
    """Compile all, two at a time, in order."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        return list(pool.map(lambda variant: build(variant, nvcc), variants))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="tools/cuda_check.py", description=__doc__)
    parser.add_argument(
        "--only", action="append", choices=SOURCES, help="only this file of csrc/cuda (repeatable)"
    )
    parser.add_argument("--require", action="store_true", help="fail without nvcc")
    options = parser.parse_args(arguments)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        required = options.require or os.environ.get("CI", "") not in ("", "0", "false")
        print("nvcc is not on PATH: the CUDA kernels were not compiled", file=sys.stderr)
        return 2 if required else 0
    try:
        variants = listed(options.only or SOURCES)
    except (ImportError, KernelError) as e:
        print(f"the variants cannot be listed: {e}", file=sys.stderr)
        return 1
    faults = 0
    for built in check(variants, nvcc):
        print(built.line(), flush=True)
        faults += built.fault is not None
    print(f"{len(variants)} variants, {faults} at fault")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
