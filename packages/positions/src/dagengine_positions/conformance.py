"""Test suites that an extension inherits: what every position policy and every model adapter must keep.

    class TestMine(PolicyConformance):
        @pytest.fixture
        def policy(self):
            return MyPolicy()

Needs pytest (the extra ``conformance``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random

import pytest

from dagengine_core_graph import (
    ContextGraph,
    NodeId,
    NodeSpans,
    Reference,
    VisibleContext,
    compile_context,
    make_reference,
)

from .adapter import REFUSAL_CODES, ModelAdapter, Refusal
from .config import geometry_from_config
from .errors import PositionError
from .geometry import ModelGeometry
from .layout import Layout, PositionPolicy, StoredStart, lay_out

_GRAPHS = 60
_NODES = 6


def random_references(rng: Random, graph: ContextGraph) -> tuple[Reference, ...]:
    """Up to four references to nodes of `graph`: forks, spans and repetitions included, starts not."""
    whole = rng.choice(("inherit", "digest"))
    references = []
    for _ in range(rng.randrange(5) if len(graph) else 0):
        parent = rng.choice(graph.nodes())
        at = rng.randint(0, parent.length) if rng.random() < 0.3 else None
        if rng.random() < 0.5:
            references.append(make_reference(parent.id, whole, at=at))
            continue
        span = None
        if rng.random() < 0.7:
            first, last = sorted(rng.randint(0, parent.length) for _ in range(2))
            span = (first, last)
        references.append(make_reference(parent.id, "artifact", span, at))
    return tuple(references)


def grow(rng: Random, graph: ContextGraph, references: tuple[Reference, ...]) -> None:
    """Add a sealed node of up to eight tokens that reads `references`; its id is its number."""
    length = rng.randint(0, 8)
    output = (rng.randint(0, length), length)
    spans = NodeSpans(output=output if output[0] < length else None)
    graph.add(len(graph), references, length=length, spans=spans, sealed=True)


class PolicyConformance:
    """What every position policy keeps. Override `policy`, and the two methods below where it needs them."""

    @pytest.fixture
    def policy(self) -> PositionPolicy:
        """The policy under test."""
        raise NotImplementedError("override the fixture `policy`")

    def prepare(self, rng: Random, references: tuple[Reference, ...]) -> tuple[Reference, ...]:
        """References that the policy accepts, from ones without starts."""
        return references

    def options(self, rng: Random) -> Mapping[str, object]:
        """Options that the policy accepts."""
        return {}

    def contexts(self) -> Iterator[tuple[VisibleContext, StoredStart, Mapping[str, object]]]:
        """Arguments for the policy, from random graphs whose nodes are stored anywhere."""
        for seed in range(_GRAPHS):
            rng = Random(seed)
            graph = ContextGraph()
            starts: dict[NodeId, int] = {}
            for _ in range(_NODES):
                references = self.prepare(rng, random_references(rng, graph))
                yield compile_context(graph, references), starts.__getitem__, self.options(rng)
                starts[len(graph)] = rng.randrange(1000)
                grow(rng, graph, references)

    def test_name_can_be_registered(self, policy: PositionPolicy) -> None:
        assert isinstance(policy.name, str)
        assert policy.name == policy.name.strip() != ""

    def test_layouts_keep_their_promises_and_refusals_are_typed(self, policy: PositionPolicy) -> None:
        made = 0
        for context, stored_start, options in self.contexts():
            try:
                layout = lay_out(policy, context, stored_start, options)
            except PositionError as error:
                assert error.code != "plugin_broken", error
                continue
            assert layout.policy == policy.name
            made += context.num_tokens > 0
        assert made, "every context with tokens was refused; override `prepare` or `options`"

    def test_equal_arguments_give_equal_layouts(self, policy: PositionPolicy) -> None:
        for context, stored_start, options in self.contexts():
            assert _outcome(policy, context, stored_start, options) == _outcome(
                policy, context, stored_start, dict(options)
            )

    def test_a_node_that_sees_nothing_starts_at_zero(self, policy: PositionPolicy) -> None:
        context = compile_context(ContextGraph(), ())
        assert lay_out(policy, context, _never) == Layout(policy.name, (), 0, 0)

    def test_only_visible_nodes_are_asked_for(self, policy: PositionPolicy) -> None:
        for context, stored_start, options in self.contexts():
            visible = {seen.node for seen in context.ranges}
            starts = {node: stored_start(node) for node in visible}
            _outcome(policy, context, starts.__getitem__, options)

    def test_unknown_options_are_refused_by_name(self, policy: PositionPolicy) -> None:
        context = compile_context(ContextGraph(), ())
        with pytest.raises(PositionError) as caught:
            policy.lay_out(context, _never, {"no_such_option": 1})
        assert caught.value.code == "policy_unsupported"
        assert caught.value.field == "no_such_option"


class AdapterConformance:
    """What every model adapter keeps. Override `adapter`, and `geometry` for a model of its own."""

    @pytest.fixture
    def adapter(self) -> ModelAdapter:
        """The adapter under test."""
        raise NotImplementedError("override the fixture `adapter`")

    @pytest.fixture
    def geometry(self) -> ModelGeometry:
        """A geometry that the adapter supports."""
        return geometry_from_config(
            {
                "architectures": ["LlamaForCausalLM"],
                "hidden_size": 64,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "vocab_size": 100,
                "max_position_embeddings": 512,
                "rms_norm_eps": 1e-5,
            }
        )

    def layouts(self) -> Iterator[Layout]:
        """Layouts of random contexts, with positive, negative and zero deltas."""
        for seed in range(_GRAPHS):
            rng = Random(seed)
            graph = ContextGraph()
            starts: dict[NodeId, int] = {}
            for _ in range(_NODES):
                references = random_references(rng, graph)
                context = compile_context(graph, references)
                yield lay_out(rng.choice(("linear", "native")), context, starts.__getitem__)
                starts[len(graph)] = rng.randrange(100)
                grow(rng, graph, references)

    def test_name_can_be_registered(self, adapter: ModelAdapter) -> None:
        assert isinstance(adapter.name, str)
        assert adapter.name == adapter.name.strip() != ""

    def test_refusals_are_well_formed_and_repeatable(
        self, adapter: ModelAdapter, geometry: ModelGeometry
    ) -> None:
        for layout in self.layouts():
            refusals = adapter.check(geometry, layout)
            assert isinstance(refusals, tuple)
            for refusal in refusals:
                assert isinstance(refusal, Refusal)
                assert refusal.code in REFUSAL_CODES
                assert refusal.field
                assert refusal.message
            assert adapter.check(geometry, layout) == refusals

    def test_a_supported_model_may_see_nothing(self, adapter: ModelAdapter, geometry: ModelGeometry) -> None:
        assert adapter.check(geometry, Layout("linear", (), 0, 0)) == ()

    def test_state_that_is_not_per_token_is_refused(
        self, adapter: ModelAdapter, geometry: ModelGeometry
    ) -> None:
        group = replace(geometry.groups[0], kv_kind="no-such-kind")
        other = replace(geometry, groups=(group, *geometry.groups[1:]))
        for layout in self.layouts():
            if layout.num_visible:
                codes = {refusal.code for refusal in adapter.check(other, layout)}
                assert "kv_kind_unsupported" in codes


def _outcome(
    policy: PositionPolicy,
    context: VisibleContext,
    stored_start: StoredStart,
    options: Mapping[str, object],
) -> Layout | tuple[str, str | None]:
    try:
        return policy.lay_out(context, stored_start, options)
    except PositionError as error:
        return error.code, error.field


def _never(node: object) -> int:
    raise AssertionError(f"asked for {node!r} in an empty context")
