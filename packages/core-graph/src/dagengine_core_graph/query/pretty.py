"""A query for people: one line a subtree, indented under what holds it."""

from __future__ import annotations

import json

from .expressions import (
    Chat,
    Fragment,
    Generate,
    GenerateParams,
    Map,
    Message,
    Print,
    Query,
    Repeat,
    Retrieve,
)

LONGEST_TEXT = 60


def pretty(query: Query, *, longest: int | None = LONGEST_TEXT, widest: int | None = None) -> str:
    """The tree as indented lines.

    Args:
        longest: characters of a text that are shown; None shows all.
        widest: subtrees of one node that are shown; None shows all.
    """
    lines: list[str] = []
    waiting: list[tuple[int, Query | str]] = [(0, query)]
    while waiting:
        level, found = waiting.pop()
        if isinstance(found, str):
            lines.append("  " * level + found)
            continue
        lines.append("  " * level + describe(found, longest))
        below: list[tuple[int, Query | str]] = [(level + 1, child) for child in found.subqueries]
        if isinstance(found, Map):
            below = [(level + 1, quoted(text, longest)) for text in found.inputs]
        if widest is not None and len(below) > widest:
            below = [*below[:widest], (level + 1, f"… {len(below) - widest} more")]
        waiting += reversed(below)
    return "\n".join(lines) + "\n"


def describe(query: Query, longest: int | None = LONGEST_TEXT) -> str:
    """One line: the constructor and what it holds besides subtrees."""
    match query:
        case Message(text=text) | Print(text=text):
            return f"{query.tag} {quoted(text, longest)}"
        case Fragment(text, source):
            where = "" if source is None else f" from {quoted(source, longest)}"
            return f"fragment {quoted(text, longest)}{where}"
        case Generate(params, _, closed):
            return f"g {_params(params)}{' closed' if closed else ''}"
        case Chat(params) | Map(params):
            return f"{query.tag} {_params(params)}"
        case Repeat(n):
            return f"repeat {n}"
        case Retrieve(corpus, _, limit):
            return f"retrieve {quoted(corpus, longest)}{'' if limit is None else f' limit={limit}'}"
    return query.tag


def quoted(text: str, longest: int | None = LONGEST_TEXT) -> str:
    """The text in quotes, on one line, cut to `longest` characters."""
    if longest is not None and len(text) > longest:
        text = text[: max(longest - 1, 0)] + "…"
    return json.dumps(text, ensure_ascii=False)


def _params(params: GenerateParams) -> str:
    words = [] if params.model is None else [f"model={params.model}"]
    if params.max_tokens:
        words.append(f"max_tokens={params.max_tokens}")
    words.append(f"temperature={params.temperature:g}")
    words += [f"{name}={json.dumps(value)}" for name, value in params.options.items()]
    return " ".join(words)
