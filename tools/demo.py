"""The example: documents read in any order, two drafts forked from one state, and a judge over both.

Talks plain HTTP to a running server (`tools/serve --demo` starts one), prints what each request saw and what it cost,
and draws the graph. Exits with a status other than 0 if a request read anything but what the graph says.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from dagengine_core_graph.picture import Picture, PictureEdge, PictureNode
from dagengine_core_graph.render import svg

DATA = Path(__file__).parent / "demo_data"
COLUMNS = ("request", "visible", "reused", "computed", "compile", "layout", "prepare", "first token")
ASSISTANT = "<|im_start|>assistant\n"
NUM_QUESTIONS = 3


@dataclass
class Node:
    """One request and what came of it."""

    name: str
    parents: list[tuple[Node, str, str]]
    dag: dict[str, Any]
    text: str = ""

    @property
    def state(self) -> str:
        return str(self.dag["state"])

    @property
    def num_tokens(self) -> int:
        return max(stop for _, stop in self.dag["spans"].values())


@dataclass
class Demo:
    """The example against one server."""

    http: httpx.Client
    model: str
    nodes: list[Node] = field(default_factory=list)

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = self.http.post(path, json=body)
        if answer.status_code >= 400:
            raise SystemExit(f"{path} answered {answer.status_code}: {answer.text}")
        result: dict[str, Any] = answer.json()
        return result

    def document(self, path: Path) -> Node:
        body = {
            "model": self.model,
            "input": path.read_text().strip() + "\n\n",
            "dag": {"keep": {"name": path.stem}},
        }
        return Node(path.stem, [], self.post("/v1/states", body)["dag"])

    def ask(self, name: str, question: str, documents: Sequence[Node]) -> Node:
        prompt = f"Answer from the documents above, in one short sentence. {question}"
        answer = self.post(
            "/v1/chat/completions",
            {
                "model": self.model,
                "messages": [{"role": "user", "content": prompt}],
                "max_tokens": 32,
                "temperature": 0,
                "dag": {"context": [{"state": d.state} for d in documents], "keep": {"name": name}},
            },
        )
        choice = answer["choices"][0]
        return self.add(
            Node(
                name,
                [(d, "inherit", "") for d in documents],
                choice_dag(answer),
                choice["message"]["content"],
            )
        )

    def draft(self, name: str, parent: Node, fork: str, at: int, seed: int) -> Node:
        answer = self.post(
            "/v1/completions",
            {
                "model": self.model,
                "prompt": ASSISTANT,
                "max_tokens": 32,
                "temperature": 0.7,
                "seed": seed,
                "dag": {"context": [{"state": fork}], "keep": {"name": name}},
            },
        )
        parents = [(parent, "inherit", f"[0, {at})")]
        return self.add(Node(name, parents, choice_dag(answer), answer["choices"][0]["text"]))

    def judge(self, rules: Node, drafts: Sequence[Node]) -> Node:
        context = [
            {"state": rules.state},
            *({"state": d.state, "mode": "artifact", "span": "output"} for d in drafts),
        ]
        answer = self.post(
            "/v1/chat/completions",
            {
                "model": self.model,
                "messages": [
                    {"role": "user", "content": "Which of the two answers above is better, and why?"}
                ],
                "max_tokens": 32,
                "temperature": 0,
                "dag": {"context": context, "keep": {"name": "judge"}},
            },
        )
        parents = [(rules, "inherit", ""), *((d, "artifact", "output") for d in drafts)]
        return self.add(
            Node("judge", parents, choice_dag(answer), answer["choices"][0]["message"]["content"])
        )

    def add(self, node: Node) -> Node:
        self.nodes.append(node)
        return node


def choice_dag(answer: dict[str, Any]) -> dict[str, Any]:
    """The answer's `dag` object, which stands beside the choices when there is one of them."""
    found: dict[str, Any] = answer["dag"] if "dag" in answer else answer["choices"][0]["dag"]
    return found


