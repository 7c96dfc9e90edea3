"""tools/bench/kernels: a run goes on past what fails, a lost step is one, and the command measures."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from bench import kernels_cases, kernels_ceilings, kernels_gpu, kernels_record, kernels_setup, kernels_timing
from bench.kernels_journal import Journal, supervise
from bench.kernels_record import TIME, Figure, Table
from dagengine_kernels.segmented import SegmentedBackend

ROOT = Path(__file__).resolve().parents[2]

WORKER = """
import os, sys, time
from pathlib import Path
from bench.kernels_journal import Journal
journal = Journal(Path(sys.argv[1]))
for name in ("one", "dies", "hangs", "two"):
    if name in journal.ended():
        continue
    with journal.step(name):
        if name == "dies":
            os.abort()
        if name == "hangs":
            time.sleep(60)
"""


def test_a_step_that_kills_or_stops_the_worker_is_left_out(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "tools")}
    supervise([sys.executable, "-c", WORKER, str(file)], file, 50, env, step_seconds=4)
    journal = Journal(file)
    assert journal.values("end") == ["one", "two"]
    assert journal.failed() == {"dies", "hangs"}
    assert ["dies" in note for note in journal.values("note")] == [True, False]


def test_a_contender_that_fails_twice_is_left_out(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    journal.add(raised="own-order: tilelang")
    assert not kernels_gpu.dropped(journal, "tilelang")
    journal.add(failed="checks of tilelang: bf16, head 64, group 1, page 16")
    assert kernels_gpu.dropped(journal, "tilelang")
    assert not kernels_gpu.dropped(journal, "cuda")
    assert "tilelang is left out" in journal.values("note")[-1]


def test_one_case_of_the_matrix_runs_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, with calls in the place of graphs: what is prepared, checked and recorded is what a GPU's run is."""

    class Graph:
        def __init__(self, calls: list[Callable[[], object]]) -> None:
            self.calls = calls

        def replay(self) -> None:
            for call in self.calls:
                call()

    def capture(calls: list[Callable[[], object]], sets: int) -> kernels_timing.Captured:
        return kernels_timing.Captured(Graph(calls), len(calls), calls)  # type: ignore[arg-type]

    def race(contenders: dict[str, kernels_timing.Captured], replays: int) -> None:
        for captured in contenders.values():
            captured.graph.replay()
            captured.samples += [1.0] * replays

    def make(name: str) -> SegmentedBackend:
        if name == "tilelang":
            raise ZeroDivisionError
        return Broken(lambda out: out * 1.5) if name == "triton" else SegmentedBackend()  # type: ignore[call-arg]

    class Broken(SegmentedBackend):
        def __init__(self, fault: Callable[[Tensor], Tensor]) -> None:
            super().__init__()
            self.fault = fault

        implementation = property(lambda _: "wrong", lambda *_: None)  # type: ignore[assignment]

        def run(self, *arguments: object, **options: object) -> Tensor:  # type: ignore[override]
            return self.fault(super().run(*arguments, **options))  # type: ignore[arg-type]

    for module, name, value in (
        (kernels_timing, "capture", capture),
        (kernels_timing, "race", race),
        (kernels_gpu, "DEVICE", "cpu"),
        (kernels_gpu, "make_backend", make),
        (kernels_gpu, "L2_BYTES", 1 << 16),
        (kernels_gpu, "note_merge", lambda *_: None),
        (torch.cuda, "synchronize", lambda: None),
        (torch.cuda, "empty_cache", lambda: None),
    ):
        monkeypatch.setattr(module, name, value)
    journal = Journal(tmp_path / "journal")
    settings = kernels_gpu.Settings(("cuda", "tilelang", "triton"), True, time.monotonic() + 100)
    memory = torch.randn(1 << 22).bfloat16()
    ceilings = kernels_ceilings.Ceilings(1e12, 1e12, 1e14, {})
    bench = kernels_gpu.Bench(journal, settings, memory, torch.zeros(1), ceilings, {})
    case = kernels_cases.Case("judges", "graph", kernels_cases.fan_out(3, 100), rivals=("fa3", "sdpa"))
    kernels_gpu.run_matrix(bench, [case], settings.implementations)
    table, notes = Table(tuple(journal.figures())), "\n".join(journal.values("note"))
    assert table.find("judges", TIME, "torch-cpu-flash").n == settings.replays  # type: ignore[union-attr]
    assert table.find("judges", "error against float64", "torch-cpu-flash").value < 5e-3  # type: ignore[union-attr]
    assert "WRONG RESULT: judges, wrong" in notes
    assert "tilelang: judges failed: ZeroDivisionError" in notes
    assert "vfa3 cannot be imported" in notes
    assert "case judges" in journal.ended()


def test_a_case_that_was_begun_anew_has_its_last_figures(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal")
    for value in (1.0, 2.0):
        journal.figure(Figure.count("a", "b", "c", value, ""))
    journal.note("once")
    journal.note("once")
    assert [f.value for f in Journal(journal.file).figures()] == [2.0]
    assert journal.values("note") == ["once"]


def test_sources_alone_register_the_backends(tmp_path: Path) -> None:
    folder = kernels_setup.record(tmp_path)
    code = (
        "import importlib.metadata as m; "
        "print(sorted(p.name for p in m.entry_points(group='dagengine.attention_backends')))"
    )
    env = {"PYTHONPATH": str(folder), "PATH": os.environ["PATH"]}
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], capture_output=True, text=True, env=env, check=True
    )
    assert "segmented" in done.stdout


@pytest.mark.slow
def test_the_command_measures_a_cpu(tmp_path: Path) -> None:
    command = [str(ROOT / "tools/bench/kernels"), "--device", "cpu", "--quick", "--budget", "120"]
    command += ["--cases", "decode 1x4096"]
    env = {**os.environ, "DAGENGINE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, env=env, cwd=ROOT
    )
    assert done.returncode in (0, 1), done.stderr
    figures, where = kernels_record.load_lines((tmp_path / "kernels-cpu.jsonl").read_text(encoding="utf-8"))
    table = Table(tuple(figures))
    case = "decode 1x4096, bf16, 1 thread"
    assert table.find(case, TIME, prefix="segmented")
    assert str(ROOT) not in (tmp_path / "kernels-cpu.md").read_text(encoding="utf-8")
    assert where.command.startswith("tools/bench/kernels --device cpu")
    assert not (tmp_path / "kernels-cpu.journal").exists()


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_case_that_does_not_exist_is_refused(tmp_path: Path, device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU; the CPU's is the twin")
    command = [str(ROOT / "tools/bench/kernels"), "--device", device, "--cases", "decode 2x2"]
    env = {**os.environ, "DAGENGINE_PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, env=env)
    assert done.returncode == 2
    assert "no case is called decode 2x2" in done.stderr or "no case or group" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_the_command_measures_a_gpu(tmp_path: Path) -> None:
    """Its twin is the run on the CPU."""
    command = [str(ROOT / "tools/bench/kernels"), "--quick", "--cases", "decode 8x1024", "--budget", "90"]
    subprocess.run([*command, "--out", str(tmp_path)], cwd=ROOT, check=False)
    figures, _ = kernels_record.load_lines((tmp_path / "kernels.jsonl").read_text(encoding="utf-8"))
    table = Table(tuple(figures))
    assert table.find("ceilings", "read", prefix="torch")
    assert table.fastest("decode 8x1024", "fused-")
