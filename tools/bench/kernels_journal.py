"""The journal of a run: what was begun, what came out, what ended. A process that a kernel kills loses one step only.

The worker appends a line before and after every step and for every figure; the parent starts it again where the last
one ended, and marks a step that ended the process, or that took longer than its limit, as failed.

    {"begin": STEP}  {"figure": {...}}  {"note": TEXT}  {"checked": {...}}  {"ceilings": {...}}  {"end": STEP}
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.kernels_record import Figure

STEP_SECONDS = 100


class Journal:
    """Reads what is there, appends what comes."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.lines: list[dict[str, Any]] = []
        if file.exists():
            self.lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]

    def add(self, **line: Any) -> None:
        self.lines.append(line)
        with self.file.open("a", encoding="utf-8") as handle:
            handle.write(json.dumps(line, ensure_ascii=False) + "\n")

    def figure(self, figure: Figure) -> None:
        self.add(figure=asdict(figure))

    def note(self, text: str) -> None:
        """Something that a reader of the report must know; said once."""
        if {"note": text} not in self.lines:
            self.add(note=text)

    def values(self, key: str) -> list[Any]:
        return [line[key] for line in self.lines if key in line]

    def figures(self) -> list[Figure]:
        """The last figure of each case, backend and metric: a case that was begun anew has them twice."""
        found = {}
        for values in self.values("figure"):
            figure = Figure(**values)
            found[figure.case, figure.backend, figure.metric] = figure
        return list(found.values())

    def failed(self) -> set[str]:
        return set(self.values("failed"))

    def ended(self) -> set[str]:
        """Steps that need no second try: those that ended, and those that failed."""
        return {*self.values("end"), *self.failed()}

    def open_step(self) -> str | None:
        """The step that was begun last and neither ended nor failed."""
        begun = self.values("begin")
        return begun[-1] if begun and begun[-1] not in self.ended() else None

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        self.add(begin=name)
        yield
        self.add(end=name)


def supervise(
    command: Sequence[str],
    file: Path,
    seconds: float,
    env: dict[str, str],
    step_seconds: float = STEP_SECONDS,
) -> None:
    """Run `command` until it ends by itself, starting it again after a step that killed or stopped it.

    It is given at most `seconds` in all, and `step_seconds` from one line to the next; what it wrote stays.
    """
    stop = time.monotonic() + seconds
    while True:
        process = subprocess.Popen(command, env=env)
        seen, changed = -1, time.monotonic()
        while process.poll() is None:
            time.sleep(0.5)
            size = file.stat().st_size if file.exists() else 0
            if size != seen:
                seen, changed = size, time.monotonic()
            stuck = time.monotonic() - changed > step_seconds
            if stuck or time.monotonic() > stop:
                process.kill()
                process.wait()
        if process.returncode == 0:
            return
        journal = Journal(file)
        step = journal.open_step()
        late = time.monotonic() > stop
        how = "ran past its time" if process.returncode == -9 else f"ended with status {process.returncode}"
        if late:
            journal.note(f"The run was stopped after {seconds:.0f} s, in step {step!r}.")
            return
        if step is None:
            journal.note(f"The worker {how}, outside of any step; the run ends there.")
            return
        journal.add(failed=step)
        journal.note(f"In step {step!r} the worker {how}; the run went on without it.")
