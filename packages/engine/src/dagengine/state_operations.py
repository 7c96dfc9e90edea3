"""What is done to states beside the step: forked, repositioned, released, moved between the tiers.

Knows handles, the store and the graph; no requests and no steps but that those in flight can be settled.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from dagengine_kvstore import KVStore, Mover, NodeRecord, Read, Reposition

from .errors import DagError, as_dag_error, shown
from .host_tier import HostTier
from .prepare import Preparer
from .request import ContextRef, Keep
from .upcoming import Upcoming

REPOSITION_FIELDS = {"start": "start", "moves[0].own_start": "start"}
"""What refusals of a reposition say of its arguments; all others are about the state."""


class StateOperations(ABC):
    """The part of an engine core that its users' states are served by.

    Attributes:
        host_tier: the store's second tier, if there is one.
    """

    store: KVStore
    preparer: Preparer
    host_tier: HostTier | None
    _upcoming: Upcoming

    @abstractmethod
    def _settle(self) -> None:
        """Collect the steps in flight, so that none of them touches a page."""

    @abstractmethod
    def _page_mover(self) -> Mover:
        """Who moves rows of the store's pages."""

    def fork(self, state_id: str, at: int, *, salt: str = "", keep: Keep | None = None) -> str:
        """A new handle on the first `at` tokens of a state.

        Raises:
            DagError: as a reference would, with the field `state` or `at`.
        """
        if at is None:
            raise DagError("invalid_request", "say at which token to cut", "at")
        try:
            ref = self.preparer.resolve(ContextRef(state=state_id, at=at), 0, salt)
        except DagError as error:
            raise DagError(error.code, error.message, (error.field or "state").rpartition(".")[2]) from None
        assert isinstance(ref.node, NodeRecord)
        keep = keep or Keep()
        try:
            return self.store.name(
                ref.node, at=ref.at, salt=salt, name=keep.name, ttl_s=keep.ttl_s, pin=keep.pin
            )
        except Exception as error:
            raise as_dag_error(error, "state") from None

    def reposition(
        self, state_id: str, start: int, *, salt: str = "", copy: bool = False, keep: Keep | None = None
    ) -> str:
        """A new state of the same tokens whose K is stored from position `start` on, for readers without deltas.

        Without `copy` it takes the pages of the state, which then is recomputed when somebody reads it; steps in flight
        are collected first.

        Raises:
            DagError: the store's refusals, `position_overflow`, the adapter's; the field is `state` or `start`.
                `invalid_request` for a `copy` that is neither true nor false.
        """
        if not isinstance(copy, bool):
            raise DagError("invalid_request", f"copy is true or false, not {shown(copy)}", "copy")
        try:
            ref = self.preparer.resolve(ContextRef(state=state_id), 0, salt)
            node = ref.node
            assert isinstance(node, NodeRecord)
            stop = node.length if ref.at is None else ref.at
            self.preparer.check_start(node, stop, start)
            if not copy:
                self._settle()
            moves = [Reposition(node, start, stop)]
            (made,) = self.store.reposition(moves, self._page_mover(), copy=copy).nodes
        except Exception as error:
            found = as_dag_error(error)
            field = REPOSITION_FIELDS.get(found.field or "", "state")
            raise DagError(found.code, found.message, field) from None
        keep = keep or Keep()
        try:
            self.preparer.adopt(made, node)
            return self.store.name(made, salt=salt, name=keep.name, ttl_s=keep.ttl_s, pin=keep.pin)
        except Exception as error:
            raise as_dag_error(error, "state") from None
        finally:
            self.store.unhold(made)

    def release_state(self, state_id: str, *, salt: str | None = None) -> None:
        """End a handle; whoever reads the state keeps it. Raises DagError `state_not_found`, `state_released`."""
        try:
            self.store.release(state_id, salt=salt)
        except Exception as error:
            found = as_dag_error(error)
            raise DagError(found.code, found.message, "state") from None

    def offload_state(self, state_id: str, *, salt: str = "") -> None:
        """Move a state's own pages to the host, as soon as nothing needs them on the device.

        Raises: DagError `state_not_found`, `state_released`, `capacity` if the host has no room, `unsupported` without
        a host tier.
        """
        self._upcoming.changed()
        node, _ = self._resolve_state(state_id, salt)
        try:
            self.store.offload(node)
        except Exception as error:
            found = as_dag_error(error)
            raise DagError(found.code, found.message, "state") from None

    def prefetch_state(self, state_id: str, *, salt: str = "") -> None:
        """Begin to load what the host has of a state and of what it passes on, as far as pages are unused.

        Raises: DagError as `offload_state`, but for `capacity`.
        """
        node, at = self._resolve_state(state_id, salt)
        passed = self.preparer.graph.node(node.uid).passed
        reads = [Read(self.preparer.record(r.node), r.start, r.stop, 0) for r in passed]
        self.store.prefetch([*reads, *([Read(node, 0, at, 0)] if at else [])])

    def _resolve_state(self, state_id: str, salt: str) -> tuple[NodeRecord, int]:
        if self.host_tier is None:
            message = "there is no host tier; start the engine with cpu_kv_gib"
            raise DagError("unsupported", message, "state")
        try:
            return self.store.resolve(state_id, salt)
        except Exception as error:
            found = as_dag_error(error)
            raise DagError(found.code, found.message, "state") from None
