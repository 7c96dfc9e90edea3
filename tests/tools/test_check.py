"""tools/test's own bookkeeping: what counts as failed, and when the environment is made anew."""

from __future__ import annotations

from pathlib import Path

import pytest

import check
import environment
import wheels
from check import Result

JUNIT = """<testsuites><testsuite tests="7" failures="1" errors="1" skipped="2"/></testsuites>"""


def test_a_report_is_summed(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(JUNIT, encoding="utf-8")
    assert check.read_report(report) == Result(passed=3, failed=2, skipped=2)


@pytest.mark.parametrize("content", [None, "", "<testsuites>"])
def test_a_missing_or_broken_report_is_a_failure(tmp_path: Path, content: str | None) -> None:
    report = tmp_path / "report.xml"
    if content is not None:
        report.write_text(content, encoding="utf-8")
    assert check.read_report(report).failed == 1


def test_the_last_line_counts_and_the_status_tells(capsys: pytest.CaptureFixture[str]) -> None:
    assert check.report([("a", 1.0, Result(3, 0, 1)), ("b", 1.0, Result(2, 0))], 2.0) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "5 passed, 0 failed, 1 skipped"
    assert check.report([("a", 1.0, Result(3, 0)), ("b", 1.0, Result(2, 1, advice="try b"))], 2.0) == 1
    output = capsys.readouterr().out
    assert output.splitlines()[-1] == "5 passed, 1 failed, 0 skipped"
    assert "b failed; next: try b" in output


def test_a_stage_without_tests_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "REPORTS", tmp_path)
    monkeypatch.setattr(check, "python", lambda: Path(__import__("sys").executable))
    empty = tmp_path / "empty"
    empty.mkdir()
    assert check.pytest_stage("empty", "no tests", [str(empty)]).run([]).failed == 1


def test_the_environment_is_made_anew_when_a_requirement_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    for name in ("requirements.txt", "requirements-dev.txt"):
        (tmp_path / name).write_text(f"# {name}\n", encoding="utf-8")
    (tmp_path / "packages" / "one").mkdir(parents=True)
    project = tmp_path / "packages" / "one" / "pyproject.toml"
    project.write_text("[project]\n", encoding="utf-8")
    first = {level: environment.fingerprint(level) for level in environment.LEVELS}
    assert first == {level: environment.fingerprint(level) for level in environment.LEVELS}
    (tmp_path / "requirements-dev.txt").write_text("pytest\n", encoding="utf-8")
    assert environment.fingerprint("serve") == first["serve"]
    assert environment.fingerprint("test") != first["test"]
    project.write_text("[project]\ndependencies = ['numpy']\n", encoding="utf-8")
    assert environment.fingerprint("serve") != first["serve"]


def test_a_wheel_brings_the_siblings_that_it_requires_and_no_other() -> None:
    def wheel(name: str, *requires: str) -> wheels.Wheel:
        return wheels.Wheel(Path(f"{name}.whl"), name, requires, ())

    graph, store = wheel("dagengine-core-graph"), wheel("dagengine-kvstore")
    positions = wheel("dagengine-positions", "dagengine-core-graph")
    engine = wheel("dagengine", "torch", "dagengine-positions", "dagengine-core-graph")
    by_name = {one.name: one for one in (graph, store, positions, engine)}
    assert wheels.siblings(graph, by_name) == []
    assert wheels.siblings(engine, by_name) == [positions, graph]
