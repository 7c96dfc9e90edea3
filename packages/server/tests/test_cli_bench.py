"""`dagengine bench dag` on the tiny model: parts run, figures are whole, bars are judged. Not how fast."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import Server, wait_until

from dagengine_server.cli import main
from dagengine_server.cli.bench import record, report
from dagengine_server.cli.bench.record import Circumstances, Figure

WHERE = Circumstances("a machine", {"python": "3"}, "abc", "dagengine bench dag")
SMALL = ["--fragments", "3", "--fragment-length", "9", "--question", "4", "--decode", "3", "--prompt", "5"]
SMALL += ["--answer", "12", "--streams", "2", "--readers", "3", "--shared", "20", "--repeats", "2"]
SMALL += ["--baseline-repeats", "1", "--page-size", "4", "--threads", "1", "--no-transformers"]
SMALL += ["--device", "cpu"]
PROGRAM = "import sys; from dagengine_server.cli import main; sys.exit(main())"


def test_every_part_gives_whole_figures(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dagengine_server.cli.bench import planned

    monkeypatch.setattr(planned, "SEGMENTS", (10, 20))
    monkeypatch.setattr(planned, "CHAINS", (10, 20))
    output, page = tmp_path / "cpu.jsonl", tmp_path / "cpu.md"
    files = ["--output", str(output), "--markdown", str(page)]
    assert main(["bench", "dag", "--model", str(model_folder), *SMALL, *files, "--backend", "reference",
                 "--backend", "naive", "--backend", "packed", "--backend", "segmented"]) == 0  # fmt: skip
    assert "later decode" in capsys.readouterr().out
    rows = [json.loads(line) for line in output.read_text().splitlines()]
    fields = (
        "bench case backend metric value unit baseline baseline_value ratio n p50 p95 p99 hardware versions"
    )
    for row in rows:
        assert list(row) == [*fields.split(), "commit", "command"]
    found = {(row["backend"], row["metric"]): row for row in rows if row["case"].startswith("3 fragments")}
    for backend in ("reference", "naive", "packed", "segmented"):
        for metric in (
            "context compile",
            "position layout",
            "KV preparation",
            "first token after the merge",
            "later decode, per token",
        ):
            assert found[backend, metric]["value"] >= 0 and found[backend, metric]["n"] >= 2
        assert found[backend, "max |delta logit|"]["value"] < 1e-3
        assert found[backend, "max |delta logit|"]["baseline"] == "reference"
        assert found[backend, "shared KV bytes"]["value"] == 27 * 2 * 2 * 2 * 8 * 4
        assert found[backend, "temporary bytes"]["value"] > 0
    assert found["segmented", "later decode, per token"]["baseline"] == "naive"
    (readers,) = [row for row in rows if row["baseline"] == "one copy and own tails"]
    assert readers["ratio"] <= 1.02
    (step,) = [row for row in rows if row["baseline"] == "one reader"]
    assert step["n"] >= 3 * 30 and step["value"] > 0
    figures, where = record.load_lines(output.read_text())
    assert report.markdown(figures, where, "`dagengine bench dag`") == page.read_text()


def test_beside_transformers(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    small = [option for option in SMALL if option != "--no-transformers"]
    parts = ["--only", "single-stream", "--only", "first-token", "--json"]
    assert main(["bench", "dag", "--model", str(model_folder), *small, *parts]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    beside = {(row["metric"], row["baseline"]) for row in rows}
    assert ("decode rate", "transformers") in beside
    assert ("first token", "transformers") in beside
    assert ("first token", "one contiguous state") in beside


def test_wrong_parts_and_sizes_are_refused(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "dag", "--model", str(model_folder), "--only", "nothing"]) == 1
    assert "planning" in capsys.readouterr().err
    assert main(["bench", "dag", "--model", str(model_folder), "--page-size", "16"]) == 1
    assert "question" in capsys.readouterr().err


def test_percentiles_lie_between_samples() -> None:
    figure = Figure.of("case", "", "metric", [4.0, 1.0, 3.0, 2.0], "ms")
    assert (figure.value, figure.n, figure.p50) == (2.5, 4, 2.5)
    assert figure.p99 == pytest.approx(3.97)
    assert figure.against("other", 5.0).ratio == 0.5


def test_bars_are_judged_by_the_figure_that_they_name() -> None:
    sooner = Figure.of("16 fragments x 256, question 64", "segmented", "first token", [100.0], "ms")
    figures = [
        Figure.of("1 stream, prompt 1", "b", "decode rate", [9.0], "tokens/s").against("transformers", 10.0),
        sooner.against("transformers", 4100.0),
        sooner.against("one contiguous state", 50.0),
        Figure.of("100 segments", "", "compile and layout", [0.5], "ms"),
    ]
    words = {verdict.bar.title: verdict.word for verdict in report.verdicts(figures)}
    assert list(words.values()) == [
        "FAIL",
        "not measured",
        "pass",
        "FAIL",
        "pass",
        *["not measured"] * 5,
    ]
    text = report.markdown(figures, WHERE, "Title")
    assert "| 41 x sooner | pass |" in text and "| 2 x its time | FAIL |" in text


def test_figures_survive_their_lines_of_json() -> None:
    figures = [Figure.count("case", "b", "metric", 3, "B").against("other", 4)]
    assert record.load_lines(record.dump_lines(figures, WHERE)) == (figures, WHERE)


def test_a_bench_that_is_told_to_end_leaves_no_files(tmp_path: Path) -> None:
    command = [
        "bench",
        "offline",
        "--shape",
        "tiny",
        "--streams",
        "64",
        "--repeats",
        "500",
        "--device",
        "cpu",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "measuring" in line:
                break
        assert any(path.name.startswith("dagengine-bench-") for path in tmp_path.iterdir())
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    assert process.returncode == 128 + signal.SIGTERM
    assert not any(path.name.startswith("dagengine-bench-") for path in tmp_path.iterdir())


def test_a_bench_that_is_told_to_end_leaves_no_states_on_a_server(server: Server) -> None:
    def states() -> int:
        found: int = server.engine.ask(lambda core: len(core.store.states()))
        return found

    command = [
        "bench",
        "rag",
        "--endpoint",
        server.url,
        "--documents",
        "2",
        "--tokens",
        "9",
        "--question",
        "24",
    ]
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, *command, "--answer", "2", "--repeats", "100000"],
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: states() > 0)
        process.send_signal(signal.SIGTERM)
    assert process.returncode == 128 + signal.SIGTERM
    assert states() == 0


@pytest.mark.parametrize("objective", ["--slo-ttft", "--slo-tpot", "--slo-e2e"])
@pytest.mark.parametrize("value", ["-1", "0"])
def test_an_objective_that_nothing_could_meet_is_refused(
    objective: str, value: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", "--model", "m", objective, value]) == 2
    assert objective in capsys.readouterr().err
