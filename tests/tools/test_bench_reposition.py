"""tools/bench/reposition: what it moves, checks and writes. Its times need a GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench import kernels_record as record
from bench import reposition as bench_main
from bench.reposition_cases import cases
from dagengine.repositioning import PageMover
from dagengine_kvstore import MovePlan, plan_moves

SMALL = [
    "--device",
    "cpu",
    "--pages",
    "10",
    "--layers",
    "2",
    "--repeats",
    "1",
    "--width",
    "2",
    "--commit",
    "x",
]


def test_cases_move_every_page_once_by_a_delta_and_name_their_spare_pages() -> None:
    found = list(cases(64, 16, 8))
    assert len({case.name for case in found}) == len(found)
    for case in found:
        plan = plan_moves(case.moves, 16, spare=range(128, 128 + case.spare), width=8)
        assert plan.num_rows == case.tokens and all(move.delta for move in case.moves)
        targets = {(move.target, move.to) for move in case.moves}
        assert len(targets) == len(case.moves)
        assert case.in_place == all(move.target < 64 for move in case.moves)
        assert bool(plan.num_host_pages) == case.name.endswith("through the host")
    packed = next(case for case in found if "packed" in case.name)
    assert {move.to for move in packed.moves} > {0}, "rows of pages, not whole pages"


def test_a_small_run_writes_lines_and_a_page_that_agree(tmp_path: Path) -> None:
    assert bench_main.main([*SMALL, "--out", str(tmp_path)]) == 0
    figures, where = record.load_lines((tmp_path / "reposition.jsonl").read_text())
    assert {figure.bench for figure in figures} == {"reposition"} and where.commit == "x"
    assert str(tmp_path) not in where.command
    page = (tmp_path / "reposition.md").read_text()
    for case in cases(10, 64, 2):
        (rate,) = [f for f in figures if f.case == case.name and f.metric == "tokens/ms"]
        assert rate.p50 is not None and rate.p99 is not None and rate.p50 >= rate.p99 > 0
        assert rate.baseline_value == 500.0 and f"| {case.name} | {case.tokens} |" in page
    turned = record.Table(tuple(figures)).find("in place, K turned where it is", "bytes written")
    assert turned is not None and turned.value == 10 * 64 * 2 * 8 * 128 * 2, "K alone"


def test_a_wrong_result_is_told_and_not_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run(self: PageMover, plan: MovePlan) -> None:
        """Moves nothing."""

    monkeypatch.setattr(PageMover, "run", run)
    arguments = [*SMALL, "--cases", "copy, shuffled", "--out", str(tmp_path)]
    assert bench_main.main(arguments) == 1
    assert "FAIL copy, shuffled" in capsys.readouterr().err
    figures, _ = record.load_lines((tmp_path / "reposition.jsonl").read_text())
    assert {figure.case for figure in figures} == {"plain copy"}


@pytest.mark.parametrize("wrong", [["--pages", "1"], ["--layers", "0"], ["--width", "0"], ["--repeats", "0"]])
def test_arguments_that_make_no_sense_are_refused(wrong: list[str]) -> None:
    assert bench_main.main(["--device", "cpu", *wrong]) == 2
