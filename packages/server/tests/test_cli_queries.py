"""`explain`, `audit` and `replay` of span queries, on the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from conftest import Server

from dagengine import DagError
from dagengine.retrievers import Corpora
from dagengine_server.cli import main
from dagengine_server.cli.console import CommandError
from dagengine_server.cli.replay import read_lines

GRAPH = {"format": "dagengine.graph/v1", "nodes": [
    {"id": "x", "input": "a document"},
    {"id": "y", "context": [{"node": "x"}], "input": "draft", "generate": {"max_tokens": 4}},
    {"id": "z", "context": [{"node": "y", "mode": "artifact"}], "input": "judge", "generate": {"max_tokens": 4}},
]}  # fmt: skip
ENGINE = ["--device", "cpu", "--kv-pages", "300", "--page-size", "4"]


def run(*arguments: str) -> int:
    return main(list(map(str, arguments)))


@pytest.fixture
def query(tmp_path: Path) -> Path:
    path = tmp_path / "query.json"
    judge = {"cross": [{"system": "S"}, {"plus": [{"user": "one"}, {"user": "two"}]}, {"user": "Q"}]}
    path.write_text(json.dumps({"repeat": {"n": 2, "g": {"model": "m", "max_tokens": 5, "input": judge}}}))
    return path


def test_explain_shows_the_tree_after_each_rule_the_graph_and_the_layout(
    query: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("explain", str(query)) == 0
    text = capsys.readouterr().out
    for words in ("after unroll_repeat", "after distribute_plus", "flowchart TB", "layout (linear)", "reuse"):
        assert words in text
    assert run("explain", str(query), "--json", "--model", str(model_folder)) == 0
    found = json.loads(capsys.readouterr().out)
    assert [step["rule"] for step in found["steps"]] == ["unroll_repeat", "distribute_plus"]
    calls = [row for row in found["tokens"] if row["sampled"]]
    assert [row["sampled"] for row in calls] == [5, 5] and all(row["visible"] > 10 for row in calls)


def test_explain_and_serve_read_corpora(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "corpus.jsonl").write_text('{"text": "Cows give milk."}\n{"text": "Bees make honey."}\n')
    question = {"retrieve": {"corpus": "farm", "question": {"user": "milk?"}, "limit": 1}}
    document = {
        "format": "dagengine.query/v1",
        "query": {"g": {"input": {"cross": [question, {"user": "?"}]}}},
    }
    (tmp_path / "query.json").write_text(json.dumps(document))
    corpus = f"farm={tmp_path}/corpus.jsonl"
    assert run("explain", str(tmp_path / "query.json"), "--corpus", corpus) == 0
    assert "Cows give milk." in capsys.readouterr().out
    assert run("explain", str(tmp_path / "query.json")) == 1
    assert "no corpus 'farm'" in capsys.readouterr().err
    for wrong in ("farm", "=x", f"farm={tmp_path}/none.jsonl"):
        assert run("explain", str(tmp_path / "query.json"), "--corpus", wrong) == 1


LENGTHS = {"format": "dagengine.graph/v1", "nodes": [{"id": "a", "length": 3}]}
CASES = json.loads((Path(__file__).parent / "data" / "graph_semantics.json").read_text())


@pytest.mark.parametrize(
    ("kind", "given", "field"),
    [
        ("cases", ["--reduce", "2"], "reduce"),
        ("cases", ["--corpus", "a=b"], "corpus"),
        ("cases", ["--retriever", "fts5"], "retriever"),
        ("cases", ["--position-policy", "native"], "position_policy"),
        ("cases", ["--model", "m"], "model"),
        ("lengths", ["--retriever", "fts5"], "retriever"),
        ("lengths", ["--reduce", "2"], "reduce"),
        ("lengths", ["--page-size", "8"], "page_size"),
        ("lengths", ["--api-key", "k"], "api_key"),
        ("lengths", ["--url", "http://127.0.0.1:9", "--kv-pages", "8"], "kv_pages"),
        ("lengths", ["--url", "http://127.0.0.1:9", "--model", "m"], "model"),
        ("query", ["--position-policy", "native"], "position_policy"),
        ("query", ["--dtype", "float32"], "dtype"),
        ("query", ["--url", "http://127.0.0.1:9"], "url"),
        ("query", ["--api-key", "k"], "api_key"),
    ],
)
def test_explain_refuses_an_option_that_its_document_has_no_use_for(
    kind: str, given: list[str], field: str, query: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = query
    if kind != "query":
        path = tmp_path / "document.json"
        path.write_text(json.dumps(CASES if kind == "cases" else LENGTHS))
    assert run("explain", str(path)) == 0
    capsys.readouterr()
    assert run("explain", str(path), *given) == 1
    assert f"{field.replace('_', '-')}: " in capsys.readouterr().err.replace("_", "-")


def test_explain_takes_the_environments_settings_as_defaults(
    query: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DAGENGINE_POSITION_POLICY", "native")
    assert run("explain", str(query)) == 0


@pytest.mark.parametrize("command", ["explain", "audit", "serve"])
def test_corpora_are_closed_also_when_a_command_fails(
    command: str, query: Path, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise DagError("capacity", "planted")

    closed: list[Corpora] = []
    monkeypatch.setattr(Corpora, "close", lambda corpora: closed.append(corpora))
    monkeypatch.setattr("dagengine_core_graph.query.explain", fail)
    monkeypatch.setattr("dagengine.audit.audit", fail)
    monkeypatch.setattr("dagengine.build.build_core", fail)
    (tmp_path / "corpus.jsonl").write_text('{"text": "Cows give milk."}\n')
    given = [str(model_folder) if command == "serve" else str(query)]
    if command == "audit":
        given += ["--model", str(model_folder)]
    assert run(command, *given, "--corpus", f"farm={tmp_path}/corpus.jsonl") == 1
    assert [list(corpora.corpora) for corpora in closed] == [["farm"]]


def test_what_is_no_query_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "query.json"
    path.write_text('{"g": {"model": "m", "input": {"cross": [{"user": "a"}, {"plus": []}]}}}')
    assert run("explain", str(path)) == 1
    assert "g.input.cross[1].plus" in capsys.readouterr().err
    assert run("audit", str(path), "--model", "none") == 1
    assert "g.input.cross[1].plus" in capsys.readouterr().err


def test_audit_says_what_changes(query: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["audit", str(query), "--model", str(model_folder), "--runs", "2", *ENGINE]
    assert run(*arguments, "--json") == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["runs"] >= 1 and len(found["calls"]) == 2 == len(found["answers"])
    assert "of 3 runs" in captured.err or "of 4 runs" in captured.err
    assert run(*arguments) == 0
    text = capsys.readouterr().out
    assert "least agreement of an answer" in text and "plain prompt" in text


def test_replay_compares_what_a_server_said(
    server: Server, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    state = server.post("/v1/states", {"input": "a document"}).json()
    context = [{"state": state["id"]}]
    answers: list[Any] = [
        state,
        server.complete(max_tokens=6, temperature=1.0, n=2),
        server.complete(max_tokens=6, temperature=1.0, dag={"context": context}),
        server.post("/v1/graphs", GRAPH).json(),
        server.post(
            "/v1/query/execute", {"g": {"model": "tiny", "max_tokens": 4, "input": {"user": "a"}}}
        ).json(),
    ]
    path = tmp_path / "records.jsonl"
    path.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    arguments = ["replay", str(path), "--model", str(model_folder), "--device", "cpu", "--kv-pages", "300"]
    assert run(*arguments, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert found["equal"] and not found["exact"] and len(found["answers"]) == 8
    assert run(*arguments) == 0 and "equal" in capsys.readouterr().out
    answers[2]["dag"]["record"]["output"]["token_ids"][1] ^= 3
    path.write_text(json.dumps(answers))
    assert run(*arguments) == 1
    assert "differs" in capsys.readouterr().out
    path.write_text(json.dumps(answers[2]))
    assert run(*arguments) == 1
    assert "whose record is not here" in capsys.readouterr().err


def test_lines_of_records_end_where_json_lines_do(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    path.write_bytes('{"text": "one\u2028line\x85"}\r\n\n{"text": "two"}\n'.encode())
    assert read_lines(path) == [{"text": "one\u2028line\x85"}, {"text": "two"}]
    path.write_text('{"a": 1}\n{')
    with pytest.raises(CommandError, match=r"records\.jsonl:2 is no JSON"):
        read_lines(path)
    path.write_text("[" * 100_000)
    with pytest.raises(CommandError, match="too deeply"):
        read_lines(path)
