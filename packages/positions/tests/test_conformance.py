"""The built-ins pass the kits that third parties inherit, and the kits catch what breaks the rules."""

from dataclasses import replace

import pytest

from dagengine_core_graph import Digest
from dagengine_positions import (
    DefaultAdapter,
    ExplicitPolicy,
    LinearPolicy,
    NativePolicy,
    PositionError,
    Refusal,
)
from dagengine_positions.conformance import AdapterConformance, PolicyConformance


class TestLinear(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return LinearPolicy()


class TestNative(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return NativePolicy()


class TestExplicit(PolicyConformance):
    @pytest.fixture
    def policy(self):
        return ExplicitPolicy()

    def prepare(self, rng, references):
        return tuple(replace(reference, start=rng.randrange(40)) for reference in references)

    def options(self, rng):
        return {"own_start": 500} if rng.random() < 0.3 else {}


class TestDefaultAdapter(AdapterConformance):
    @pytest.fixture
    def adapter(self):
        return DefaultAdapter()


class Mine(LinearPolicy):
    name = "mine"


class AcceptsAnyOption(Mine):
    def lay_out(self, context, stored_start, options):
        return super().lay_out(context, stored_start, {})


class ForgetsTheLast(Mine):
    def lay_out(self, context, stored_start, options):
        layout = super().lay_out(context, stored_start, options)
        return replace(layout, segments=layout.segments[:-1])


class Counts(Mine):
    calls = 0

    def lay_out(self, context, stored_start, options):
        self.calls += 1
        layout = super().lay_out(context, stored_start, options)
        return replace(layout, own_start=layout.own_start + (self.calls if layout.segments else 0))


class RefusesAll(Mine):
    def lay_out(self, context, stored_start, options):
        raise PositionError("policy_unsupported", "never", "no_such_option")


class AsksForAll(Mine):
    def lay_out(self, context, stored_start, options):
        if context.references:
            for node in range(3):
                stored_start(node)
        return super().lay_out(context, stored_start, options)


class StartsAtOne(Mine):
    def lay_out(self, context, stored_start, options):
        layout = super().lay_out(context, stored_start, options)
        return layout if layout.segments else replace(layout, own_start=1)


class Unnamed(Mine):
    name = " "


@pytest.mark.parametrize(
    ("policy", "test"),
    [
        (AcceptsAnyOption, "test_unknown_options_are_refused_by_name"),
        (ForgetsTheLast, "test_layouts_keep_their_promises_and_refusals_are_typed"),
        (Counts, "test_equal_arguments_give_equal_layouts"),
        (RefusesAll, "test_layouts_keep_their_promises_and_refusals_are_typed"),
        (AsksForAll, "test_only_visible_nodes_are_asked_for"),
        (StartsAtOne, "test_a_node_that_sees_nothing_starts_at_zero"),
        (Unnamed, "test_name_can_be_registered"),
    ],
)
def test_the_policy_kit_catches(policy, test):
    kit = PolicyConformance()
    getattr(kit, test)(Mine())
    with pytest.raises((AssertionError, KeyError, pytest.fail.Exception)):
        getattr(kit, test)(policy())


class Lenient(DefaultAdapter):
    def check(self, geometry, layout):
        return ()


class Strict(DefaultAdapter):
    def check(self, geometry, layout):
        return (*super().check(geometry, layout), Refusal("chunk_crossing", "segments", "never"))


class UnknownCode(DefaultAdapter):
    def check(self, geometry, layout):
        refused = tuple(Refusal("no_such_code", "segments", "never") for _ in layout.segments)
        return super().check(geometry, layout) + refused


@pytest.mark.parametrize(
    ("adapter", "test"),
    [
        (Lenient, "test_state_that_is_not_per_token_is_refused"),
        (Strict, "test_a_supported_model_may_see_nothing"),
        (UnknownCode, "test_refusals_are_well_formed_and_repeatable"),
    ],
)
def test_the_adapter_kit_catches(adapter, test):
    kit = AdapterConformance()
    geometry = AdapterConformance.geometry.__wrapped__(kit)
    with pytest.raises(AssertionError):
        getattr(kit, test)(adapter(), geometry)
    getattr(kit, test)(DefaultAdapter(), geometry)


def test_the_kit_reads_forks_digests_and_spans():
    contexts = [context for context, _, _ in PolicyConformance().contexts()]
    references = [reference for context in contexts for reference in context.references]
    assert any(isinstance(reference, Digest) for reference in references)
    assert any(reference.at is not None for reference in references)
    assert any(getattr(reference, "span", None) is not None for reference in references)
