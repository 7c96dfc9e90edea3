from __future__ import annotations

import pytest

from dagengine_kvstore import NodeRecord
from dagengine_kvstore.claims import Claims
from dagengine_kvstore.holds import Hold
from dagengine_kvstore.reuse import ContentTable
from dagengine_kvstore.tickets import REMEMBERED, Ticket, TicketTable


def ticket(number: int, kind: str = "store", pages: int = 2, deadline: float = 5.0) -> Ticket:
    return Ticket(number, kind, (), tuple(range(pages)), 1, deadline)  # type: ignore[arg-type]


def test_tickets_are_in_flight_until_they_are_lost_or_done() -> None:
    table = TicketTable()
    store, load = ticket(1), ticket(2, "load", 3, 6.0)
    table.add(store)
    table.add(load)
    with pytest.raises(AssertionError):
        table.add(ticket(1))
    assert (table.num_in_flight, table.num_pages("store"), table.num_pages("load")) == (2, 2, 3)
    assert table.due(4.9) == [] and table.due(5.0) == [store] and table.due(6.0) == [store, load]
    store.lost = True
    assert table.due(6.0) == [load] and table.lost() == [store]
    assert (table.num_in_flight, table.num_lost, table.num_pages("store")) == (1, 1, 0)
    table.finish(store)
    assert table.is_known(1) and table.is_known(2) and not table.is_known(3)
    with pytest.raises(AssertionError):
        table.add(ticket(1))
    assert table.lost() == [] and list(table.tickets) == [2]


def test_what_has_ended_is_remembered_for_a_while() -> None:
    table = TicketTable()
    for number in range(REMEMBERED + 1):
        table.add(ticket(number))
        table.finish(table.tickets[number])
    assert not table.is_known(0) and table.is_known(1) and table.is_known(REMEMBERED)


def node() -> NodeRecord:
    context = ContentTable().context((), "", (), 0)
    return NodeRecord(1, 0, (), (), (), "", context, Hold(None, 0, 0, ()), 4)


def test_claims_end_page_by_page_or_when_nobody_asks_any_more() -> None:
    claims, claimed = Claims(patience=2), node()
    assert claims[claimed] == ()
    claims.ask(claimed, [0, 1])
    claims.ask(claimed, [2])
    claims.end(claimed, [1, 5])
    assert set(claims[claimed]) == {0, 2}
    for _ in range(2):
        claims.pump()
    assert set(claims[claimed]) == {0, 2}
    claims.ask(claimed, [2])
    for _ in range(2):
        claims.pump()
    assert set(claims[claimed]) == {0, 2}
    claims.pump()
    assert claims[claimed] == ()
    claims.ask(claimed, [3])
    claims.end(claimed, [3])
    assert claims[claimed] == () and not claims._claims
    claims.end(claimed, [3])
    other = Claims(patience=0)
    other.ask(claimed, [0])
    assert set(other[claimed]) == {0}
    other.pump()
    assert other[claimed] == ()
