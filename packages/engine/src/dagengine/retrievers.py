"""Retrieval: named corpora, each behind a retriever, as the plan of a span query asks for them.

A retriever is a plug-in of the group `dagengine.retrievers`, by its name there a subclass of `Retriever`. It is held to
`dagengine.retriever_conformance`. It returns texts; how their states are reused is the engine's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import ClassVar, Self

from dagengine_core_graph.query import Fragment, Retrieve

from .errors import DagError, shown

GROUP = "dagengine.retrievers"
DEFAULT = "fts5"
DEFAULT_LIMIT = 4


class Retriever(ABC):
    """One corpus. It is asked by several threads at once.

    Attributes:
        takes_embedding_model: whether `find` heeds the model's name; where it does not, naming one is refused.
    """

    takes_embedding_model: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def open(cls, location: Path) -> Self:
        """The corpus at a place. Raises DagError `invalid_request` for what cannot be read."""

    @classmethod
    @abstractmethod
    def of_text(cls, text: str, name: str) -> Self:
        """A corpus that a query sends along."""

    @abstractmethod
    def find(self, question: str, limit: int, embedding_model: str | None = None) -> Sequence[Fragment]:
        """At most `limit` fragments, best first, the same for the same question; none where nothing fits."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the corpus."""


@dataclass(frozen=True)
class Corpora:
    """Corpora by name; called with a retrieval it is what planning needs.

    Attributes:
        documents: what makes a corpus of a text that a query sends along.
    """

    corpora: Mapping[str, Retriever]
    documents: type[Retriever]

    def __call__(self, query: Retrieve) -> Sequence[Fragment]:
        """The fragments of a retrieval, 4 where it names no limit.

        Raises:
            DagError: `invalid_request` for a corpus that is not known, `unsupported` for an embedding model that would
                change nothing.
        """
        if query.document is not None:
            corpus = self.documents.of_text(query.document, query.corpus)
            try:
                return self._find(corpus, query)
            finally:
                corpus.close()
        known = self.corpora.get(query.corpus)
        if known is None:
            names = ", ".join(sorted(self.corpora)) or "none"
            message = f"there is no corpus {query.corpus[:100]!r}; known: {names}"
            raise DagError("invalid_request", message, "retrieve.corpus")
        return self._find(known, query)

    def _find(self, corpus: Retriever, query: Retrieve) -> Sequence[Fragment]:
        if query.embedding_model is not None and not corpus.takes_embedding_model:
            message = "this retriever uses no embedding model; leave it out"
            raise DagError("unsupported", message, "retrieve.embedding_model")
        limit = DEFAULT_LIMIT if query.limit is None else query.limit
        return corpus.find(query.text, limit, query.embedding_model)

    def close(self) -> None:
        """Let go of every corpus."""
        for corpus in self.corpora.values():
            corpus.close()


def guarded(
    retriever: Callable[[Retrieve], Iterable[str | Fragment]],
) -> Callable[[Retrieve], list[str | Fragment]]:
    """The same retriever, any failure of which is a DagError.

    Raises, when it is called: DagError `internal` for an exception of the retriever, or for what is no list of
    fragments and texts.
    """

    def find(query: Retrieve) -> list[str | Fragment]:
        try:
            returned = retriever(query)
            if isinstance(returned, str | Mapping):
                raise TypeError(f"it returns {shown(returned)}, which is no list")
            found = list(returned)
        except DagError:
            raise
        except Exception as error:
            message = f"the retriever failed: {type(error).__name__}: {error}"
            raise DagError("internal", message, "retrieve") from error
        for piece in found:
            if not isinstance(piece, str | Fragment):
                message = f"a retriever returns fragments or texts, not {shown(piece)}"
                raise DagError("internal", message, "retrieve")
        return found

    return find


def open_corpora(places: Mapping[str, Path], retriever: str = DEFAULT) -> Corpora:
    """Open corpora with a retriever, by the plug-in's name.

    Raises:
        DagError: `unsupported` for a name that no plug-in or more than one has, `plugin_broken`, what `open` raises.
    """
    made = retriever_class(retriever)
    opened: dict[str, Retriever] = {}
    try:
        for name, place in places.items():
            opened[name] = made.open(place)
    except BaseException:
        Corpora(opened, made).close()
        raise
    return Corpora(opened, made)


def retriever_class(name: str) -> type[Retriever]:
    """A plug-in by its name. Raises as `open_corpora`."""
    points = list(entry_points(group=GROUP, name=name))
    if len(points) != 1:
        known = ", ".join(sorted({point.name for point in entry_points(group=GROUP)}))
        reason = f"{len(points)} plug-ins have this name" if points else f"known: {known}"
        raise DagError("unsupported", f"no retriever {name!r}; {reason}", "retriever")
    try:
        found = points[0].load()
    except Exception as error:
        raise DagError("plugin_broken", f"{points[0].value}: {error}", "retriever") from None
    if not isinstance(found, type) or not issubclass(found, Retriever):
        raise DagError("plugin_broken", f"{points[0].value} is no Retriever", "retriever")
    return found
