"""Random queries, a model and a retriever that are functions, and an executor of lowered queries.

The executor reads nodes, references and orders alone. It uses the definition's vocabulary, what a message behind a
view is, and none of its evaluation.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import sha256

from dagengine_core_graph import Artifact, ContextGraph, definition
from dagengine_core_graph.query import (
    Chat,
    Commuting,
    Cross,
    Fragment,
    Generate,
    GenerateParams,
    LoweredQuery,
    Map,
    Message,
    Monad,
    Par,
    Plus,
    Print,
    Query,
    QueryNode,
    Repeat,
    Retrieve,
    Seq,
    Zip,
    evaluate,
)
from dagengine_core_graph.query.definition import Call, View, answered, bag, digest, shown

WARM = GenerateParams("m", 8, 1.0)
COLD = GenerateParams("m", 8, 0.0)
OTHER = GenerateParams("n", 0, 0.5, {"seed": 3})
ONE = GenerateParams("m", 1, 0.0)
Token = tuple[str, int]


def scripted_model(params: GenerateParams, prompt: View, nth: int) -> str:
    """Another answer to everything that could make a difference to a model."""
    sample = nth if params.temperature else 0
    return sha256(f"{params!r} {digest(prompt)} {sample}".encode()).hexdigest()[:12]


def scripted_retriever(query: Retrieve) -> list[Fragment | str]:
    """Up to three pieces that depend on everything that was asked."""
    rng = random.Random(repr((query.corpus, query.text, query.limit)))
    pieces: list[Fragment | str] = [rng.choice("abcd") for _ in range(rng.randint(0, query.limit or 3))]
    return [Fragment(piece, query.corpus) if rng.random() < 0.5 else piece for piece in pieces]


def meaning(query: Query) -> object:
    """What the definition says of a query: what it shows, what comes of it, and the calls that are no preparation."""
    found = evaluate(query, scripted_model, scripted_retriever)
    return digest(found.view), outcome(found.result), _calls(found.calls)


def outcome(result: Query) -> str:
    """What a result says, whatever the order of its +."""
    return digest(evaluate(result, scripted_model).view)


def executed(lowered: LoweredQuery) -> object:
    """What executing the graph gives: the result, and the calls that are no preparation."""
    run = Execution(lowered)
    return outcome(lowered.result(run.answers)), _calls(run.calls)


def _calls(calls: list[Call] | tuple[Call, ...]) -> Counter[tuple[str, str, str]]:
    return Counter(
        (repr(call.params), digest(call.prompt), call.answer)
        for call in calls
        if not (call.params.max_tokens == 1 and call.params.temperature == 0)
    )


@dataclass
class Execution:
    """A lowered query, run node by node over a graph in which every part and every answer is one token."""

    lowered: LoweredQuery
    answers: dict[str, str] = field(default_factory=dict)
    calls: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.nodes: Mapping[str, QueryNode] = {node.id: node for node in self.lowered.nodes}
        self.graph: ContextGraph = self.lowered.graph()
        self.before: dict[str, View] = {}
        self.own: dict[str, View] = {}
        self.turns: dict[str, View] = {}
        self.seen: dict[str, list[Token]] = {}
        samples: Counter[tuple[str, str]] = Counter()
        for node in self.lowered.nodes:
            self.seen[node.id] = [token for reference in node.context for token in self.tokens(reference)]
            self.check_visible(node)
            view = self.before[node.id] = self.view(node, node.order)
            for part in node.parts:
                view += (shown(part.role, part.text, view),)
            self.own[node.id] = view[len(self.before[node.id]) :]
            if node.generate is not None:
                equal = repr(node.generate), digest(view)
                answer = scripted_model(node.generate, view, samples[equal])
                samples[equal] += 1
                self.answers[node.id] = answer
                self.turns[node.id] = (answered(answer, view),)
                self.calls.append(Call(node.generate, view, answer))

    def view(self, node: QueryNode, order: tuple[int | Commuting, ...]) -> View:
        """What the references of the order show."""
        view: View = ()
        for item in order:
            if isinstance(item, Commuting):
                view += bag([self.view(node, group) for group in item.groups])
                continue
            reference = node.context[item]
            if isinstance(reference, Artifact):
                assert reference.span == "turn"
                view += self.turns[reference.node]
            else:
                view += (
                    self.before[reference.node]
                    + self.own[reference.node]
                    + self.turns.get(reference.node, ())
                )
        return view

    def tokens(self, reference: object) -> list[Token]:
        """The tokens that a reference shows, in order, if none was placed before."""
        parent = self.nodes[reference.node]  # type: ignore[attr-defined]
        length = len(parent.parts)
        if isinstance(reference, Artifact):
            return [(parent.id, length)]
        own = [(parent.id, offset) for offset in range(length + (parent.generate is not None))]
        return self.seen[parent.id] + own

    def check_visible(self, node: QueryNode) -> None:
        """The graph shows exactly these tokens, each once, in this order."""
        visible = [(token.id, offset) for token, offset in definition.visible(self.graph, node.id)]
        assert visible == self.seen[node.id]
        assert sorted(_flat(node.order)) == list(range(len(node.context))) == list(_flat(node.order))


def _flat(order: tuple[int | Commuting, ...]) -> list[int]:
    flat: list[int] = []
    for item in order:
        flat += [item] if isinstance(item, int) else [i for group in item.groups for i in _flat(group)]
    return flat


def random_query(rng: random.Random, depth: int = 5) -> Query:
    """Any constructor anywhere, few different texts, so that equal subtrees are common; every call has a prompt."""
    if depth == 0 or rng.random() < 0.12:
        return rng.choice(
            (random_leaf, random_leaf, lambda rng: Message("user", ""), lambda rng: Print("p"))
        )(rng)

    def below() -> Query:
        return random_query(rng, depth - 1)

    def several() -> tuple[Query, ...]:
        children = [below() for _ in range(rng.choice((0, 1, 1, 2, 2, 3)))]
        if children and rng.random() < 0.3:
            children.append(rng.choice(children))
        return tuple(children)

    match rng.choice(("plus", "plus", "cross", "cross", "seq", "par", "g", "g", "other", "other")):
        case "plus":
            return Plus(several())
        case "cross":
            return Cross(several())
        case "seq":
            return Seq(several())
        case "par":
            return Par(several())
        case "g":
            return random_call(rng, depth)
    match rng.choice(("chat", "retrieve", "repeat", "repeat", "map", "zip", "zip", "monad", "monad")):
        case "chat":
            return Chat(
                rng.choice((WARM, COLD)), tuple(random_message(rng) for _ in range(rng.randint(1, 3)))
            )
        case "retrieve":
            return Retrieve(rng.choice("xy"), random_leaf(rng), rng.choice((None, 1, 2)))
        case "repeat":
            return Repeat(rng.randint(0, 3), random_call(rng, depth - 1))
        case "map":
            return Map(rng.choice((WARM, OTHER)), tuple(rng.choice("abc") for _ in range(rng.randint(1, 3))))
        case "zip":
            return Zip(below(), below())
    return Monad(below())


def random_call(rng: random.Random, depth: int) -> Generate:
    """A call whose input shows something whatever is found."""
    parts = [random_query(rng, max(depth - 2, 0)) for _ in range(rng.randint(0, 2))]
    parts.insert(rng.randint(0, len(parts)), random_leaf(rng))
    joined: Query = parts[0] if len(parts) == 1 else rng.choice((Cross, Cross, Seq, Plus))(tuple(parts))
    return Generate(rng.choice((WARM, WARM, COLD, OTHER, ONE)), joined, closed=rng.random() < 0.2)


def random_message(rng: random.Random) -> Message:
    return Message(rng.choice(("system", "user", "assistant")), rng.choice("abc"))  # type: ignore[arg-type]


def random_leaf(rng: random.Random) -> Query:
    return (
        random_message(rng) if rng.random() < 0.7 else Fragment(rng.choice("abcd"), rng.choice((None, "x")))
    )
