"""tools/bench/cpu: the CPU's figures, on the demo model, into docs/benchmarks/cpu.jsonl and cpu.md.

The sizes are those of the bars and otherwise the defaults of `dagengine bench dag`; float32, 2 threads, questions of
16 tokens. The first token is measured once more with questions of 64 tokens, into cpu-question-64.jsonl and .md:
there the new tokens' own work weighs more than reading the fragments. Further arguments go to the first command
as they are. The exit status is 1 if a bar was missed.
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
COMMON = ("--device", "cpu", "--dtype", "float32", "--threads", "2")
BARS = ("--question", "16", "--check")
LONG_QUESTION = ("--only", "first-token", "--question", "64")


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
    command = [str(VENV / "bin" / "dagengine"), "bench", "dag", "--model", model.stdout.strip(), *COMMON]

    def run(name: str, options: Sequence[str]) -> int:
        files = ["--output", str(FOLDER / f"{name}.jsonl"), "--markdown", str(FOLDER / f"{name}.md")]
        return subprocess.run([*command, *options, *files], cwd=ROOT).returncode

    return max(run("cpu", [*BARS, *given]), run("cpu-question-64", LONG_QUESTION))


if __name__ == "__main__":
    sys.exit(main())
