"""Evidence sets from a file: a question a line, with the fragments that it reads, as a user's own retrieval found them.

    {"question": "Which of ...?", "fragments": [{"id": "d1#3", "text": "..."}, {"id": "d7#0"}, "a text without an id"]}

Fragments are the same where their ids are, or without ids where their texts are. A text is needed where an id comes
first.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ..console import CommandError, read_text
from .overlap import Workload

Key = tuple[str, str]


def read_evidence(path: Path) -> Workload:
    """Raises CommandError, naming the line, for what is no such file."""
    from dagengine import DagError

    from ...parsing import parse_json

    index: dict[Key, int] = {}
    texts: list[str] = []
    questions: list[str] = []
    reads: list[tuple[int, ...]] = []
    for number, line in enumerate(read_text(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            found = parse_json(line.encode())
            question, fragments = found["question"], found["fragments"]
            if set(found) != {"question", "fragments"} or not isinstance(question, str) or not question:
                raise TypeError
            if not isinstance(fragments, list):
                raise TypeError
            keyed = [_fragment(fragment) for fragment in fragments]
        except (DagError, KeyError, TypeError):
            says = 'a line is {"question": text, "fragments": [{"id": text, "text": text} or a text, ...]}'
            raise CommandError(f"{path.name}, line {number}: {says}", "evidence") from None
        for key, text in keyed:
            known = index.get(key)
            if known is None and text is None:
                raise CommandError(f"{path.name}, line {number}: {key[1]!r} has no text yet", "evidence")
            if known is not None and text is not None and texts[known] != text:
                raise CommandError(f"{path.name}, line {number}: {key[1]!r} had another text", "evidence")
            if known is None:
                index[key] = len(texts)
                texts.append(text or "")
        places = tuple(index[key] for key, _ in keyed)
        if len(set(places)) < max(1, len(places)):
            raise CommandError(f"{path.name}, line {number}: fragments are needed, each once", "evidence")
        questions.append(question)
        reads.append(places)
    if not questions:
        raise CommandError(f"{path.name} holds no question", "evidence")
    return Workload(texts, questions, reads)


def _fragment(value: object) -> tuple[Key, str | None]:
    """What a fragment is known by, and its text if it is told. Raises TypeError, KeyError."""
    if isinstance(value, str) and value:
        return ("text", value), value
    if not isinstance(value, Mapping) or not set(value) <= {"id", "text"}:
        raise TypeError
    name, text = value["id"], value.get("text")
    if not isinstance(name, str) or not (text is None or (isinstance(text, str) and text)):
        raise TypeError
    return ("id", name), text
