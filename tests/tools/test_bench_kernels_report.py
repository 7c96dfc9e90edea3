"""tools/bench/kernels: the pages say what the lines do, and lines nothing of this machine."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import kernels as bench_main
from bench import kernels_bars, kernels_predictions, kernels_record, kernels_report
from bench.kernels_record import TIME, Figure, Table

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_written_anew_from_its_lines(tmp_path: Path) -> None:
    where = kernels_record.Circumstances("a GPU", {"torch": "2"}, "abc", "tools/bench/kernels")
    own = Figure.of("own-order", "fused-cuda-sm90", TIME, [120.0], "us")
    row = {
        "backend": "cuda",
        "batch": "ragged",
        "config": "bf16",
        "refused": None,
        "passed": True,
        "failed": None,
    }
    row |= {"ratio": 0.9, "lse2": 0.01, "error": 1e-3, "same": True}
    table = Table((own,))
    bars = kernels_bars.evaluate(table, [row])
    page = kernels_report.page(table, where, bars, [row], ["said | once"], bench_main.GPU_ABOUT)
    (tmp_path / "kernels.md").write_text(page, encoding="utf-8")
    slower = replace(own, value=130.0)
    (tmp_path / "kernels.jsonl").write_text(kernels_record.dump_lines([own], where), encoding="utf-8")
    call = ["--bars-only", "--out", str(tmp_path), "--worker", "0"]
    assert bench_main.main(call) == 0
    assert (tmp_path / "kernels.md").read_text(encoding="utf-8") == page, (
        "nothing changed, notes and checks stay"
    )
    (tmp_path / "kernels.jsonl").write_text(kernels_record.dump_lines([slower], where), encoding="utf-8")
    assert bench_main.main(call) == 1
    again = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    assert "| own-order: one layer of a decode step | ≤ 125 µs | 130 µs (fused-cuda-sm90) | FAIL |" in again
    assert "- said / once" in again
    assert again.endswith(page[page.index("## Checks") :])
    (tmp_path / "kernels.jsonl").unlink()
    assert bench_main.main(call) == 2


def test_the_committed_page_is_that_of_its_lines(tmp_path: Path) -> None:
    for ending in ("md", "jsonl"):
        text = (ROOT / f"docs/benchmarks/kernels.{ending}").read_text(encoding="utf-8")
        (tmp_path / f"kernels.{ending}").write_text(text, encoding="utf-8")
    before = (tmp_path / "kernels.md").read_text(encoding="utf-8")
    bench_main.main(["--bars-only", "--out", str(tmp_path), "--worker", "0"])
    assert (tmp_path / "kernels.md").read_text(encoding="utf-8") == before


def test_the_command_that_is_recorded_says_what_was_measured() -> None:
    given = ["--quick", "--out", "somewhere", "--cases", "graph", "--commit=abc"]
    assert kernels_record.without(given, ("--out", "--commit")) == ["--quick", "--cases", "graph"]


def test_predictions_get_their_outcomes_and_nothing_else() -> None:
    page = (ROOT / "docs/benchmarks/kernels-predictions.md").read_text(encoding="utf-8")
    row = next(line for line in page.split("\n") if line.startswith("| own-order |"))
    predicted = float(row.split("|")[5])
    figures = [
        Figure.of("own-order", "fused-cuda-sm90", TIME, [2 * predicted], "us"),
        Figure.count("own-order", "fused-cuda-sm90", "read ratio", 1.01, "x"),
    ]
    filled = kernels_predictions.fill(page, Table(tuple(figures))).split("\n")
    changed = [(a, b) for a, b in zip(page.split("\n"), filled, strict=True) if a != b]
    assert len(changed) == 2
    assert changed[0][1].startswith(row.rsplit("|", 3)[0])
    assert changed[0][1].endswith(f"{2 * predicted:.0f} (fused-cuda-sm90) | 2.00 |")
    assert changed[1][1].endswith("| 1.01 |")


def test_every_ratio_that_is_predicted_can_be_filled() -> None:
    page = (ROOT / "docs/benchmarks/kernels-predictions.md").read_text(encoding="utf-8")
    missing = [label for label in kernels_predictions.RATIOS if f"\n| {label} |" not in page]
    assert missing == []


def test_lines_say_nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    where = kernels_record.circumstances(
        ["--out", str(ROOT / "docs/benchmarks"), "--commit", str(tmp_path / "x")], f"a CPU, {ROOT}", {}
    )
    assert where.command == "tools/bench/kernels --out docs/benchmarks --commit ~/x"
    assert str(ROOT) not in json.dumps(where.__dict__)
    figure = Figure.of("a", "b", TIME, [3.0, 1.0, 2.0], "us").against("c", 4.0)
    back, again = kernels_record.load_lines(kernels_record.dump_lines([figure], where))
    assert (back, again) == ([figure], where)
    assert figure.value == 2.0
    assert figure.ratio == 0.5


def test_the_page_shows_times_beside_their_floor_and_drops_empty_columns() -> None:
    figures = (
        Figure.count("own-order", "", "floor", 90.0, "us"),
        Figure.of("own-order", "fused-cuda-sm90", TIME, [120.0], "us"),
        Figure.count("own-order", "fused-cuda-sm90", "merge kernels", 5.0, "us"),
    )
    table = Table(figures)
    where = kernels_record.Circumstances("a GPU", {"torch": "2"}, "abc", "tools/bench/kernels")
    bars = kernels_bars.evaluate(table, [])
    page = kernels_report.page(table, where, bars, [], ["a | b"], "about")
    assert "| own-order | fused-cuda-sm90 | 120 | 120 | 1 | 90 | 75.0 % |" in page
    assert "warm µs" not in page
    assert "| own-order | fused-cuda-sm90 | merge kernels | 5 |" in page
    assert "- a / b" in page
    assert "| own-order: one layer of a decode step | ≤ 125 µs | 120 µs (fused-cuda-sm90) | pass |" in page
