"""A pytest kit for retrievers: inherit `RetrieverConformance` and say how to make yours.

    class TestMine(RetrieverConformance):
        def make(self, text): return MyRetriever.of_text(text, "corpus")

It holds what planning and reuse rely on: the same fragments, letter by letter, for the same question.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from dagengine_core_graph.query import Fragment

from .retrievers import Retriever

PARAGRAPHS = (
    "The aardvark eats ants and termites, which it digs out at night.",
    "Alaska is the largest state; its capital can be reached by sea or by air only.",
    "A quaternion has four parts, and the order of a product matters.",
    "Bread rises because yeast makes carbon dioxide of sugar.",
    'Quotes " and operators AND (NEAR OR NOT) * are letters like any others.',
)
ODD = (
    '"',
    "AND",
    "a OR",
    "(",
    "*",
    "NEAR(a",
    "'; DROP TABLE corpus; --",
    "…",
    "\x00",
    "ä ö ü",
    "-x",
    "a:b",
    "^",
)


class RetrieverConformance:
    """Every test of a retriever."""

    def make(self, text: str) -> Retriever:
        """A retriever over a text whose paragraphs are fragments of their own, or parts of some."""
        raise NotImplementedError

    @pytest.fixture
    def retriever(self) -> Retriever:
        filler = "\n\n".join(f"Filler {number}. " + "word " * 260 for number in range(4))
        return self.make("\n\n".join((*PARAGRAPHS[:2], filler, *PARAGRAPHS[2:])))

    def test_the_best_comes_first(self, retriever: Retriever) -> None:
        for question, wanted in (("Which animal eats termites?", 0), ("yeast and bread", 3)):
            assert PARAGRAPHS[wanted] in retriever.find(question, 3)[0].text

    def test_there_are_at_most_as_many_as_asked_for(self, retriever: Retriever) -> None:
        for limit in (1, 2, 3):
            assert 0 < len(retriever.find("the order of bread, ants and words", limit)) <= limit
        assert list(retriever.find("word", 1)) == list(retriever.find("word", 3))[:1]

    def test_they_are_fragments_of_the_corpus(self, retriever: Retriever) -> None:
        found = retriever.find("the capital of a state", 10)
        assert all(isinstance(piece, Fragment) and piece.text for piece in found)
        assert any(PARAGRAPHS[1] in piece.text for piece in found)

    def test_the_same_question_finds_the_same_from_any_thread(self, retriever: Retriever) -> None:
        with ThreadPoolExecutor(4) as pool:
            found = list(pool.map(lambda _: list(retriever.find("the words of an order", 5)), range(16)))
        assert all(pieces == found[0] for pieces in found)

    def test_any_text_is_a_question(self, retriever: Retriever) -> None:
        for question in ODD:
            assert len(retriever.find(question, 2)) <= 2
        assert len(retriever.find("x " * 5000, 2)) <= 2
        assert PARAGRAPHS[4] in retriever.find('Quotes " and (operators', 1)[0].text

    def test_a_corpus_knows_its_own_text_only(self, retriever: Retriever) -> None:
        other = self.make("Nothing of that kind.")
        assert all("aardvark" not in piece.text for piece in other.find("Which animal eats termites?", 5))
        other.close()

    def test_an_empty_corpus_finds_nothing(self) -> None:
        assert list(self.make("").find("anything", 3)) == []
