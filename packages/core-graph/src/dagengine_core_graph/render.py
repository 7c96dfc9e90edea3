"""A picture of a graph as Mermaid, DOT or SVG: inherit is solid, digest dashed, artifact dotted.

Text from outside is escaped for its format, and equal pictures give equal text. The SVG needs nothing but
a browser: layers by longest path, boxes ordered below what they read.
"""

from __future__ import annotations

import re
from unicodedata import east_asian_width
from xml.sax.saxutils import escape

from .picture import GraphLike, Picture, PictureEdge, PictureNode, picture

BOX_HEIGHT, ROW_HEIGHT, GAP, MARGIN = 44, 104, 28, 20
CHARACTER, LONGEST_LABEL = 7.4, 30
SVG_STYLE = """
text{font:13px ui-monospace,monospace;text-anchor:middle;fill:#1c2330}
.detail,.edge-label{font-size:11px;fill:#5b6577}
.edge-label{paint-order:stroke;stroke:#fff;stroke-width:4px}
rect{fill:#f3f6fb;stroke:#5b6577}
.outside rect{fill:#fff;stroke-dasharray:3 3}
path{fill:none;stroke:#5b6577;stroke-width:1.4}
.digest{stroke-dasharray:8 5}
.artifact{stroke-dasharray:2 4}
marker path{fill:#5b6577;stroke:none}
"""


def mermaid(graph: GraphLike) -> str:
    """A Mermaid flowchart."""
    drawn = picture(graph)
    lines = ["flowchart TB"]
    for index, node in enumerate(drawn.nodes):
        label = "<br/>".join(_mermaid_text(line) for line in (node.label, node.detail) if line)
        opening, closing = ('(["', '"])') if node.outside else ('["', '"]')
        lines.append(f"  n{index}{opening}{label}{closing}")
    for edge in drawn.edges:
        label = f'|"{_mermaid_text(edge.label)}"|' if edge.label else ""
        lines.append(f"  n{edge.source} -->{label} n{edge.target}")
    for mode, dashes in (("digest", "8 5"), ("artifact", "2 4")):
        styled = [str(index) for index, edge in enumerate(drawn.edges) if edge.mode == mode]
        if styled:
            lines.append(f"  linkStyle {','.join(styled)} stroke-dasharray:{dashes}")
    return "\n".join(lines) + "\n"


def dot(graph: GraphLike) -> str:
    """A Graphviz digraph."""
    drawn = picture(graph)
    lines = ["digraph context {", "  node [shape=box];"]
    for index, node in enumerate(drawn.nodes):
        label = "\\n".join(_dot_text(line) for line in (node.label, node.detail) if line)
        style = ", style=dashed" if node.outside else ""
        lines.append(f'  n{index} [label="{label}"{style}];')
    styles = {"inherit": "solid", "digest": "dashed", "artifact": "dotted"}
    for edge in drawn.edges:
        label = f', label="{_dot_text(edge.label)}"' if edge.label else ""
        lines.append(f"  n{edge.source} -> n{edge.target} [style={styles[edge.mode]}{label}];")
    return "\n".join([*lines, "}"]) + "\n"


def svg(graph: GraphLike) -> str:
    """A self-contained SVG image; the full text of a shortened label is its tooltip."""
    drawn = picture(graph)
    boxes, width, height = _lay_out(drawn)
    seen: dict[tuple[int, int], int] = {}
    body = []
    for edge in drawn.edges:
        between = (edge.source, edge.target)
        seen[between] = seen.get(between, -1) + 1
        body += _svg_edge(edge, boxes[edge.source], boxes[edge.target], seen[between])
    for node, (x, y, box_width) in zip(drawn.nodes, boxes, strict=True):
        body += _svg_node(node, x, y, box_width)
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" '
            f'viewBox="0 0 {width:.0f} {height:.0f}" role="img" aria-label="context graph">',
            f"<style>{SVG_STYLE}</style>",
            '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" '
            'orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>',
            *body,
            "</svg>\n",
        ]
    )


