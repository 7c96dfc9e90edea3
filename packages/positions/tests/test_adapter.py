"""What a model allows, from its geometry."""

from dataclasses import replace

import pytest

from dagengine_positions import (
    DefaultAdapter,
    LayerGroup,
    Layout,
    ModelGeometry,
    Refusal,
    Segment,
    adapter_for,
)

GROUP = LayerGroup((0, 1), "full", 2, 8, None, None, None, False, 0.5)
GEOMETRY = ModelGeometry(
    architecture="LlamaForCausalLM",
    model_type="llama",
    num_layers=2,
    hidden_size=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    intermediate_size=64,
    vocab_size=100,
    max_positions=4096,
    rms_norm_eps=1e-5,
    tie_word_embeddings=False,
    attention_bias=False,
    attention_out_bias=False,
    mlp_bias=False,
    qk_norm=False,
    hidden_act="silu",
    dtype=None,
    bos_token_id=None,
    eos_token_ids=(),
    groups=(GROUP,),
)


def with_groups(*groups):
    return replace(GEOMETRY, groups=groups)


def moved(view_start, delta, length):
    segment = Segment("u", 0, length, view_start, delta)
    return Layout("explicit", (segment,), view_start + length, length)


def test_full_layers_allow_any_move():
    assert DefaultAdapter().check(GEOMETRY, moved(70, 13, 100)) == ()


def test_state_that_is_not_per_token_is_refused_by_group():
    geometry = with_groups(replace(GROUP, layers=(0,)), replace(GROUP, layers=(1,), kv_kind="recurrent"))
    (refusal,) = DefaultAdapter().check(geometry, moved(0, 0, 1))
    assert (refusal.code, refusal.field) == ("kv_kind_unsupported", "groups[1].kv_kind")


@pytest.mark.parametrize(
    ("view_start", "delta", "length"),
    [(10, 5, 6), (10, -2, 4), (0, -15, 1), (24, 8, 8), (8, 0, 100)],
)
def test_moves_within_a_chunk_are_allowed(view_start, delta, length):
    geometry = with_groups(GROUP, replace(GROUP, chunk=16))
    assert DefaultAdapter().check(geometry, moved(view_start, delta, length)) == ()


def test_chunk_crossings_are_those_of_single_tokens():
    geometry = with_groups(replace(GROUP, chunk=4))
    for stored in range(9):
        for view in range(9):
            for length in range(1, 6):
                crosses = any((stored + i) // 4 != (view + i) // 4 for i in range(length))
                refusals = DefaultAdapter().check(geometry, moved(view, view - stored, length))
                assert [refusal.code for refusal in refusals] == ["chunk_crossing"] * crosses


def test_a_refusal_names_the_segment_once_per_chunk_size():
    geometry = with_groups(replace(GROUP, chunk=4), replace(GROUP, chunk=4))
    still = Segment("u", 0, 1, 0, 0)
    layout = Layout("explicit", (still, Segment("w", 0, 1, 9, 9)), 10, 2)
    message = "9 moves a token across a border of chunks of 4 positions"
    assert DefaultAdapter().check(geometry, layout) == (
        Refusal("chunk_crossing", "segments[1].delta", message),
    )


def test_architectures_without_an_adapter_get_the_default_one():
    assert isinstance(adapter_for(GEOMETRY), DefaultAdapter)
