"""Layouts of random graphs equal a token-by-token computation that shares no code with the package."""

from random import Random

import pytest

from dagengine_core_graph import ContextGraph, NodeSpans, make_reference, visible
from dagengine_positions import check_layout, lay_out

BATCHES = 12
GRAPHS_PER_BATCH = 100


class PerToken:
    """The definition by brute force: lists of token instances, one stored position each."""

    def __init__(self):
        self.lengths = {}
        self.outputs = {}
        self.contexts = {}
        self.own_starts = {}

    def add(self, node, references, length, output):
        self.contexts[node] = references
        self.lengths[node] = length
        self.outputs[node] = output

    def reads(self, reference):
        node, at = reference["node"], reference["at"]
        end = self.lengths[node] if at is None else at
        if reference["mode"] == "artifact":
            first, last = reference["span"] or self.outputs[node] or (0, self.lengths[node])
            return [(node, offset) for offset in range(first, last) if offset < end]
        return self.passed(node) + [(node, offset) for offset in range(end)]

    def passed(self, node):
        passing = [reference for reference in self.contexts[node] if reference["mode"] != "digest"]
        return [token for _, token in self.placed(passing)]

    def placed(self, references):
        """(index of the reference that places it, token), each token once."""
        seen = {}
        for index, reference in enumerate(references):
            for token in self.reads(reference):
                seen.setdefault(token, index)
        return [(index, token) for token, index in seen.items()]

    def lay_out(self, node, policy, own_start):
        """Segments and own start, with views assigned one token at a time."""
        next_view = {}
        tokens = []
        for number, (index, (owner, offset)) in enumerate(self.placed(self.contexts[node])):
            stored = self.own_starts[owner] + offset
            if policy == "linear":
                view = number
            elif policy == "native":
                view = stored
            else:
                view = next_view.get(index, self.contexts[node][index]["start"])
                next_view[index] = view + 1
            tokens.append((owner, offset, view, view - stored))
        least = max((view + 1 for _, _, view, _ in tokens), default=0)
        self.own_starts[node] = least if own_start is None else least + own_start
        return compressed(tokens), self.own_starts[node]


def compressed(tokens):
    runs = []
    for owner, offset, view, delta in tokens:
        if runs and (runs[-1][0], runs[-1][2], runs[-1][4]) == (owner, offset, delta):
            runs[-1][2] += 1
        else:
            runs.append([owner, offset, offset + 1, view, delta])
    return [tuple(run) for run in runs]


def random_reference(rng, per_token, whole, explicit):
    node = rng.choice(list(per_token.lengths))
    length = per_token.lengths[node]
    mode = whole if rng.random() < 0.55 else "artifact"
    span = None
    if mode == "artifact" and rng.random() < 0.7:
        span = tuple(sorted(rng.randint(0, length) for _ in range(2)))
    return {
        "node": node,
        "mode": mode,
        "span": span,
        "at": rng.randint(0, length) if rng.random() < 0.25 else None,
        "start": rng.randint(0, 30) if explicit else None,
    }


@pytest.mark.parametrize("batch", range(BATCHES))
def test_layouts_equal_the_token_by_token_computation(batch):
    policies = set()
    for seed in range(GRAPHS_PER_BATCH):
        rng = Random(batch * GRAPHS_PER_BATCH + seed)
        graph, per_token = ContextGraph(), PerToken()
        for node in range(rng.randint(3, 9)):
            policy = rng.choice(("linear", "native", "explicit"))
            whole = rng.choice(("inherit", "digest"))
            count = rng.randint(0, 4) if node else 0
            references = [random_reference(rng, per_token, whole, policy == "explicit") for _ in range(count)]
            length = rng.randint(0, 7)
            output = (rng.randint(0, length), length) if rng.random() < 0.5 else None
            per_token.add(node, references, length, output)
            graph.add(
                node,
                [make_reference(**reference) for reference in references],
                length=length,
                spans=NodeSpans(output=output),
                sealed=True,
            )
            later = rng.randint(0, 9) if policy == "explicit" and rng.random() < 0.3 else None
            segments, own_start = per_token.lay_out(node, policy, later)
            options = {} if later is None else {"own_start": own_start}
            layout = lay_out(policy, visible(graph, node), per_token.own_starts.__getitem__, options)
            check_layout(layout, visible(graph, node), per_token.own_starts.__getitem__)
            found = [(s.node, s.start, s.stop, s.view_start, s.delta) for s in layout.segments]
            assert (found, layout.own_start) == (segments, own_start), (batch, seed, node)
            assert layout.num_visible == sum(stop - start for _, start, stop, _, _ in segments)
            policies.add(policy)
    assert policies == {"linear", "native", "explicit"}
