"""How much may be pinned, in all and by each tenant."""

from __future__ import annotations

import pytest
from kvstore_helpers import make_store, refused, write

from dagengine_kvstore import PinBudgetExceeded


@pytest.mark.parametrize("field", ["pin_budget", "pin_budget_per_salt"])
def test_one_budget_for_pins_is_enough_to_refuse(field: str) -> None:
    store = make_store(**{field: 1})
    with pytest.raises(PinBudgetExceeded) as caught:
        store.name(write(store, [1] * 8), pin=True)
    assert (caught.value.field, caught.value.used, caught.value.budget) == (field, 2, 1)
    store.name(write(store, [2] * 4), pin=True)


def test_pins_have_a_budget_for_all_and_for_each_tenant() -> None:
    store = make_store(pin_budget=3, pin_budget_per_salt=2)
    a, b, c = (write(store, [t] * 8, salt=s) for t, s in ((1, "a"), (2, "b"), (3, "a")))
    pinned = store.name(a, pin=True)
    with refused("pin_budget_exceeded", "pin_budget_per_salt"):
        store.name(c, pin=True)
    with refused("pin_budget_exceeded", "pin_budget"):
        store.name(b, pin=True)
    store.check()
    handle = store.name(b)
    with refused("pin_budget_exceeded", "pin_budget"):
        store.pin(handle)
    assert not store.describe(handle).pinned
    store.pin(pinned)
    store.unpin(pinned)
    store.pin(handle)
    assert store.describe(handle).pinned
