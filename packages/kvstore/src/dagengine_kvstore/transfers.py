"""Copies between the tiers: which pages go under which ticket, and what the end of a ticket means. Knows no policy:
whose pages are copied, and what makes room for them, is decided by `pressure.py`.

    store                                        load
    device page live ─ MOVING ─ live or free     device page free ─ MOVING ─ live, or free if the copy failed
    host page   free ─ MOVING ─ live or free     host page   live ─ MOVING ─ live
    copy      DEVICE ─ STORING ─ DEVICE or HOST  copy        HOST ─ LOADING ─ DEVICE, or HOST if the copy failed

What cannot be computed again is never given up: its copy stays LOADING under a lost ticket, and is HOST when that is
over; it may fail any number of times.

A store starts when no open step may write the page any more; readers are no hindrance. What a lost ticket may touch
stays MOVING until the ticket is reported after all, or its abort is confirmed.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Literal

from dagengine_kvstore.nodes import NodeRecord
from dagengine_kvstore.residency import PageCopy, copy_of, on_device
from dagengine_kvstore.reuse import Prefix
from dagengine_kvstore.tickets import Ticket, TicketTable
from dagengine_kvstore.tiers import Copy, Tier, Transfer

if TYPE_CHECKING:
    from dagengine_kvstore.books import Books


class Transfers:
    """
    Args:
        timeout_s: after which a ticket is lost.
        max_failures: failed loads after which a page is given up, and failed stores after which a node is.

    Attributes:
        counts: how often what happened, by the kind of its event, and pages copied as `pages_store`, `pages_load`.
    """

    def __init__(self, books: Books, transfer: Transfer, timeout_s: float, max_failures: int) -> None:
        self.tickets = TicketTable()
        self.counts: Counter[str] = Counter()
        self._books = books
        self._transfer = transfer
        self._timeout_s = timeout_s
        self._max_failures = max_failures
        self._failed_stores: weakref.WeakKeyDictionary[NodeRecord, int] = weakref.WeakKeyDictionary()

    @property
    def is_usable(self) -> bool:
        """Whether there is a host tier, and no lost ticket says that nothing arrives there."""
        return self._books.host.num_pages > 0 and not self.tickets.num_lost

    def gave_up(self, node: NodeRecord) -> bool:
        """Whether storing the node failed too often."""
        return self._failed_stores.get(node, 0) >= self._max_failures

    def count_failure(self, node: NodeRecord) -> None:
        """Storing the node did not work once more."""
        self._failed_stores[node] = self._failed_stores.get(node, 0) + 1

    def forgive(self, node: NodeRecord) -> None:
        """Try a node again whose stores failed too often."""
        self._failed_stores.pop(node, None)

    def dirty(self, node: NodeRecord) -> list[int]:
        """Indices of the node's device pages that could be stored now, since the host neither has nor gets them.

        Equal nodes' copies of the same pages become the node's, too.
        """
        pool = self._books.pool
        self._books.copies.adopt(node)
        return [
            index
            for index, page in enumerate(node.pages)
            if page is not None
            and copy_of(node, index) is None
            and not pool.is_moving(page)
            and pool.is_written(page)
        ]

    def store(self, node: NodeRecord, indices: Sequence[int]) -> int:
        """Start to store these of a node's `dirty` pages, for which the host has room.

        Returns: how many are on their way; 0 if the transfer refused.
        """
        books = self._books
        pages = [page for index in indices if (page := node.pages[index]) is not None]
        copies: list[PageCopy] = []
        for index, page, host in zip(indices, pages, books.host.take(len(indices)), strict=True):
            content = books.pool.content(page)
            assert content is None or isinstance(content, Prefix)
            pool = books.pool
            copy = PageCopy(
                host, page, pool.generation[page], pool.base[page], content, turned=pool.turned[page]
            )
            copy.to(Tier.STORING)
            books.copies.bind(copy, page)
            books.pool.begin_move(page)
            books.copies.attach(node, index, copy)
            copies.append(copy)
        return self._submit("store", node, copies, pages)

    def load(self, node: NodeRecord, copies: Sequence[PageCopy]) -> int:
        """Start to load copies that are on the host, into unused pages, of which there are enough.

        Returns: how many are on their way; 0 if the transfer refused.
        """
        books = self._books
        pages = books.pool.take_moving(len(copies))
        for copy in copies:
            copy.to(Tier.LOADING)
            books.host.begin_move(copy.host)
        return self._submit("load", node, copies, pages)

    def poll(self) -> None:
        """Take in what has ended, and give up on what is past its deadline."""
        for completion in self._transfer.poll():
            ticket = self.tickets.tickets.get(completion.ticket)
            if ticket is not None:
                self._finish(ticket, completion.error)
            else:
                known = self.tickets.is_known(completion.ticket)
                self._note("completion_duplicate" if known else "completion_unknown", completion.ticket)
        for ticket in self.tickets.due(self._books.now()):
            self._lose(ticket)
        for ticket in self.tickets.lost():
            if self._transfer.abort(ticket.id):
                self._end_quarantine(ticket)

    def _submit(
        self,
        kind: Literal["store", "load"],
        node: NodeRecord,
        copies: Sequence[PageCopy],
        pages: Sequence[int],
    ) -> int:
        request = Copy(
            kind,
            tuple((page, copy.host) for copy, page in zip(copies, pages, strict=True)),
            keys=tuple(b"" if copy.content is None or copy.turned else copy.content.key for copy in copies),
            tokens=tuple(() if copy.content is None else copy.content.tokens for copy in copies),
            bases=tuple(copy.base for copy in copies),
        )
        error: str | None = None
        try:
            number = self._transfer.submit(request)
        except Exception as exc:
            number, error = 0, f"{type(exc).__name__}: {exc}"
        deadline = self._books.now() + self._timeout_s
        ticket = Ticket(number, kind, tuple(copies), tuple(pages), node.uid, deadline)
        for copy in copies:
            copy.ticket = ticket
        if error is not None:
            self._settle(ticket, error)
            return 0
        self.tickets.add(ticket)
        tier = Tier.STORING if kind == "store" else Tier.LOADING
        self._note(kind, ticket.id, ticket, tier)
        return len(pages)

    def _finish(self, ticket: Ticket, error: str | None) -> None:
        self.tickets.finish(ticket)
        if ticket.lost:
            self._note("completion_late", ticket.id, ticket)
            self._release(ticket)
        else:
            self._settle(ticket, error)

    def _settle(self, ticket: Ticket, error: str | None) -> None:
        """The end of a ticket that was not lost."""
        if ticket.kind == "store" and error is None:
            self._stored(ticket)
        elif ticket.kind == "store":
            self._store_failed(ticket, error)
        elif error is None:
            self._loaded(ticket)
        else:
            self._load_failed(ticket, error)

    def _stored(self, ticket: Ticket) -> None:
        for copy in ticket.copies:
            copy.to(Tier.DEVICE if on_device(copy) else Tier.HOST)
        self._release(ticket)
        for node in self._nodes(ticket.copies):
            self.forgive(node)
        self.counts["pages_store"] += len(ticket.pages)
        self._note("stored", ticket.id, ticket, Tier.HOST)

    def _store_failed(self, ticket: Ticket, error: str | None) -> None:
        self._give_up_store(ticket)
        self._release(ticket)
        self._note("store_failed", ticket.id, ticket, Tier.DEVICE, error)

    def _loaded(self, ticket: Ticket) -> None:
        books = self._books
        for copy, page in zip(ticket.copies, ticket.pages, strict=True):
            books.host.end_move(copy.host)
            waiting = [(node, index) for node, index in copy.slots if node.pages[index] is None]
            for node, index in waiting:
                node.set_page(index, page)
            books.pool.land(page, len(waiting), copy.base, copy.content, turned=copy.turned)
            copy.ticket = None
            if waiting:
                copy.to(Tier.DEVICE)
                books.copies.bind(copy, page)
            books.copies.settle(copy)
        books.use(self._nodes(ticket.copies))
        self.counts["pages_load"] += len(ticket.pages)
        self._note("loaded", ticket.id, ticket, Tier.DEVICE)

    def _load_failed(self, ticket: Ticket, error: str) -> None:
        books = self._books
        given_up = 0
        for copy, page in zip(ticket.copies, ticket.pages, strict=True):
            books.pool.end_move(page)
            copy.to(Tier.HOST)
            copy.failures += 1
            copy.ticket = None
            books.host.end_move(copy.host)
            if copy.failures >= self._max_failures:
                given_up += not self._give_up_copy(copy)
            books.copies.settle(copy)
        self._note("load_failed", ticket.id, ticket, Tier.HOST, error)
        if given_up:
            self._note("given_up", ticket.id, ticket, Tier.NOWHERE, pages=given_up)

    def _lose(self, ticket: Ticket) -> None:
        """Past the deadline: nobody waits for it any more, and what it may touch is not used."""
        ticket.lost = True
        if ticket.kind == "store":
            self._give_up_store(ticket)
            self._note("store_lost", ticket.id, ticket, Tier.DEVICE)
            return
        kept = 0
        for copy in ticket.copies:
            self._books.copies.forget(copy)
            copy.failures += 1
            if self._give_up_copy(copy):
                kept += 1
            else:
                copy.to(Tier.NOWHERE)
        tier = Tier.LOADING if kept == len(ticket.copies) else Tier.NOWHERE
        self._note("load_lost", ticket.id, ticket, tier)

    def _end_quarantine(self, ticket: Ticket) -> None:
        self.tickets.finish(ticket)
        self._release(ticket)
        self._note("quarantine_over", ticket.id, ticket)

    def _give_up_store(self, ticket: Ticket) -> None:
        for node in self._nodes(ticket.copies):
            self.count_failure(node)
        for copy in ticket.copies:
            copy.to(Tier.DEVICE)
            self._books.copies.forget(copy)
            self._detach_all(copy)

    def _release(self, ticket: Ticket) -> None:
        """Whatever becomes of its pages now, the ticket does not touch them."""
        for copy, page in zip(ticket.copies, ticket.pages, strict=True):
            self._books.pool.end_move(page)
            self._books.host.end_move(copy.host)
            copy.ticket = None
            if copy.tier is Tier.LOADING:
                copy.to(Tier.HOST)
            self._books.copies.settle(copy)

    def _give_up_copy(self, copy: PageCopy) -> bool:
        """The nodes that can be computed again have the copy no more. Returns whether others keep it."""
        for node, index in tuple(copy.slots):
            if node.recomputable:
                self._books.copies.detach(node, index)
        return bool(copy.slots)

    def _detach_all(self, copy: PageCopy) -> None:
        for node, index in tuple(copy.slots):
            self._books.copies.detach(node, index)

    def _nodes(self, copies: Iterable[PageCopy]) -> list[NodeRecord]:
        return list(dict.fromkeys(node for copy in copies for node, _ in copy.slots))

    def _note(
        self,
        kind: str,
        number: int,
        ticket: Ticket | None = None,
        tier: Tier | None = None,
        error: str | None = None,
        *,
        pages: int | None = None,
    ) -> None:
        self.counts[kind] += 1
        node = None if ticket is None else ticket.node
        if pages is None and ticket is not None:
            pages = len(ticket.pages)
        self._books.events.record(
            self._books.now(), kind, node=node, pages=pages, ticket=number, tier=tier, error=error
        )
