"""Counts everything again from what refers to what, and names every difference with the books."""

from __future__ import annotations

from collections import Counter, defaultdict
from itertools import chain
from typing import TYPE_CHECKING

from dagengine_kvstore.holds import Hold
from dagengine_kvstore.nodes import UNKNOWN, NodeRecord
from dagengine_kvstore.residency import PageCopy
from dagengine_kvstore.reuse import Prefix
from dagengine_kvstore.tiers import Tier

if TYPE_CHECKING:
    from dagengine_kvstore.books import Books
    from dagengine_kvstore.leases import Lease


def problems(books: Books) -> list[str]:
    return [
        *books.pool.problems(),
        *_page_references(books),
        *_holds(books),
        *_nodes(books),
        *_writers(books),
        *books.host.problems(),
        *_copies(books),
        *_tickets(books),
    ]


def _page_references(books: Books) -> list[str]:
    expected: Counter[int] = Counter()
    for node in books.nodes():
        expected.update(page for page in node.pages if page is not None)
    for writer in (*books.writers.values(), *books.restores.values()):
        expected.update(writer.pages)
    for lease in books.leases:
        expected.update(lease.own_pages())
    return [
        f"page {page} has {refs} references, its owners are {expected[page]}"
        for page, refs in enumerate(books.pool.refs)
        if refs != expected[page]
    ]


def _holds(books: Books) -> list[str]:
    expected: Counter[Hold] = Counter()
    cover: dict[NodeRecord, dict[tuple[int, int], int]] = {}
    stack = _owned(books)
    while stack:
        hold = stack.pop()
        expected[hold] += 1
        if expected[hold] > 1:
            continue
        stack.extend(hold.below)
        if hold.node is not None and hold.start < hold.stop:
            spans = cover.setdefault(hold.node, {})
            spans[hold.start, hold.stop] = spans.get((hold.start, hold.stop), 0) + 1
    found = [
        f"a hold on {hold.node or 'passed tokens'} has {hold.refs} references, its owners are {count}"
        for hold, count in expected.items()
        if hold.refs != count
    ]
    for node in books.nodes():
        if node.cover != cover.get(node, {}):
            found.append(f"{node} is covered {node.cover}, its holds say {cover.get(node, {})}")
        if node.root.refs != expected[node.root]:
            found.append(f"{node} passes on to {node.root.refs}, its owners are {expected[node.root]}")
    return found


def _owned(books: Books) -> list[Hold]:
    """Every reference to a hold that is not another hold's."""
    owned = [handle.hold for handle in books.handles]
    owned += [hold for by_at in books.anonymous.values() for holds in by_at.values() for hold in holds]
    for writer in books.writers.values():
        owned += [writer.node.root, *writer.digested]
    for restore in books.restores.values():
        owned += restore.holds
    return owned


def _nodes(books: Books) -> list[str]:
    found: list[str] = []
    leases: defaultdict[NodeRecord, Counter[Lease]] = defaultdict(Counter)
    for lease in books.leases:
        for read in lease.reads:
            leases[read.node][lease] += 1
        if lease.is_stale():
            pages = [run.tolist() for run in lease.pages]
            found.append(f"pages {pages} were handed out again under a lease")
    used = list(books.by_use())
    if used != sorted(used, key=lambda node: (node.last_used, -node.uid)):
        found.append("nodes are not in the order of their use")
    placed = set(used)
    for node in books.nodes():
        if node.sealed and node not in placed and any(page is not None for page in node.pages):
            found.append(f"{node} has pages and no place in the order of use")
        if node.leases != leases[node]:
            counted, there = (sum(each.values()) for each in (node.leases, leases[node]))
            found.append(f"{node} counts {counted} reads by leases, there are {there}")
        if node.restoring != (node in books.restores):
            found.append(f"{node} is marked restoring={node.restoring}, which is wrong")
        if not node.run_is_true():
            found.append(f"{node} has pages {node.pages}, and says {list(node.run() or ())}")
        kept = books.holds.covered_pages(node)
        for index, page in enumerate(node.pages):
            if page is not None and index not in kept:
                found.append(f"{node} keeps page {page}, which nothing holds")
        if node.sealed:
            found += _tokens(books, node)
    return found


