"""The largest position: what fits is allowed, one more is refused."""

import math

import pytest

from dagengine_positions import PositionError, check_room


def test_what_exactly_fits_is_allowed():
    assert check_room(own_start=90, num_input=6, max_tokens=4, max_positions=100) == 4


def test_unset_max_tokens_is_what_fits():
    assert check_room(90, 6, None, 100) == 4
    assert check_room(90, 10, None, 100) == 0


def test_prefill_only_needs_no_room_to_sample():
    assert check_room(90, 10, 0, 100) == 0


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((90, 6, 5, 100), "max_tokens"),
        ((90, 11, None, 100), "input"),
        ((90, 11, 0, 100), "input"),
        ((101, 0, None, 100), "input"),
        ((10**400, 0, None, 100), "input"),
        ((0, 0, 10**400, 100), "max_tokens"),
    ],
)
def test_what_does_not_fit_is_refused(arguments, field):
    with pytest.raises(PositionError) as caught:
        check_room(*arguments)
    assert (caught.value.code, caught.value.field) == ("position_overflow", field)


@pytest.mark.parametrize("value", [True, -1, 1.0, math.nan, "1", [1]])
@pytest.mark.parametrize("field", ["own_start", "num_input", "max_tokens", "max_positions"])
def test_what_is_no_count_is_refused(field, value):
    arguments = {"own_start": 0, "num_input": 1, "max_tokens": 1, "max_positions": 100}
    with pytest.raises(PositionError) as caught:
        check_room(**arguments | {field: value})
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)
