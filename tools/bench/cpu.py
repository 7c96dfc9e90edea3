"""tools/bench/cpu: the CPU's figures, on the demo model, into docs/benchmarks/cpu.jsonl and cpu.md.

The sizes are those of the bars and the defaults of `dagengine bench dag`; float32, 2 threads. Further
arguments go to that command as they are. The exit status is 1 if a bar was missed.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import environment
from environment import ROOT, VENV, python, say

FOLDER = ROOT / "docs" / "benchmarks"
OPTIONS = ("--dtype", "float32", "--threads", "2", "--check")


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        environment.ensure("test")
    except environment.SetupFailed as error:
        print(f"\nset-up {error}", file=sys.stderr)
        return 1
    say("the demo model")
    model = subprocess.run(
        [str(python()), "tools/demo_model.py"], stdout=subprocess.PIPE, text=True, cwd=ROOT
    )
    if model.returncode != 0:
        return model.returncode
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = ["--output", str(FOLDER / "cpu.jsonl"), "--markdown", str(FOLDER / "cpu.md")]
    command = [str(VENV / "bin" / "dagengine"), "bench", "dag", "--model", model.stdout.strip()]
    return subprocess.run([*command, *OPTIONS, *files, *given], cwd=ROOT).returncode


if __name__ == "__main__":
    sys.exit(main())
