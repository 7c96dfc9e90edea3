"""The README's examples run, and print what it says they print."""

import contextlib
import io
import re
from pathlib import Path

import pytest

from dagengine_core_graph import SchemaError
from dagengine_core_graph.query import FORMAT, OUR_TAGS, load_query
from dagengine_core_graph.schema import ContextDocument, GraphDocument, NodeDocument

README = Path(__file__).parents[1] / "README.md"


def test_examples_print_what_the_readme_shows() -> None:
    blocks = re.findall(r"```(python|text)\n(.*?)```", README.read_text(), re.DOTALL)
    assert [kind for kind, _ in blocks] == ["python", "text"] * 5
    names: dict[str, object] = {}
    for (_, code), (_, shown) in zip(blocks[::2], blocks[1::2], strict=True):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(code, str(README), "exec"), names)
        assert printed.getvalue().strip() == shown.strip()


def test_the_table_of_constructors_is_what_documents_are_made_of() -> None:
    """All of them; each loads with the members that it must have, and without one of these it does not."""
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \| (.*) \|$", README.read_text(), re.MULTILINE)
    listed = {tag: content for tags, content in rows for tag in re.findall(r"\w+", tags) if tag in OUR_TAGS}
    assert set(listed) == set(OUR_TAGS)
    message = {"user": "a"}
    values = {"input": message, "messages": [message], "n": 2, "g": {"input": message}, "inputs": ["a"]}
    values |= {
        "metadata": {},
        "first": message,
        "second": message,
        "corpus": "c",
        "question": message,
        "text": "a",
    }
    for tag, content in listed.items():
        members = re.findall(r'"(\w+)"(\??)', content)
        needed = {name: values[name] for name, optional in members if not optional}
        plain = [message] if "list" in content else "a" if "text" in content else message
        whole = needed or plain
        load_query({"format": FORMAT, "query": {tag: whole}})
        for name in needed:
            with pytest.raises(SchemaError):
                load_query({"format": FORMAT, "query": {tag: {n: v for n, v in needed.items() if n != name}}})


def test_the_table_of_graph_documents_has_every_member() -> None:
    rows = re.findall(r"^\| (the document|a node|a reference) \| (.*?) \|", README.read_text(), re.MULTILINE)
    listed: dict[str, set[str]] = {}
    for of, members in rows:
        listed.setdefault(of, set()).update(re.findall(r"`(\w+)`", members))
    assert listed == {
        "the document": {"format", *GraphDocument.__dataclass_fields__} - {"order"},
        "a node": set(NodeDocument.__dataclass_fields__),
        "a reference": set(ContextDocument.__dataclass_fields__),
    }