def run(http: httpx.Client) -> Demo:
    listed = http.get("/v1/models")
    if listed.status_code != 200:
        raise SystemExit(f"/v1/models answered {listed.status_code}: {listed.text}")
    demo = Demo(http, listed.json()["data"][0]["id"])
    questions = json.loads((DATA / "questions.json").read_text())[:NUM_QUESTIONS]
    names = dict.fromkeys(name for question in questions for name in question["documents"])
    with ThreadPoolExecutor(len(names)) as pool:
        found = list(pool.map(demo.document, [DATA / "documents" / f"{name}.txt" for name in names]))
    documents = dict(zip(names, found, strict=True))
    demo.nodes += found
    for number, question in enumerate(questions, 1):
        demo.ask(
            f"question {number}", question["question"], [documents[name] for name in question["documents"]]
        )
    first = demo.nodes[len(found)]
    at = first.dag["spans"]["turn"][0]
    fork = demo.post(f"/v1/states/{first.state}/fork", {"at": at})["id"]
    drafts = [demo.draft(f"draft {letter}", first, fork, at, seed) for seed, letter in enumerate("AB", 1)]
    rules = demo.add(demo.document(DATA / "rules.txt"))
    demo.judge(rules, drafts)
    return demo


def expected_visible(node: Node) -> int:
    """Tokens that the graph lets a node see, counted from its parents' answers alone."""
    seen = 0
    for parent, mode, label in node.parents:
        if mode == "artifact":
            start, stop = parent.dag["spans"]["output"]
            seen += stop - start
        else:
            cut = int(label.split(", ")[1].rstrip(")")) if label else parent.num_tokens
            seen += parent.dag["tokens"]["visible"] + cut
    return seen


def table(nodes: Sequence[Node]) -> str:
    rows = [COLUMNS]
    for node in nodes:
        tokens, timing = node.dag["tokens"], node.dag["timing_ms"]
        times = [f"{timing[key]:.1f} ms" for key in ("compile", "layout", "kv_prepare", "first_token")]
        rows.append((node.name, *(str(tokens[key]) for key in ("visible", "reused", "computed")), *times))
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    lines = [
        "  ".join(
            cell.ljust(w) if i == 0 else cell.rjust(w)
            for i, (cell, w) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def drawing(nodes: Sequence[Node]) -> str:
    index = {id(node): number for number, node in enumerate(nodes)}
    edges = [
        PictureEdge(index[id(parent)], index[id(node)], mode, label)
        for node in nodes
        for parent, mode, label in node.parents
    ]
    return svg(Picture(tuple(PictureNode(n.name, f"{n.num_tokens} tokens") for n in nodes), tuple(edges)))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").strip().splitlines()[0])
    parser.add_argument("--url", required=True, help="where the server is, such as http://127.0.0.1:8000")
    parser.add_argument(
        "--svg", type=Path, default=Path("dagengine-demo.svg"), help="where the graph is drawn"
    )
    options = parser.parse_args()
    with httpx.Client(base_url=options.url, timeout=300) as http:
        demo = run(http)
    print(table(demo.nodes), end="\n\n")
    for node in demo.nodes:
        if node.text:
            print(f"{node.name}: {' '.join(node.text.split())}")
    options.svg.write_text(drawing(demo.nodes))
    print(f"\nthe graph: {options.svg}")
    wrong = [n for n in demo.nodes if n.dag["tokens"]["visible"] != expected_visible(n)]
    recomputed = [n for n in demo.nodes if n.dag["tokens"]["reused"] < n.dag["tokens"]["visible"]]
    for node in wrong:
        print(
            f"{node.name} saw {node.dag['tokens']['visible']} tokens, not {expected_visible(node)}",
            file=sys.stderr,
        )
    for node in recomputed:
        print(f"{node.name} computed some of its context again", file=sys.stderr)
    return 1 if wrong or recomputed else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)
