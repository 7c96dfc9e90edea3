"""Where the KV of a page is, and the protocol of what moves it. Knows tickets and pages; knows no device.

    DEVICE ──► STORING ──► HOST ──► LOADING ──► DEVICE       HOST ──► DEVICE: the device page was still there
       ▲          │          │         │                     DEVICE ──► HOST: the host page still is
       │          └► DEVICE  └► NOWHERE◄┴► HOST              a copy failed or was lost
       └──────────────────────── NOWHERE                     computed again from the recipe

A page counts as resident in a tier only after the completion that put it there was polled. A page under a
ticket is not free, not moved again and not overwritten before that completion, whatever else was cancelled.
`NoTransfer` is the one-tier case: it takes nothing, and DEVICE and NOWHERE are all there is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, Protocol, cast

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.registry import TRANSFERS, load


class Tier(StrEnum):
    DEVICE = "device"
    STORING = "storing"
    HOST = "host"
    LOADING = "loading"
    NOWHERE = "nowhere"


TRANSITIONS: dict[Tier, tuple[Tier, ...]] = {
    Tier.DEVICE: (Tier.STORING, Tier.HOST, Tier.NOWHERE),
    Tier.STORING: (Tier.HOST, Tier.DEVICE),
    Tier.HOST: (Tier.LOADING, Tier.DEVICE, Tier.NOWHERE),
    Tier.LOADING: (Tier.DEVICE, Tier.HOST, Tier.NOWHERE),
    Tier.NOWHERE: (Tier.DEVICE,),
}


@dataclass(frozen=True, slots=True)
class Copy:
    """Pages to move as (device page, host page) pairs: `store` copies left to right, `load` right to left.

    No page occurs twice, and none is under another ticket.

    Attributes:
        keys: content key of each page, 32 bytes over signature, salt, context and tokens; b"" where it is not known,
            or not that of what was computed, since K was turned.
        tokens: of each page's rows, a partial last page's fewer; () where they are not known.
        bases: stored position of row 0 of each page.
    """

    kind: Literal["store", "load"]
    pages: tuple[tuple[int, int], ...]
    keys: tuple[bytes, ...] = ()
    tokens: tuple[tuple[int, ...], ...] = ()
    bases: tuple[int, ...] = ()


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

        Raises KVStoreError `capacity` for a host page outside [0, num_host_pages). Nothing is started if it raises.
        """
        ...

    def poll(self) -> Sequence[Completion]:
        """Completions not reported yet, without waiting; every ticket is reported once, or `abort` has confirmed it."""
        ...

    def abort(self, ticket: int) -> bool:
        """Give a copy up, without waiting.

        Returns: True if from now on the ticket touches none of its pages, also for one that has ended or never was; its
        completion may still be reported, with an error or without. False if that cannot be said: its completion will
        be reported.
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


def transfer_of(transfer: str | Transfer) -> Transfer:
    """A transfer by its registered name, or the object itself.

    Raises KVStoreError `plugin_not_found` or `plugin_broken`.
    """
    if not isinstance(transfer, str):
        return transfer
    factory = load(TRANSFERS, transfer)
    if not callable(factory):
        message = f"{transfer!r} of {TRANSFERS} is not callable"
        raise KVStoreError("plugin_broken", message, field="transfer")
    return cast(Transfer, factory())