def _tokens(books: Books, node: NodeRecord) -> list[str]:
    """Of a sealed node: how many tokens are not known, and whether what its pages are found by are the others."""
    found: list[str] = []
    writer, size = books.writers.get(node), books.page_size
    unknown = 0 if writer is None else writer.num_unknown
    if node.num_unknown != unknown or list(node.tokens).count(UNKNOWN) != unknown:
        found.append(f"{node} says that {node.num_unknown} tokens are not known, its writer {unknown}")
    for index, page in enumerate(node.pages):
        content = None if page is None else books.pool.content(page)
        if isinstance(content, Prefix) and content.tokens != node.tokens[index * size : (index + 1) * size]:
            found.append(f"page {page} of {node} is found by {content.tokens}, which it does not hold")
    return found


def _writers(books: Books) -> list[str]:
    """What a writer appended, knows and committed, and which of its pages may be shared for that."""
    found: list[str] = []
    for writer in (*books.writers.values(), *books.restores.values()):
        counts = (writer.num_committed, writer.num_known, writer.num_tokens, writer.capacity)
        if list(counts) != sorted(counts):
            found.append(f"{writer.node} is committed, known, appended, reserved up to {counts}")
        full = -(-writer.num_committed // books.page_size)
        for index, page in enumerate(writer.pages):
            if index >= full and books.pool.has_content(page):
                found.append(f"{writer.node} shares page {page}, of which nothing is committed")
    early = {page for node, writer in books.writers.items() if node.sealed for page in writer.pages}
    found += [f"page {page} is to be written by nobody" for page in books.pool.expected - early]
    return found


def _copies(books: Books) -> list[str]:
    """What the host has of nodes' pages: who refers to it, and whether the tier of each copy is true."""
    found: list[str] = []
    expected: Counter[int] = Counter()
    slots: dict[PageCopy, set[tuple[NodeRecord, int]]] = {}
    for node in books.nodes():
        kept = books.holds.covered_pages(node)
        for index, copy in enumerate(node.copies):
            if copy is None:
                continue
            expected[copy.host] += 1
            slots.setdefault(copy, set()).add((node, index))
            if index not in kept:
                found.append(f"{node} keeps {copy} of page {index}, which nothing holds")
            page = node.pages[index]
            if page is not None and books.copies.device_page(copy) != page:
                found.append(f"{node} has page {page}, and {copy} of another one")
    found += [
        f"host page {page} has {refs} references, its owners are {expected[page]}"
        for page, refs in enumerate(books.host.refs)
        if refs != expected[page]
    ]
    for copy, owners in slots.items():
        if owners != copy.slots.keys():
            found.append(f"{copy} is of {sorted((n.uid, i) for n, i in copy.slots)}, which is wrong")
        moves = copy.tier in (Tier.STORING, Tier.LOADING)
        is_there = any(node.pages[index] is not None for node, index in owners)
        tiers = (Tier.STORING, Tier.DEVICE) if is_there else (Tier.LOADING, Tier.HOST)
        if copy.tier not in tiers or moves != (copy.ticket is not None):
            found.append(f"{copy} is under ticket {copy.ticket}, and some node has the page: {is_there}")
    if len({copy.host for copy in slots}) != len(slots):
        found.append("two copies have the same host page")
    return found


def _tickets(books: Books) -> list[str]:
    """Exactly what open tickets may touch, or was set aside, is moving, and no page is under two of them."""
    tickets = books.pressure.tickets
    found: list[str] = []
    for name, pool, under in (
        (
            "page",
            books.pool,
            Counter(chain(books.pool.aside, (page for ticket in tickets for page in ticket.pages))),
        ),
        ("host page", books.host, Counter(copy.host for ticket in tickets for copy in ticket.copies)),
    ):
        for page in range(pool.num_pages):
            if under[page] != pool.is_moving(page):
                found.append(
                    f"{name} {page} is under {under[page]} tickets, moving is {pool.is_moving(page)}"
                )
    return found
