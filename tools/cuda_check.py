"""tools/cuda_check.py: every CUDA kernel in use compiles for sm_90a, and the hot ones spill no registers.

Compiles what the kernel modules list with `variants()` by nvcc, prints registers, spills and static shared memory of
each, and exits with 1 if one does not compile or a hot one spills. Needs no GPU. Without nvcc it says so and exits
with 0, or with 2 where nvcc is required: `--require`, or CI set in the environment. `--tilelang` also takes the CUDA
source that TileLang makes of its variants (seconds each), where TileLang is installed.
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
from dataclasses import dataclass, fields
from pathlib import Path

from dagengine_kernels.errors import KernelError
from dagengine_kernels.fused.cuda import driver

SOURCES = (
    "append",
    "merge",
    "transform",
    "advance",
    "attend",
    "draw",
    "greatest",
    "gemv",
    "skinny",
    "tiled",
    "streamed",
    "gated",
    "norm",
    "gate",
)
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
    return build_text(variant, driver.read_source(variant.source), options, nvcc)


def tilelang_listed(limit: int | None = None) -> list[tuple[driver.Variant, str, list[str]]]:
    """The first `limit` variants of fused/tilelang as `build_text` takes them. Raises: ImportError without TileLang."""
    from tilelang import env

    from dagengine_kernels.fused.tilelang import compiled, executor

    folders = (env.TILELANG_TEMPLATE_PATH, env.CUTLASS_INCLUDE_DIR)
    options = [
        f"--gpu-architecture={ARCHITECTURE}",
        "--std=c++17",
        *compiled.FLAGS,
        *(f"-I{f}" for f in folders),
    ]
    found = []
    for made in list(executor.variants())[:limit]:
        macros = tuple((f.name, str(getattr(made, f.name))) for f in fields(made))
        found.append((driver.Variant("tilelang", "attend_kernel", macros), compiled.source(made), options))
    return found


def build_text(variant: driver.Variant, text: str, options: Sequence[str], nvcc: str) -> Built:
    """Compile `text` and read what ptxas says of the variant."""
    with tempfile.TemporaryDirectory(prefix="dagengine-") as folder:
        source = Path(folder, f"{variant.source}.cu")
        source.write_text(text)
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
    parser.add_argument("--tilelang", action="store_true", help="also TileLang's kernels")
    options = parser.parse_args(arguments)
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        required = options.require or os.environ.get("CI", "") not in ("", "0", "false")
        print("nvcc is not on PATH: the CUDA kernels were not compiled", file=sys.stderr)
        return 2 if required else 0
    try:
        variants = listed(options.only or SOURCES)
        made = tilelang_listed() if options.tilelang else []
    except (ImportError, KernelError) as e:
        print(f"the variants cannot be listed: {e}", file=sys.stderr)
        return 1
    faults = 0
    for built in (*check(variants, nvcc), *(build_text(*one, nvcc) for one in made)):
        print(built.line(), flush=True)
        faults += built.fault is not None
    print(f"{len(variants) + len(made)} variants, {faults} at fault")
    return 1 if faults else 0


if __name__ == "__main__":
    raise SystemExit(main())