def _lay_out(drawn: Picture) -> tuple[list[tuple[float, float, float]], float, float]:
    """Per node, the middle of its top edge and its width; then the width and height of the image."""
    layers = _layers(drawn)
    parents: list[list[int]] = [[] for _ in drawn.nodes]
    for edge in drawn.edges:
        parents[edge.target].append(edge.source)
    widths = [
        CHARACTER * max(_columns(_shorten(node.label)), _columns(_shorten(node.detail)), 4) + 24
        for node in drawn.nodes
    ]
    boxes = [(0.0, 0.0, 0.0)] * len(drawn.nodes)
    rows = [sum(widths[index] for index in layer) + GAP * (len(layer) - 1) for layer in layers]
    widest = max(rows, default=0.0)
    for depth, layer in enumerate(layers):
        middle = {
            index: sum(boxes[parent][0] for parent in parents[index]) / len(parents[index])
            for index in layer
            if parents[index]
        }
        x = MARGIN + (widest - rows[depth]) / 2
        for index in sorted(layer, key=lambda index: (middle.get(index, 0.0), index)):
            boxes[index] = (x + widths[index] / 2, MARGIN + depth * ROW_HEIGHT, widths[index])
            x += widths[index] + GAP
    height = max(len(layers) - 1, 0) * ROW_HEIGHT + BOX_HEIGHT + 2 * MARGIN
    return boxes, widest + 2 * MARGIN, height


def _layers(drawn: Picture) -> list[list[int]]:
    """Indices of nodes by the longest path that leads to them."""
    waiting = [0] * len(drawn.nodes)
    children: list[list[int]] = [[] for _ in drawn.nodes]
    for edge in drawn.edges:
        waiting[edge.target] += 1
        children[edge.source].append(edge.target)
    layers = []
    layer = [index for index, missing in enumerate(waiting) if missing == 0]
    while layer:
        layers.append(layer)
        free = []
        for index in layer:
            for child in children[index]:
                waiting[child] -= 1
                if waiting[child] == 0:
                    free.append(child)
        layer = free
    return layers


def _svg_edge(
    edge: PictureEdge, source: tuple[float, float, float], target: tuple[float, float, float], nth: int
) -> list[str]:
    x, y, _ = source
    to_x, to_y, _ = target
    y += BOX_HEIGHT
    bend = (to_y - y) * 0.45
    side = 26 * ((nth + 1) // 2) * (1 if nth % 2 else -1)
    points = [(x, y), (x + side, y + bend), (to_x + side, to_y - bend), (to_x, to_y)]
    start, *bends = [f"{at_x:.1f} {at_y:.1f}" for at_x, at_y in points]
    curve = f"M{start}C{' '.join(bends)}"
    drawn = [f'<path class="{edge.mode}" d="{curve}" marker-end="url(#arrow)"/>']
    if edge.label:
        at = f'x="{(x + to_x) / 2 + side * 0.75:.1f}" y="{(y + to_y) / 2 + 4:.1f}"'
        drawn.append(f'<text class="edge-label" {at}>{_xml_text(edge.label)}</text>')
    return drawn


def _svg_node(node: PictureNode, x: float, y: float, width: float) -> list[str]:
    group = ' class="outside"' if node.outside else ""
    label_y = y + (19 if node.detail else 27)
    drawn = [
        f"<g{group}><title>{_xml_text(node.label)}</title>",
        f'<rect x="{x - width / 2:.1f}" y="{y:.1f}" width="{width:.1f}" height="{BOX_HEIGHT}" rx="6"/>',
        f'<text x="{x:.1f}" y="{label_y:.1f}">{_xml_text(_shorten(node.label))}</text>',
    ]
    if node.detail:
        detail = _xml_text(_shorten(node.detail))
        drawn.append(f'<text class="detail" x="{x:.1f}" y="{y + 35:.1f}">{detail}</text>')
    return [*drawn, "</g>"]


def _columns(text: str) -> int:
    return sum(2 if east_asian_width(character) in "WF" else 1 for character in text)


def _shorten(text: str) -> str:
    return text if len(text) <= LONGEST_LABEL else text[: LONGEST_LABEL - 1] + "…"


def _mermaid_text(text: str) -> str:
    return re.sub(r"[^\w .,:\[\]()/+…-]", lambda found: f"#{ord(found[0])};", text)


def _dot_text(text: str) -> str:
    return re.sub(r"[\x00-\x1f]", " ", text).replace("\\", "\\\\").replace('"', '\\"')


def _xml_text(text: str) -> str:
    return escape(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text))
