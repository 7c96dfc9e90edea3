"""Where the KV of a node is, and the protocol of what moves it. Knows tickets and pages; knows no device.

    DEVICE ──► STORING ──► HOST ──► LOADING ──► DEVICE
       └─────────────────────┴──► NOWHERE ──► DEVICE       dropped, then computed again from the recipe

A node counts as resident in a tier only after the completion that put it there was polled. A page under a
ticket is not free, not moved again and not overwritten before that completion, whatever else was cancelled.
The store has one tier so far: DEVICE or NOWHERE. `NoTransfer` is that tier's transfer: it takes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol

from dagengine_kvstore.errors import KVStoreError


class Tier(StrEnum):
    DEVICE = "device"
    STORING = "storing"
    HOST = "host"
    LOADING = "loading"
    NOWHERE = "nowhere"


TRANSITIONS: dict[Tier, tuple[Tier, ...]] = {
    Tier.DEVICE: (Tier.STORING, Tier.NOWHERE),
    Tier.STORING: (Tier.HOST, Tier.DEVICE),
    Tier.HOST: (Tier.LOADING, Tier.NOWHERE),
    Tier.LOADING: (Tier.DEVICE, Tier.HOST),
    Tier.NOWHERE: (Tier.DEVICE,),
}


@dataclass(frozen=True, slots=True)
class Copy:
    """Pages to move as (device page, host page) pairs: `store` copies left to right, `load` right to left.

    No page occurs twice, and none is under another ticket.

    Attributes:
        keys: content key of each page, 32 bytes over signature, salt, context and tokens; b"" where it is not known.
        bases: stored position of row 0 of each page.
        tokens: of the rows of each page.
    """

    kind: Literal["store", "load"]
    pages: tuple[tuple[int, int], ...]
    keys: tuple[bytes, ...] = ()
    bases: tuple[int, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one ticket; `error` says why the copy failed, or is None."""

    ticket: int
    error: str | None = None


class Transfer(Protocol):
    """Plug-in group `dagengine.transfers`; the entry point is a callable without arguments."""

    @property
    def name(self) -> str: ...

    @property
    def num_host_pages(self) -> int:
        """Pages that the host tier has."""
        ...

    def submit(self, copy: Copy) -> int:
        """Start a copy; a ticket that was never given out before.

        Raises KVStoreError `capacity` for a host page outside [0, num_host_pages).
        """
        ...

    def poll(self) -> Sequence[Completion]:
        """Completions not reported yet; every ticket is reported exactly once, also after an abort."""
        ...

    def abort(self, ticket: int) -> bool:
        """Whether a ticket touches none of its pages from now on; False: it may, wait for its completion.

        Never blocks. True for a ticket that is finished or was never given.
        """
        ...


class NoTransfer:
    """The one-tier case: no host pages, so every copy is refused."""

    name = "none"
    num_host_pages = 0

    def submit(self, copy: Copy) -> int:
        raise KVStoreError(
            "capacity", f"there is no host tier to {copy.kind} pages to or from", field="pages"
        )

    def poll(self) -> Sequence[Completion]:
        return ()

    def abort(self, ticket: int) -> bool:
        return True
