"""Where each page's KV is, once there are two tiers. Knows the copies of pages and which nodes' pages they are; starts
no transfer and decides nothing.

    node A, page 0 ──┐
    node B, page 3 ──┴─► PageCopy ──► host page (also while it is written), device page (while its bytes are there)

Nodes that share a device page share its copy, so it is stored once and loaded once. A page of which no copy was ever
begun has no PageCopy: it is DEVICE or NOWHERE.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING

from dagengine_kvstore.errors import KVStoreError, NotResident
from dagengine_kvstore.host_pages import HostPool
from dagengine_kvstore.nodes import NodeRecord
from dagengine_kvstore.pages import PagePool
from dagengine_kvstore.tiers import TRANSITIONS, Tier

if TYPE_CHECKING:
    from dagengine_kvstore.reuse import Prefix
    from dagengine_kvstore.tickets import Ticket


class PageCopy:
    """The KV of one page in both tiers; `tier` changes only along TRANSITIONS.

    Attributes:
        device, generation: the device page with the same bytes, as of that generation; may be gone.
        base: stored position of row 0.
        content: what the device page was registered under, or None.
        ticket: the one that the copy is under.
        failures: loads that failed or were lost.
        slots: (node, page index) of every node page that this is.
        turned: as in PagePool.
    """

    __slots__ = (
        "base",
        "content",
        "device",
        "failures",
        "generation",
        "host",
        "slots",
        "ticket",
        "tier",
        "turned",
    )

    def __init__(
        self,
        host: int,
        device: int,
        generation: int,
        base: int,
        content: Prefix | None,
        *,
        turned: bool = False,
    ) -> None:
        self.tier = Tier.DEVICE
        self.host = host
        self.device = device
        self.generation = generation
        self.base = base
        self.turned = turned
        self.content = content
        self.ticket: Ticket | None = None
        self.failures = 0
        self.slots: dict[tuple[NodeRecord, int], None] = {}

    def __repr__(self) -> str:
        return f"PageCopy({self.tier}, host page {self.host}, device page {self.device})"

    def to(self, tier: Tier) -> None:
        """Raises KVStoreError `illegal_transition` for a step that TRANSITIONS does not have."""
        if tier not in TRANSITIONS[self.tier]:
            raise KVStoreError("illegal_transition", f"{self} cannot become {tier}", field="tier")
        self.tier = tier

    @property
    def is_clean(self) -> bool:
        """Whether the host page holds the KV and no ticket is under way."""
        return self.tier in (Tier.DEVICE, Tier.HOST)


class CopyTable:
    """Copies by the device page that has their bytes."""

    def __init__(self, pool: PagePool, host: HostPool) -> None:
        self._pool = pool
        self._host = host
        self._of_page: dict[int, PageCopy] = {}

    def bind(self, copy: PageCopy, page: int) -> None:
        """From now on `page` has the copy's bytes."""
        self.forget(copy)
        copy.device, copy.generation = page, self._pool.generation[page]
        self._of_page[page] = copy

    def forget(self, copy: PageCopy) -> None:
        """Nobody finds the copy by its device page any more."""
        if self._of_page.get(copy.device) is copy:
            del self._of_page[copy.device]

    def find(self, page: int) -> PageCopy | None:
        """The copy of a device page that somebody refers to, also one that is still being stored."""
        copy = self._of_page.get(page)
        if copy is None or copy.generation != self._pool.generation[page]:
            return None
        return copy

    def device_page(self, copy: PageCopy) -> int | None:
        """The device page that still has the copy's bytes, if it can be referred to."""
        return copy.device if self._pool.is_shareable(copy.device, copy.generation) else None

    def adopt(self, node: NodeRecord) -> None:
        """Make copies that equal nodes have of the same device pages the node's, too."""
        for index, page in enumerate(node.pages):
            if page is not None and copy_of(node, index) is None:
                copy = self.find(page)
                if copy is not None:
                    self.attach(node, index, copy)

    def attach(self, node: NodeRecord, index: int, copy: PageCopy) -> None:
        """Make a copy that of a node's page."""
        if not node.copies:
            node.copies = [None] * len(node.pages)
        assert node.copies[index] is None
        node.copies[index] = copy
        copy.slots[node, index] = None
        self._host.share(copy.host)
        if copy.tier is Tier.HOST and node.pages[index] is not None:
            copy.to(Tier.DEVICE)

    def detach(self, node: NodeRecord, index: int) -> None:
        """A node's page has no copy any more; the last one ends the copy, or leaves that to its ticket."""
        copy = node.copies[index]
        assert copy is not None
        node.copies[index] = None
        del copy.slots[node, index]
        self._host.drop(copy.host)
        if copy.ticket is None:
            self.settle(copy)

    def settle(self, copy: PageCopy) -> None:
        """The tier of a copy under no ticket, after one of its nodes' pages came or went."""
        if not copy.slots:
            self.forget(copy)
            if copy.tier is not Tier.NOWHERE:
                copy.to(Tier.NOWHERE)
        elif copy.tier is Tier.DEVICE and not on_device(copy):
            copy.to(Tier.HOST)


def on_device(copy: PageCopy) -> bool:
    """Whether some node refers to the device page."""
    return any(node.pages[index] is not None for node, index in copy.slots)


def copy_of(node: NodeRecord, index: int) -> PageCopy | None:
    return node.copies[index] if node.copies else None


def clean_copy(node: NodeRecord, index: int) -> PageCopy | None:
    """The copy from which a node's page could be loaded if it left the device now."""
    copy = copy_of(node, index)
    return copy if copy is not None and copy.is_clean else None


def failed_loads(node: NodeRecord, indices: range) -> int:
    """Loads that failed or were lost, of that of these pages of a node of which most did."""
    copies = (copy_of(node, index) for index in indices)
    return max((copy.failures for copy in copies if copy is not None), default=0)


def is_lost(node: NodeRecord, indices: range) -> bool:
    """Whether one of these pages of a node is under a load that is lost, and may never end."""
    copies = (copy_of(node, index) for index in indices)
    tickets = (copy.ticket for copy in copies if copy is not None and copy.tier is Tier.LOADING)
    return any(ticket is not None and ticket.lost for ticket in tickets)


def page_tier(node: NodeRecord, index: int) -> Tier:
    """Where the KV of one page of a sealed node is."""
    copy = copy_of(node, index)
    if node.pages[index] is not None:
        return Tier.STORING if copy is not None and copy.tier is Tier.STORING else Tier.DEVICE
    return Tier.NOWHERE if copy is None else copy.tier


# A node is where the least available of its pages is.
_LEAST_FIRST = (Tier.NOWHERE, Tier.LOADING, Tier.HOST, Tier.STORING)


def node_tier(node: NodeRecord, indices: set[int]) -> Tier:
    """Where the pages `indices` of a sealed node are, all in all."""
    tiers = {page_tier(node, index) for index in indices}
    return next((tier for tier in _LEAST_FIRST if tier in tiers), Tier.DEVICE)


def not_resident(missing: Mapping[NodeRecord, AbstractSet[Tier]]) -> NotResident:
    """The refusal to read nodes, in order, whose missing pages are in these tiers."""
    on_host = [node for node, tiers in missing.items() if Tier.NOWHERE not in tiers]
    return NotResident(tuple(missing), on_host, [node for node in on_host if missing[node] == {Tier.LOADING}])
