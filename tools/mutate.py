#!/usr/bin/env python3
"""tools/mutate.py: how many small changes of the KV store's bookkeeping its tests notice.

Copies packages/kvstore, makes an environment with mutmut and the package in a folder of its own, lets mutmut change one
thing at a time in the modules below, and runs the tests that reach the change. The simulator and the state machine do
not take part: what the examples notice is the figure. Takes minutes; not part of `tools/test`.

    tools/mutate.py                          all modules
    tools/mutate.py pages tiers --least 85   these; fails below 85 %
    tools/mutate.py --show                   also what nobody noticed
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "packages" / "kvstore"
MODULES = "pages free_runs host_pages tiers residency tickets transfers pressure claims costs pins".split()
TESTS = (
    "test_audit test_claim test_conformance test_events test_eviction test_free_runs test_holds test_loading "
    "test_pages test_pins test_pressure test_recall test_registry test_repositioning test_repositioning_tiers "
    "test_residency test_restore test_reuse test_seal_early test_states test_store_options test_tickets "
    "test_tier_policy test_transfer_faults test_unclaim test_writer"
).split()
MUTMUT = "mutmut==3.8.1"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("modules", nargs="*", metavar="MODULE", help=f"of {', '.join(MODULES)}")
    parser.add_argument("--least", type=float, default=0.0, metavar="PERCENT", help="fail below this")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--show", action="store_true", help="show what was not noticed")
    arguments = parser.parse_args()
    unknown = set(arguments.modules) - set(MODULES)
    if unknown:
        parser.error(f"no modules {sorted(unknown)}; there are {', '.join(MODULES)}")
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        return mutate(Path(folder), arguments)


def mutate(folder: Path, arguments: argparse.Namespace) -> int:
    venv.create(folder / "venv", with_pip=True)
    bin_folder = folder / "venv" / "bin"
    pip = [str(bin_folder / "pip"), "install", "--quiet", "--disable-pip-version-check"]
    # The package itself for its entry points; what is imported are the changed sources.
    subprocess.run([*pip, MUTMUT, "pytest>=8", "pytest-timeout", "hypothesis>=6", str(PACKAGE)], check=True)
    work = folder / "kvstore"
    shutil.copytree(PACKAGE, work, ignore=shutil.ignore_patterns("__pycache__", ".pytest_cache"))
    modules = arguments.modules or MODULES
    with (work / "pyproject.toml").open("a", encoding="utf-8") as settings:
        settings.write(
            "\n[tool.mutmut]\n"
            'source_paths = ["src"]\n'
            'also_copy = ["pyproject.toml"]\n'
            'pytest_add_cli_args = ["-p", "no:cacheprovider"]\n'
            f"only_mutate = {[f'src/dagengine_kvstore/{module}.py' for module in modules]}\n"
            f"pytest_add_cli_args_test_selection = {[f'tests/{test}.py' for test in TESTS]}\n"
        )
    mutmut = str(bin_folder / "mutmut")
    run = subprocess.run(
        [mutmut, "run", "--max-children", str(arguments.jobs)],
        cwd=work,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    results = subprocess.run(
        [mutmut, "results", "--all", "true"], cwd=work, stdout=subprocess.PIPE, text=True, check=True
    )
    found = re.findall(r"dagengine_kvstore\.(\w+)\.(\S+): (.+)", results.stdout)
    if not found:
        print(run.stdout[-3000:])
        return 2
    total = Counter(module for module, _, _ in found)
    missed = Counter(module for module, _, result in found if result.strip() not in ("killed", "timeout"))
    print("module       changes  noticed")
    for module in [*modules, "all"]:
        count = total.total() if module == "all" else total[module]
        lost = missed.total() if module == "all" else missed[module]
        print(f"{module:12} {count:7}  {100 * (count - lost) / max(count, 1):5.1f} %")
    if arguments.show:
        for module, name, result in found:
            if result.strip() not in ("killed", "timeout"):
                print(f"\n{result.strip()}: {module}.{name}")
                subprocess.run([mutmut, "show", f"dagengine_kvstore.{module}.{name}"], cwd=work, check=True)
    return int(100 * (1 - missed.total() / total.total()) < arguments.least)


if __name__ == "__main__":
    sys.exit(main())
