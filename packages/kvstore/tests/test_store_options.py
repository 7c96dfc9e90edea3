"""Which options of a store with two tiers are refused."""

from __future__ import annotations

import pytest
from kvstore_helpers import make_store, refused


@pytest.mark.parametrize(
    "option, value",
    [
        ("write_back", -1),
        ("max_failures", 0),
        ("patience", -1),
        ("pin_budget", -1),
        ("pin_budget_per_salt", -1),
    ],
)
def test_sizes_that_are_none_are_refused(option: str, value: int) -> None:
    with refused("invalid_size", option):
        make_store(**{option: value})


def test_a_timeout_that_is_none_is_refused() -> None:
    with refused("invalid_ttl", "transfer_timeout_s"):
        make_store(transfer_timeout_s=0)
