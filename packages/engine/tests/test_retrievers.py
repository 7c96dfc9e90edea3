"""Retrievers: the built-in one passes the kit, reads folders and JSON lines, and is what a query's R asks."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagengine import LLM, DagError
from dagengine.fts import SqliteFts
from dagengine.retriever_conformance import RetrieverConformance
from dagengine.retrievers import Corpora, Retriever, open_corpora, retriever_class
from dagengine_core_graph.query import cross, g, plus, retrieve


class TestSqliteFts(RetrieverConformance):
    def make(self, text: str) -> Retriever:
        return SqliteFts.of_text(text, "corpus")


def test_a_kit_that_nothing_passes_would_be_worthless() -> None:
    class Silent(SqliteFts):
        def find(self, question: str, limit: int, embedding_model: str | None = None) -> list:
            return []

    class Kit(RetrieverConformance):
        def make(self, text: str) -> Retriever:
            return Silent.of_text(text, "corpus")

    with pytest.raises(IndexError):
        Kit().test_the_best_comes_first(Silent.of_text("a", "b"))


def test_folders_and_json_lines_are_read(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep/b.md").write_text("Bees make honey.\n\n" + "long " * 300 + "\n\nAnts do not.")
    (tmp_path / "a.txt").write_text("Cows give milk.")
    (tmp_path / "c.bin").write_bytes(b"\xff\xfe milk")
    folder = SqliteFts.open(tmp_path)
    assert [piece.source for piece in folder.find("honey", 3)] == ["deep/b.md#1"]
    assert [piece.text for piece in folder.find("milk", 3)] == ["Cows give milk."]
    lines = tmp_path / "corpus.jsonl"
    lines.write_text('{"text": "one honey", "source": "s"}\n\n{"text": "two milk"}\n')
    found = SqliteFts.open(lines)
    assert [(piece.text, piece.source) for piece in found.find("honey milk", 3)] == [
        ("one honey", "s"),
        ("two milk", "corpus.jsonl:3"),
    ]
    for wrong in ("{", "[]", '{"text": 1}'):
        lines.write_text(wrong)
        with pytest.raises(DagError, match=r"corpus\.jsonl:1"):
            SqliteFts.open(lines)
    with pytest.raises(DagError, match="cannot be read"):
        SqliteFts.open(tmp_path / "none.txt")


def test_a_json_line_ends_where_json_lines_do(tmp_path: Path) -> None:
    lines = tmp_path / "corpus.jsonl"
    lines.write_bytes('{"text": "one\u2028honey\x85"}\r\n{"text": "two"}'.encode())
    (found,) = SqliteFts.open(lines).find("honey", 3)
    assert (found.text, found.source) == ("one\u2028honey\x85", "corpus.jsonl:1")


@pytest.mark.parametrize(
    "wrong",
    [r'{"text": "a\ud800"}', r'{"text": "a", "source": "\udc00"}', "[" * 100_000, '{"n": ' + "9" * 5000],
)
def test_json_lines_that_no_corpus_can_hold_are_named(tmp_path: Path, wrong: str) -> None:
    lines = tmp_path / "corpus.jsonl"
    lines.write_text(wrong)
    with pytest.raises(DagError, match=r"corpus\.jsonl:1") as error:
        SqliteFts.open(lines)
    assert (error.value.code, error.value.field) == ("invalid_request", "corpus")


def test_a_text_that_is_no_message_is_refused(llm: LLM) -> None:
    with pytest.raises(DagError) as error:
        llm.query("\ud800")
    assert (error.value.code, error.value.field) == ("invalid_request", "user")


def test_a_query_retrieves_and_its_fragments_are_found_again(llm: LLM, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("Cows give milk.")
    (tmp_path / "b.txt").write_text("Goats give milk as well.")
    corpora = open_corpora({"farm": tmp_path})
    query = g(cross(retrieve("farm", "Who gives milk?"), "Who gives milk?"), max_tokens=4, temperature=0.0)
    first, again = (llm.query(query, retriever=corpora, keep=False) for _ in range(2))
    assert first.text == again.text and first.tokens.reused == 0
    assert again.tokens.hit_rate > 0.6 and len(llm.fragments) == 2
    sent = retrieve("mine", "Who gives milk?", document="Sheep give milk.", limit=1)
    assert "Sheep give milk." in str(llm.query(g(sent), retriever=corpora, max_tokens=2).record["query"])
    corpora.close()


@pytest.mark.parametrize(
    ("query", "code", "field"),
    [
        (retrieve("none", "a"), "invalid_request", "retrieve.corpus"),
        (retrieve("farm", "a", embedding_model="m"), "unsupported", "retrieve.embedding_model"),
    ],
)
def test_a_retrieval_that_cannot_be_made_is_refused(llm: LLM, query: object, code: str, field: str) -> None:
    corpora = Corpora({"farm": SqliteFts.of_text("a", "farm")}, SqliteFts)
    asked = {
        "": query,
        "g.input.cross[0].": g(cross(query, "a")),
        "g.input.cross[1].plus[1].": g(cross("a", plus("b", query))),
    }
    for path, whole in asked.items():
        with pytest.raises(DagError) as error:
            llm.query(whole, retriever=corpora)  # type: ignore[arg-type]
        assert (error.value.code, error.value.field) == (code, path + field)


def test_a_plug_in_is_found_by_its_name() -> None:
    assert retriever_class("fts5") is SqliteFts
    with pytest.raises(DagError) as error:
        retriever_class("none")
    assert (error.value.code, error.value.field) == ("unsupported", "retriever")
