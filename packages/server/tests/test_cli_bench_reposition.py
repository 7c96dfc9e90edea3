"""`dagengine bench reposition`: what it moves, checks and says. Its times need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dagengine.move_cases import cases
from dagengine.repositioning import PageMover
from dagengine_kvstore import MovePlan, plan_moves
from dagengine_server.cli import main
from dagengine_server.cli.bench import reposition as command
from dagengine_server.cli.bench.record import load_lines

SIZES = "--documents 3 --tokens 44 --question 6 --repeats 2 --moves 1 --width 2 --page-size 16".split()


def arguments(folder: Path) -> list[str]:
    return ["bench", "reposition", "--model", str(folder), "--device", "cpu", "--threads", "1", *SIZES]


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


def test_a_small_run_reads_without_moving_a_byte_and_its_lines_and_page_agree(
    model_folder: Path, tmp_path: Path
) -> None:
    lines, page = tmp_path / "r.jsonl", tmp_path / "r.md"
    files = ["--output", str(lines), "--markdown", str(page)]
    assert main([*arguments(model_folder), *files, "--check"]) == 0
    figures, _ = load_lines(lines.read_text())
    known = {(figure.case, figure.metric): figure for figure in figures}
    read = "tiny, 3 documents x 44, read in a new order each time"
    assert known[read, "bytes moved"].value == 0 and known[read, "tokens read"].value == 132
    copied = known["tiny, one document of 44, copied through the engine", "tokens/ms"]
    assert copied.n == 2 and copied.baseline_value == 500.0
    for case in cases(9, 16, 2):
        rate = known[f"tiny, {case.name}", "tokens/ms"]
        assert rate.p50 is not None and rate.p99 is not None and rate.p50 >= rate.p99 > 0
        assert f"| tiny, {case.name} | " in page.read_text()
    turned = known["tiny, in place, K turned where it is", "bytes written"]
    assert turned.value == 9 * 16 * 2 * 2 * 8 * 4, "K alone: layers, heads, dimension, bytes of float32"


def test_bytes_that_change_while_documents_are_read_are_counted(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, calls = command._rows, []

    def spoiled(probe: object, states: object) -> list[object]:
        found = rows(probe, states)  # type: ignore[arg-type]
        calls.append(found)
        if len(calls) == 2:
            found[-1][0, 1, 0, 3, :5] += 1
        return found

    monkeypatch.setattr(command, "_rows", spoiled)
    assert main([*arguments(model_folder), "--cases", "copy, shuffled", "--json", "--check"]) == 1
    figures = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [f["value"] for f in figures if f["metric"] == "bytes moved"] == [5 * 4]


def test_a_wrong_result_is_told_and_not_timed(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = PageMover.run

    def stand_still(self: PageMover, plan: MovePlan) -> None:
        """Moves nothing of more than one document."""
        if plan.num_rows <= 44:
            run(self, plan)

    monkeypatch.setattr(PageMover, "run", stand_still)
    assert main([*arguments(model_folder), "--cases", "copy, shuffled", "--json"]) == 1
    told = capsys.readouterr()
    assert "copy, shuffled: K's error" in " ".join(told.err.replace("│", " ").split())
    named = {json.loads(line)["case"] for line in told.out.splitlines()}
    assert "tiny, plain copy" in named and "tiny, copy, shuffled" not in named


def test_many_copies_of_long_documents_stay_within_the_models_positions(model_folder: Path) -> None:
    sizes = ["--documents", "2", "--tokens", "200", "--question", "5", "--repeats", "9"]
    assert main([*arguments(model_folder), *sizes, "--cases", "copy, shuffled", "--json"]) == 0


def test_a_name_that_no_plan_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "reposition", "--shape", "tiny", "--cases", "none of them"]) == 1
    assert "cases: no plan's name contains 'none of them'" in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "wrong", [["--documents", "1"], ["--moves", "0"], ["--width", "0"], ["--repeats", "0"]]
)
def test_arguments_that_make_no_sense_are_refused(model_folder: Path, wrong: list[str]) -> None:
    assert main([*arguments(model_folder), *wrong]) == 2


def test_documents_that_the_model_cannot_see_at_once_are_refused(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments(model_folder), "--tokens", "300"]) == 1
    assert "are too many" in " ".join(capsys.readouterr().err.split())
