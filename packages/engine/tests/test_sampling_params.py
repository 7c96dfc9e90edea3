"""Every option of SamplingParams has bounds, and a refusal names the option."""

from __future__ import annotations

import dataclasses

import pytest

from dagengine.errors import DagError
from dagengine.sampling import MAX_SEED, SamplingParams

NAN, INF, HUGE = float("nan"), float("inf"), 10**400

# option: (accepted, refused), each at and just over its bounds
BOUNDS: dict[str, tuple[list[object], list[object]]] = {
    "max_tokens": ([1, 2**31, None], [0, -1, 2**31 + 1]),
    "min_tokens": ([0, 16], [-1, 17, 2**31 + 1, None]),
    "temperature": ([0, 0.0, 1e-9, 100, 100.0], [-1e-9, 100.1, NAN, INF, -INF, HUGE, None]),
    "top_k": ([-1, 0, 1, 2**31], [-2, 2**31 + 1, 1.0, None]),
    "top_p": ([1e-9, 1, 1.0], [0, 0.0, -0.1, 1.0001, NAN, INF, None]),
    "min_p": ([0, 0.0, 1.0], [-0.1, 1.0001, NAN, None]),
    "repetition_penalty": ([1e-9, 1, 100.0], [0, 0.0, -1.0, 100.1, NAN, INF, None]),
    "presence_penalty": ([-2, 2.0, 0], [-2.1, 2.1, NAN, None]),
    "frequency_penalty": ([-2, 2.0, 0], [-2.1, 2.1, NAN, None]),
    "seed": ([0, -MAX_SEED - 1, MAX_SEED, None], [MAX_SEED + 1, -MAX_SEED - 2, 1.0, HUGE]),
    "stop": (
        ["x", ["x"], ["x"] * 16, ["y" * 1024], [], None, ("a", "b")],
        ["", [""], ["x"] * 17, ["y" * 1025], [3], [None], 3, {"a": 1}],
    ),
    "stop_token_ids": ([[], [0], [2**31], None], [[-1], [2**31 + 1], [1.0], ["1"], 1, "1", [None]]),
    "ignore_eos": ([True, False], [0, 1, None, "true"]),
    "logprobs": ([None, 0, 20], [-1, 21, 1.0, 10**9]),
    "logit_bias": (
        [{}, None, {0: 100}, {5: -100.0}, {"7": 1.5}, dict.fromkeys(range(1024), 0.0)],
        [
            {-1: 0},
            {"x": 0},
            {"1.5": 0},
            {True: 0},
            {None: 0},
            {1: 100.1},
            {1: NAN},
            {1: INF},
            {1: None},
            {1: "3"},
            {1: True},
            {7: 1, "7": 1},
            {"7": 1, "007": 2},
            dict.fromkeys(range(1025), 0.0),
            [1],
            "x",
            3,
        ],
    ),
    "n": ([1], [0, -1, 65, 5_000_000, 1.0, None]),
}


def build(name: str, value: object) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 16} | {name: value}))


def test_the_table_has_every_option() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} == BOUNDS.keys()


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (accepted, _) in BOUNDS.items() for value in accepted]
)
def test_accepted(name: str, value: object) -> None:
    build(name, value)


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, (_, refused) in BOUNDS.items() for value in refused]
)
def test_refused(name: str, value: object) -> None:
    with pytest.raises(DagError) as caught:
        build(name, value)
    assert (caught.value.code, caught.value.field) == ("invalid_request", name)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize("name", [name for name in BOUNDS if name != "ignore_eos"])
@pytest.mark.parametrize("value", [True, False, object(), {"a": [1]}, b"x"])
def test_other_types_are_refused(name: str, value: object) -> None:
    with pytest.raises(DagError) as caught:
        build(name, value)
    assert (caught.value.code, caught.value.field) == ("invalid_request", name)


@pytest.mark.parametrize("name", [n for n in BOUNDS if n not in ("stop", "ignore_eos")])
def test_text_is_no_number(name: str) -> None:
    with pytest.raises(DagError) as caught:
        build(name, "1")
    assert caught.value.field == name


def test_several_greedy_answers_are_refused_and_several_sampled_ones_are_not() -> None:
    assert SamplingParams(n=64, temperature=0.1).n == 64
    with pytest.raises(DagError) as caught:
        SamplingParams(n=2, temperature=0.0)
    assert caught.value.field == "n"


def test_values_are_normalised_to_one_form() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 4], logit_bias={"7": 2})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 4)
    assert params.logit_bias == {7: 2.0}


def test_a_mapping_is_checked_with_its_path() -> None:
    assert SamplingParams.from_mapping({"max_tokens": 3, "temperature": 0.0}) == SamplingParams(
        max_tokens=3, temperature=0.0
    )
    for options, field in [
        ({"max_tokens": 0}, "nodes[2].generate.max_tokens"),
        ({"max_token": 3}, "nodes[2].generate.max_token"),
        ({"": 3}, "nodes[2].generate"),
        ({"top_p": NAN}, "nodes[2].generate.top_p"),
    ]:
        with pytest.raises(DagError) as caught:
            SamplingParams.from_mapping(options, "nodes[2].generate")
        assert (caught.value.code, caught.value.field) == ("invalid_request", field)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_another_seed_is_all_that_changes(temperature: float) -> None:
    params = SamplingParams(temperature=temperature, stop=["a"], logit_bias={1: 2.0}, presence_penalty=0.5)
    for _ in range(2):  # also once what follows from the parameters was asked for
        other = params.with_seed(-3)
        assert other == dataclasses.replace(params, seed=-3) and params.seed is None
        assert (other.penalised, other.plain_greedy) == (params.penalised, params.plain_greedy)
    for seed in (2**63, True, 1.0, "1"):
        with pytest.raises(DagError) as caught:
            params.with_seed(seed)  # type: ignore[arg-type]
        assert caught.value.field == "seed"
