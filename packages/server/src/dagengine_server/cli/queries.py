"""What the commands on span queries share: reading one, its corpora, and an engine to run it on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dagengine_core_graph.query import FORMAT, OUR_TAGS, SPNL_TAGS, Query, load_query

from .console import CommandError, read_json

if TYPE_CHECKING:
    from dagengine.retrievers import Corpora

Corpus = Annotated[
    list[str] | None,
    typer.Option(
        "--corpus", metavar="NAME=PATH", help="a folder, text or .jsonl file to retrieve from; repeatable"
    ),
]
RetrieverName = Annotated[str, typer.Option(help="the plug-in that reads the corpora")]


def is_query(document: Any) -> bool:
    """Whether a JSON value is meant as a span query: by its format, or by the constructor that is its only member."""
    if not isinstance(document, dict):
        return False
    if "format" in document:
        return bool(document["format"] == FORMAT)
    return len(document) == 1 and next(iter(document)) in {*OUR_TAGS, *SPNL_TAGS}


def read_query(file: Path) -> Query:
    """The span query of a file. Raises SchemaError with the path of the subtree, CommandError."""
    return load_query(read_json(file))


def corpora_of(given: list[str] | None, retriever: str) -> Corpora:
    """The corpora of `--corpus`; without any, retrievals from texts that a query sends along still work.

    Raises:
        CommandError: what is no NAME=PATH, or a name twice.
        DagError: what cannot be read.
    """
    from dagengine.retrievers import open_corpora

    places: dict[str, Path] = {}
    for item in given or []:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise CommandError(f"NAME=PATH is needed, not {item!r}", "corpus")
        if name in places:
            raise CommandError(f"{name!r} is given twice", "corpus")
        places[name] = Path(path)
    return open_corpora(places, retriever)
