"""Random graphs of requests: references of every mode, forks, spans, policies; and how to run one."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from dagengine.request import ContextRef, Request
from dagengine_core_graph import NodeSpans, Reference, make_reference

from .driver import Driver, request

POLICIES = ("linear", "native", "explicit")
SPANS = ("prompt", "output", "turn", "all")


@dataclass(frozen=True)
class Ref:
    """A reference to an earlier node of the plan."""

    parent: str
    mode: str
    span: str | tuple[int, int] | None = None
    at: int | None = None
    start: int | None = None

    def reference(self) -> Reference:
        return make_reference(self.parent, self.mode, self.span, self.at, self.start)


@dataclass(frozen=True)
class Node:
    """What one request asks; it always samples `max_tokens` tokens."""

    name: str
    refs: tuple[Ref, ...]
    input_ids: tuple[int, ...]
    max_tokens: int
    policy: str
    options: dict[str, object] = field(default_factory=dict)
    turn_start: int | None = None
    backend: str | None = None

    @property
    def length(self) -> int:
        return len(self.input_ids) + self.max_tokens

    def spans(self) -> NodeSpans:
        prompt = len(self.input_ids)
        return NodeSpans(
            prompt=(0, prompt),
            output=(prompt, self.length) if self.max_tokens else None,
            turn=None if self.turn_start is None else (self.turn_start, self.length),
        )

    def request(self, refs: tuple[ContextRef, ...], *, keep: bool = True) -> Request:
        return request(
            self.name,
            self.input_ids,
            self.max_tokens,
            context=refs,
            position=self.policy,
            options=self.options,
            backend=self.backend,
            keep=keep,
            turn_start=self.turn_start,
        )


def random_plan(
    seed: int,
    *,
    policy: str | None = None,
    size: int = 9,
    vocab: int = 101,
    backends: tuple[str, ...] = (),
    longest: int = 9,
) -> list[Node]:
    """A random graph; `policy` None mixes policies from node to node, `backends` likewise."""
    rng = random.Random(seed)
    nodes: list[Node] = []
    for index in range(size):
        chosen = policy or rng.choice(POLICIES)
        whole = rng.choice(("inherit", "inherit", "digest"))
        parents = rng.choices(nodes, k=min(len(nodes), rng.choice((0, 1, 1, 2, 2, 3, 4)))) if nodes else []
        refs = tuple(_random_ref(rng, parent, whole, chosen) for parent in parents)
        prompt = rng.randint(1, longest)
        sampled = rng.choice((0, 1, 1, 2, 4))
        nodes.append(
            Node(
                name=f"n{index}",
                refs=refs,
                input_ids=tuple(rng.randrange(vocab) for _ in range(prompt)),
                max_tokens=sampled,
                policy=chosen,
                options={"own_start": 700} if chosen == "explicit" and rng.random() < 0.2 else {},
                turn_start=rng.randint(0, prompt) if sampled and rng.random() < 0.5 else None,
                backend=rng.choice(backends) if backends else None,
            )
        )
    return nodes


def _random_ref(rng: random.Random, parent: Node, whole: str, policy: str) -> Ref:
    at = rng.randint(0, parent.length) if rng.random() < 0.3 else None
    start = rng.randint(0, 40) if policy == "explicit" else None
    if rng.random() < 0.6:
        return Ref(parent.name, whole, None, at, start)
    span: str | tuple[int, int] | None = rng.choice((None, *SPANS))
    if span == "turn" and parent.turn_start is None:
        span = None
    if rng.random() < 0.4:
        begin, end = sorted((rng.randint(0, parent.length), rng.randint(0, parent.length)))
        span = (begin, end)
    return Ref(parent.name, "artifact", span, at, start)


def pages_needed(plan: list[Node], page_size: int) -> int:
    """Pages of a pool in which every node fits together with all of all its ancestors.

    Enough whatever was evicted before. Less may not be: to recompute a node, what it digested must be there.
    """
    ancestry: dict[str, set[str]] = {}
    pages = {node.name: -(-node.length // page_size) for node in plan}
    for node in plan:
        ancestry[node.name] = {node.name}.union(*(ancestry[ref.parent] for ref in node.refs))
    return max(sum(pages[name] for name in names) for names in ancestry.values())


def inherits_only(plan: list[Node]) -> list[Node]:
    """The same graph with every reference an inherit of a whole node."""
    return [
        replace(node, refs=tuple(replace(r, mode="inherit", span=None, at=None) for r in node.refs))
        for node in plan
    ]


def run_at_once(
    driver: Driver, plan: list[Node], others: Sequence[Request] = ()
) -> dict[str, tuple[int, ...]]:
    """All nodes in one submission, dropped when nothing reads them any more. Tokens of every node."""
    requests = [
        node.request(
            tuple(
                ContextRef(request=r.parent, mode=r.mode, span=r.span, at=r.at, start=r.start)
                for r in node.refs
            ),
            keep=False,
        )
        for node in plan
    ]
    tokens = {}
    for node, event in zip(plan, driver.run(*requests, *others), strict=False):
        if event.error is not None:
            raise event.error
        tokens[node.name] = node.input_ids + event.choices[0].token_ids
    return tokens


def run_by_state(
    driver: Driver,
    plan: list[Node],
    *,
    between: Callable[[Driver], object] = lambda driver: None,
    release: bool = True,
) -> dict[str, tuple[int, ...]]:
    """One request after the other over states; forks are handles of their own. Tokens of every node.

    `between` is called after each request. With `release` a state's name is given up after its last direct
    reader.
    """
    last_use = {ref.parent: index for index, node in enumerate(plan) for ref in node.refs}
    states: dict[str, str] = {}
    tokens = {}
    for index, node in enumerate(plan):
        refs = []
        for number, ref in enumerate(node.refs):
            state, at = states[ref.parent], ref.at
            if at is not None and number % 2 == 0:
                state, at = driver.core.fork(state, at), None
            refs.append(ContextRef(state=state, mode=ref.mode, span=ref.span, at=at, start=ref.start))
        choice = driver.choice(node.request(tuple(refs)))
        for ref, original in zip(refs, node.refs, strict=True):
            if ref.state != states[original.parent]:
                driver.core.release_state(ref.state)
        assert choice.dag.state is not None
        states[node.name] = choice.dag.state
        tokens[node.name] = node.input_ids + choice.token_ids
        if release:
            for parent, used in last_use.items():
                if used == index:
                    driver.core.release_state(states[parent])
        between(driver)
    return tokens
