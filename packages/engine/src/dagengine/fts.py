"""The retriever `fts5`: BM25 over a folder of text files, a text file, or JSON lines, with SQLite's full-text index.

    folder      every .txt, .md and .rst file below it, by path; a file is cut at blank lines
    file.jsonl  a line is a fragment: {"text": …, "source"?: …}

The index is in memory and made when the corpus is opened. Words are those of SQLite's `unicode61`, English endings cut
off (`porter`). A fragment fits that holds any word of the question; what holds rare ones, and is short, comes first.
"""

from __future__ import annotations

import json
import re
import sqlite3
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from dagengine_core_graph.query import Fragment

from .errors import DagError
from .retrievers import Retriever

SUFFIXES = (".txt", ".md", ".rst")
MOST_CHARACTERS = 1200
MOST_WORDS = 256
WORD = re.compile(r"\w+")


class SqliteFts(Retriever):
    """Fragments in memory.

    Args:
        fragments: in order; of equally good ones the first comes first. Those without text are left out.
    """

    def __init__(self, fragments: Iterable[Fragment]) -> None:
        self._fragments = [fragment for fragment in fragments if fragment.text.strip()]
        self._lock = threading.Lock()
        self._index = sqlite3.connect(":memory:", check_same_thread=False)
        self._index.execute("CREATE VIRTUAL TABLE corpus USING fts5(text, tokenize = 'porter unicode61')")
        rows = ((row, fragment.text) for row, fragment in enumerate(self._fragments))
        self._index.executemany("INSERT INTO corpus (rowid, text) VALUES (?, ?)", rows)

    def __len__(self) -> int:
        return len(self._fragments)

    @classmethod
    def open(cls, location: Path) -> Self:
        try:
            return cls(list(_read(Path(location))))
        except (OSError, UnicodeDecodeError) as error:
            raise DagError("invalid_request", f"{location} cannot be read: {error}", "corpus") from None

    @classmethod
    def of_text(cls, text: str, name: str) -> Self:
        return cls(_cut(text, name))

    def find(self, question: str, limit: int, embedding_model: str | None = None) -> list[Fragment]:
        words = list(dict.fromkeys(WORD.findall(question)))[:MOST_WORDS]
        if not words:
            return []
        wanted = " OR ".join(f'"{word}"' for word in words)
        with self._lock:
            rows = self._index.execute(
                "SELECT rowid FROM corpus WHERE corpus MATCH ? ORDER BY bm25(corpus), rowid LIMIT ?",
                (wanted, limit),
            ).fetchall()
        return [self._fragments[row] for (row,) in rows]

    def close(self) -> None:
        with self._lock:
            self._index.close()


def _read(location: Path) -> Iterator[Fragment]:
    if location.is_dir():
        for path in sorted(location.rglob("*")):
            if path.is_file() and path.suffix.lower() in SUFFIXES:
                yield from _cut(path.read_text(encoding="utf-8"), path.relative_to(location).as_posix())
    elif location.suffix.lower() == ".jsonl":
        for number, line in enumerate(location.read_text(encoding="utf-8").split("\n"), 1):
            if line.strip():
                yield _parsed(line, f"{location.name}:{number}")
    else:
        yield from _cut(location.read_text(encoding="utf-8"), location.name)


def _parsed(line: str, place: str) -> Fragment:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise DagError("invalid_request", f"{place} is no JSON: {error}", "corpus") from None
    text = value.get("text") if isinstance(value, dict) else None
    source = value.get("source", place) if isinstance(value, dict) else None
    if not isinstance(text, str) or not isinstance(source, str):
        raise DagError("invalid_request", f'{place}: {{"text": …, "source"?: …}} is needed', "corpus")
    if any("\ud800" <= character <= "\udfff" for character in text + source):
        raise DagError("invalid_request", f"{place} holds a lone surrogate, which is no character", "corpus")
    return Fragment(text, source)


def _cut(text: str, name: str) -> Iterator[Fragment]:
    """Paragraphs, short ones together, in pieces of at most 1,200 characters unless one paragraph is longer."""
    piece: list[str] = []
    number = 0
    for paragraph in re.split(r"\n\s*\n", text):
        paragraph = paragraph.strip()
        if piece and sum(map(len, piece)) + len(paragraph) > MOST_CHARACTERS:
            number += 1
            yield Fragment("\n\n".join(piece), f"{name}#{number}")
            piece = []
        if paragraph:
            piece.append(paragraph)
    if piece:
        yield Fragment("\n\n".join(piece), f"{name}#{number + 1}")
