"""Drawings are well-formed whatever the names, and show every node and edge."""

import re
from xml.etree import ElementTree

import pytest

from dagengine_core_graph import Artifact, ContextGraph, Digest, Inherit
from dagengine_core_graph.picture import picture
from dagengine_core_graph.render import dot, mermaid, svg
from dagengine_core_graph.schema import load_graph

SVG = "{http://www.w3.org/2000/svg}"
NASTY = [
    '<script>alert("&")</script>',
    'a"]; n9["',
    "new\nline",
    "\x00\x1b]0;\ud800",
    "图" * 60,
    "",
    "#quot;",
    "\\",
]


@pytest.fixture
def graph() -> ContextGraph:
    graph = ContextGraph()
    graph.add("root", length=1, sealed=True)
    graph.add("left", [Inherit("root")], length=4, sealed=True)
    graph.add("right", [Digest("root"), Artifact("left", (1, 3), at=2)], length=4, sealed=True)
    graph.add("join", [Inherit("right"), Artifact("left"), Artifact("left", "all")], length=2)
    graph.drop("root")
    return graph


def test_a_picture_shows_nodes_edges_and_what_was_dropped(graph: ContextGraph) -> None:
    shown = picture(graph)
    assert [(node.label, node.detail, node.outside) for node in shown.nodes] == [
        ("root", "1 token, dropped", True),
        ("left", "4 tokens", False),
        ("right", "4 tokens", False),
        ("join", "2 tokens, growing", False),
    ]
    assert [(edge.source, edge.target, edge.mode, edge.label) for edge in shown.edges] == [
        (0, 1, "inherit", ""),
        (0, 2, "digest", ""),
        (1, 2, "artifact", "[1:3], cut at 2"),
        (2, 3, "inherit", ""),
        (1, 3, "artifact", "output"),
        (1, 3, "artifact", "all"),
    ]


def test_each_mode_has_its_own_line(graph: ContextGraph) -> None:
    assert "linkStyle 1 stroke-dasharray:8 5" in mermaid(graph)
    assert "linkStyle 2,4,5 stroke-dasharray:2 4" in mermaid(graph)
    assert re.findall(r"-> n\d \[style=(\w+)", dot(graph)) == [
        "solid",
        "dashed",
        "dotted",
        "solid",
        "dotted",
        "dotted",
    ]
    paths = ElementTree.fromstring(svg(graph)).findall(f"{SVG}path")
    assert [path.get("class") for path in paths] == [edge.mode for edge in picture(graph).edges]
    assert len({path.get("d") for path in paths}) == len(paths), "parallel edges do not cover each other"


def test_every_parent_is_drawn_above_its_children_and_no_boxes_overlap(graph: ContextGraph) -> None:
    boxes = [
        tuple(float(rect.get(name, "0")) for name in ("x", "y", "width", "height"))
        for rect in ElementTree.fromstring(svg(graph)).iter(f"{SVG}rect")
    ]
    for edge in picture(graph).edges:
        assert boxes[edge.source][1] + boxes[edge.source][3] < boxes[edge.target][1]
    for index, (x, y, width, _) in enumerate(boxes):
        for other_x, other_y, _, _ in boxes[index + 1 :]:
            assert y != other_y or x + width < other_x or other_x < x


@pytest.mark.parametrize("name", NASTY)
def test_names_from_outside_stay_text(name: str) -> None:
    graph = ContextGraph()
    graph.add(name, length=1, sealed=True)
    graph.add("reader", [Inherit(name)])
    root = ElementTree.fromstring(svg(graph).encode("utf-8", "strict"))
    assert len(list(root.iter(f"{SVG}g"))) == 2
    assert not list(root.iter(f"{SVG}script"))
    title = next(root.iter(f"{SVG}title")).text or ""
    assert title == re.sub("[\x00\x1b\ud800]", "\ufffd", name)
    flowchart = mermaid(graph)
    assert flowchart.count("\n") == 4
    assert re.fullmatch(r'  n0\["[^"<>]*<br/>1 token"\]|  n0\["1 token"\]', flowchart.splitlines()[1])
    drawn = dot(graph).splitlines()[2]
    assert re.fullmatch(r'  n0 \[label="(?:[^"\\]|\\.)*"\];', drawn)
    assert len(dot(graph).splitlines()) == 6


def test_a_document_shows_its_states_as_outside_nodes() -> None:
    document = load_graph(
        {
            "format": "dagengine.graph/v1",
            "nodes": [
                {
                    "id": "b",
                    "length": 3,
                    "context": [{"node": "a"}, {"state": "a", "mode": "artifact", "start": 4}],
                },
                {"id": "a", "input": "x"},
            ],
        }
    )
    shown = picture(document)
    assert [(node.label, node.outside) for node in shown.nodes] == [("b", False), ("a", False), ("a", True)]
    assert [(edge.source, edge.target, edge.label) for edge in shown.edges] == [
        (1, 0, ""),
        (2, 0, "output, start 4"),
    ]
    assert len(list(ElementTree.fromstring(svg(document)).iter(f"{SVG}rect"))) == 3


def test_an_empty_graph_is_an_empty_drawing() -> None:
    assert not list(ElementTree.fromstring(svg(ContextGraph())).iter(f"{SVG}rect"))
    assert mermaid(ContextGraph()) == "flowchart TB\n"
    assert dot(ContextGraph()).endswith("}\n")


def test_a_deep_graph_is_drawn_without_recursion() -> None:
    graph = ContextGraph()
    for index in range(3000):
        graph.add(index, [Inherit(index - 1)] if index else [], sealed=True)
    ElementTree.fromstring(svg(graph))
