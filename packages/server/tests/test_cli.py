"""The command line: finding commands, documents of graphs, plug-ins, offline generation."""

from __future__ import annotations

import importlib
import json
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest
import typer
from conftest import Server

from dagengine_server.cli import commands, main, plugins, threads

CASES = Path(__file__).parent / "data" / "graph_semantics.json"
DOCUMENT = {
    "format": "dagengine.graph/v1",
    "nodes": [
        {"id": "doc1", "input": "the first"},
        {"id": "doc2", "input": "another one"},
        {
            "id": "answer",
            "context": [{"node": "doc2"}, {"node": "doc1"}],
            "input": "in the",
            "generate": {"max_tokens": 4},
        },
        {"id": "judge", "context": [{"node": "answer", "mode": "artifact"}], "input": "on"},
        {"id": "lost", "context": [{"state": "st_unknown"}], "input": "on"},
        {"id": "after", "context": [{"node": "lost"}], "input": "on"},
    ],
}


def write(folder: Path, value: Any) -> str:
    file = folder / "document.json"
    file.write_text(json.dumps(value))
    return str(file)


def printed(capsys: pytest.CaptureFixture[str]) -> Any:
    return json.loads(capsys.readouterr().out)


def test_help_lists_every_command_with_its_summary(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name in ("serve", "generate", "explain", "graph", "bench", "plugins"):
        assert name in text
    assert "(broken" not in text


def test_an_unknown_command_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serv"]) == 2
    assert "did you mean 'serve'?" in capsys.readouterr().err


def test_an_unknown_option_is_an_error_with_a_suggestion(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--prot", "1"]) == 2
    error = capsys.readouterr().err
    assert "--prot" in error and "--port" in error


def third_party(monkeypatch: pytest.MonkeyPatch, *values: str) -> None:
    points = [
        EntryPoint(name, value, commands.GROUP) for name, _, value in (v.partition("=") for v in values)
    ]
    monkeypatch.setattr(commands, "entry_points", lambda group: points)


def greet(arguments: list[str]) -> int:
    """Greets."""
    print("hello", *arguments)
    return 3


def test_a_third_party_command_gets_its_arguments_and_gives_the_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    third_party(monkeypatch, f"greet={__name__}:greet", "gone=no_such_module:run")
    assert main(["greet", "you", "--loudly"]) == 3
    assert capsys.readouterr().out == "hello you --loudly\n"
    assert main(["gone"]) == 1
    assert "no_such_module" in capsys.readouterr().err
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert "Greets." in text and "broken: ModuleNotFoundError" in text


def test_help_shows_whole_names_and_the_defaults_that_others_decide(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["serve", "--help"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "--max-num-batched-tokens" in text and "DAGENGINE_MAX_NUM_BATCHED_TOKENS" in text
    assert "[default: 64 on a CPU, 256 on a GPU]" in text


@pytest.mark.parametrize("name", ["serve", "generate", "explain", "audit", "replay", "bench"])
def test_variables_and_keys_have_the_names_of_their_options(name: str) -> None:
    def parameters(command: Any) -> list[Any]:
        inner = getattr(command, "commands", {}).values()
        return [p for c in inner for p in parameters(c)] if inner else list(command.params)

    command = typer.main.get_command(importlib.import_module(f"dagengine_server.cli.{name}").app)
    found = [p for p in parameters(command) if p.opts[0].startswith("--") and p.name != "as_json"]
    assert len(found) > 5
    assert [p.name for p in found if f"--{p.name.replace('_', '-')}" not in p.opts] == []


NONE = "dagengine.transfers"


def test_plugins_lists_all_groups_with_the_error_of_a_broken_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = plugins.entry_points
    bad = EntryPoint("bad", "no_such_module:Thing", "dagengine.models")
    monkeypatch.setattr(
        plugins,
        "entry_points",
        lambda group: [bad] if group == "dagengine.models" else [] if group == NONE else real(group=group),
    )
    assert main(["plugins", "--json"]) == 0
    found = {(p["group"], p["name"]): p for p in printed(capsys)}
    assert found["dagengine.attention_backends", "segmented"]["error"] is None
    assert found["dagengine.position_policies", "linear"]["distribution"] == "dagengine-positions"
    assert "no_such_module" in found["dagengine.models", "bad"]["error"]
    assert [p["name"] for p in found.values() if p["error"]] == ["bad"]
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert f"{NONE}: none" in text and "1 broken" in text


def test_explain_answers_the_worked_cases_in_their_own_shape(capsys: pytest.CaptureFixture[str]) -> None:
    cases = json.loads(CASES.read_text())
    assert main(["explain", str(CASES), "--json"]) == 0
    expected = [{"name": case["name"], "expected": case["expected"]} for case in cases]
    assert printed(capsys) == expected


def test_explain_prints_cases_as_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", str(CASES)]) == 0
    text = capsys.readouterr().out
    assert "fork_join" in text and "own@12" in text


def test_a_document_of_lengths_needs_no_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nodes = [
        {"id": "b", "length": 2, "context": [{"node": "a"}]},
        {"id": "a", "length": 3},
    ]
    file = write(tmp_path, {"format": "dagengine.graph/v1", "nodes": nodes})
    assert main(["explain", file, "--json"]) == 0
    (case,) = printed(capsys)
    assert case["expected"]["b"]["linear"] == {"segments": [["a", 0, 3, 0, 0]], "own_start": 3}


def test_explain_says_the_same_as_a_server(
    server: Server, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def untimed(plan: dict[str, Any]) -> Any:
        return [{k: v for k, v in node.items() if k != "timing_ms"} for node in plan["nodes"]]

    file = write(tmp_path, DOCUMENT)
    options = ["--max-model-len", "512", "--page-size", "4", "--kv-pages", "160"]
    assert main(["explain", file, "--model", str(model_folder), "--json", *options]) == 0
    here = untimed(printed(capsys))
    assert main(["explain", file, "--url", server.url, "--json"]) == 0
    assert here == untimed(printed(capsys))
    judge, lost, after = here[3], here[4], here[5]
    assert judge["visible"][0][0] == "answer" and judge["tokens"]["visible"] == 4
    assert lost["error"]["code"] == "state_not_found" and after["error"]["code"] == "parent_failed"
    assert main(["explain", file, "--url", server.url]) == 0
    assert "state_not_found" in capsys.readouterr().out


def test_explain_without_a_model_asks_for_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain", write(tmp_path, DOCUMENT)]) == 1
    assert "needs a model" in capsys.readouterr().err


def test_graph_check_counts_a_valid_document(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["graph", "check", write(tmp_path, DOCUMENT), "--json"]) == 0
    found = printed(capsys)
    assert (found["valid"], found["nodes"], found["references"]) == (True, 6, 5)
    assert main(["graph", "check", str(CASES)]) == 0


@pytest.mark.parametrize(
    ("change", "code", "field"),
    [
        ({"generate": {"max_tokenz": 4}}, "invalid_request", "nodes[2].generate.max_tokenz"),
        ({"keep": {"ttl": 4}}, "invalid_request", "nodes[2].keep.ttl"),
        ({"context": [{"node": "nowhere"}]}, "state_not_found", "nodes[2].context[0].node"),
        ({"context": [{"node": "judge"}]}, "cycle", None),
    ],
)
def test_graph_check_names_what_is_wrong(
    change: dict[str, Any], code: str, field: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    nodes = [dict(node) for node in DOCUMENT["nodes"]]
    nodes[2].update(change)
    file = write(tmp_path, {**DOCUMENT, "nodes": nodes})
    assert main(["graph", "check", file, "--json"]) == 1
    error = printed(capsys)["error"]
    assert error["code"] == code
    assert field is None or error["field"] == field
    assert main(["graph", "check", file]) == 1
    assert code in capsys.readouterr().err


@pytest.mark.parametrize("text", ["", "{", "3", '"x"', "[3]", "{}", "[" * 10**5], ids=lambda text: text[:3])
def test_no_document_makes_a_traceback(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "file.json"
    file.write_text(text)
    for command in (["graph", "check"], ["explain"]):
        assert main([*command, str(file)]) == 1
        assert "error: " in capsys.readouterr().err


WRONG_LENGTHS: list[tuple[list[dict[str, Any]], str, str]] = [
    (
        [{"id": "b", "length": 2, "context": [{"node": "a", "mode": "artifact", "span": [0, 9]}]}],
        "span_out_of_range", "nodes[0].context[0].span",
    ),
    ([{"id": "b", "length": 2, "context": [{"node": "a", "at": 9}]}], "span_out_of_range", "nodes[0].context[0].at"),
    (
        [{"id": "b", "length": 2, "context": [{"node": "a"}, {"node": "a", "mode": "digest"}]}],
        "edge_mix_forbidden", "nodes[0].context[1].mode",
    ),
    (
        [{"id": "b", "length": 2, "position": {"policy": "zigzag"}}], "policy_unsupported", "nodes[0].policy",
    ),
]  # fmt: skip


@pytest.mark.parametrize(("nodes", "code", "field"), WRONG_LENGTHS)
def test_lengths_are_checked_as_far_as_they_tell(
    nodes: list[dict[str, Any]],
    code: str,
    field: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The same refusal with the document's own path, though what is read comes later in the document."""
    file = write(tmp_path, {"format": "dagengine.graph/v1", "nodes": [*nodes, {"id": "a", "length": 3}]})
    assert main(["graph", "check", file, "--json"]) == 1
    error = printed(capsys)["error"]
    assert (error["code"], error["field"]) == (code, field)
    assert main(["explain", file]) == 1
    assert f"{field}: " in capsys.readouterr().err


def test_a_case_without_nodes_is_an_empty_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = write(tmp_path, [{"name": "nothing", "nodes": [], "expected": {}}])
    for command in (["explain"], ["explain", "--json"], ["graph", "check"]):
        assert main([*command, file]) == 0
    assert "nothing" in capsys.readouterr().out


def test_generate_answers_every_prompt_over_the_shared_context(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    document = tmp_path / "document.txt"
    document.write_text("the other one in the")
    common = ["--model", str(model_folder), "--temperature", "0", "--max-tokens", "5", "--kv-pages", "64"]
    context = ["--context-file", str(document), "--context-file", str(document)]
    assert main(["generate", "the", "in", *common, *context, "--threads", "1", "--json"]) == 0
    captured = capsys.readouterr()
    assert "1 CPU thread: as asked" in captured.err
    answers = [json.loads(line) for line in captured.out.splitlines()]
    assert [answer["prompt"] for answer in answers] == [0, 1]
    for answer in answers:
        assert answer["usage"]["completion_tokens"] <= 5
        assert answer["usage"]["cached_tokens"] > 10
        assert answer["position"]["policy"] == "linear"
    assert main(["generate", "the", *common, *context, "--threads", "1"]) == 0
    assert capsys.readouterr().out == answers[0]["text"] + "\n"


def test_generate_refuses_what_the_sampler_refuses(
    model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "the", "--model", str(model_folder), "--top-p", "7"]) == 1
    assert "top_p" in capsys.readouterr().err
    assert main(["generate", "the", "--model", str(model_folder), "--system", "x"]) == 1
    assert "--chat" in capsys.readouterr().err


def test_threads_follow_what_is_asked_then_the_environment_then_the_cores(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads.choose_threads(5) == threads.ThreadChoice(5, "as asked")
    assert threads.choose_threads(None) == threads.ThreadChoice(3, "OMP_NUM_THREADS")
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setattr(threads.os, "sched_getaffinity", lambda _: {0, 1, 2, 3}, raising=False)
    monkeypatch.setattr(threads, "CPUS", tmp_path / "cpu")
    monkeypatch.setattr(threads, "CGROUP", tmp_path / "cgroup")
    for cpu in range(4):
        topology = tmp_path / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(f"{cpu // 2 * 2}-{cpu // 2 * 2 + 1}\n")
    assert threads.choose_threads(None).count == 2
    (tmp_path / "cgroup").mkdir()
    (tmp_path / "cgroup/cpu.max").write_text("150000 100000\n")
    assert threads.choose_threads(None).count == 1
