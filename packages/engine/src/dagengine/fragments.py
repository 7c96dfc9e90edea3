"""Fragments: states of inputs that read nothing, kept to be read by later queries, and found by what they hold.

A fragment is known by its tokens, its backend and its tenant's salt; two tenants never meet. Which are kept is decided
here: at most so many, each for so long after its last use. Their pages are evicted as any state's. One that was evicted
and is nowhere is let go of: it is computed as an input again, in one step with others, where a state would be restored
for its first reader alone.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from dagengine_kvstore import KVStoreError, NodeRecord, Read

from .core import EngineCore
from .errors import DagError

DEFAULT_TTL_S = 600.0
DEFAULT_MOST = 4096


class FragmentKey(NamedTuple):
    """What a fragment is known by: own tokens, attention backend (None: the engine's) and the tenant's salt."""

    input_ids: tuple[int, ...]
    backend: str | None
    salt: str


class FragmentStates:
    """Kept fragments, the one used longest ago first. Used on the engine's thread only.

    Args:
        most: how many are kept; 0 keeps none.
        ttl_s: seconds after its last use until one is let go of.
    """

    def __init__(self, most: int = DEFAULT_MOST, ttl_s: float = DEFAULT_TTL_S) -> None:
        if isinstance(most, bool) or not isinstance(most, int) or most < 0:
            raise DagError("invalid_request", f"most is an integer from 0, not {most!r}", "most")
        if isinstance(ttl_s, bool) or not isinstance(ttl_s, int | float) or not ttl_s > 0:
            raise DagError(
                "invalid_request", f"ttl_s is a positive number of seconds, not {ttl_s!r}", "ttl_s"
            )
        self.most, self.ttl_s = most, float(ttl_s)
        self._kept: OrderedDict[FragmentKey, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, core: EngineCore, keys: Iterable[FragmentKey]) -> dict[FragmentKey, str]:
        """States of those of the fragments that are kept and somewhere, to be read by what is submitted next.

        That is a use of them: others are evicted first.
        """
        found: dict[FragmentKey, str] = {}
        nodes: list[NodeRecord] = []
        core.store.expire()
        for key in keys:
            state = self._kept.get(key)
            if state is None:
                continue
            try:
                node, _ = core.store.find(state, key.salt, ttl_s=self.ttl_s)
                if not core.preparer.is_there(Read(node, 0, node.length)):
                    _release(core, self._kept.pop(key))
                    continue
            except KVStoreError:  # it was released, or its time was over
                del self._kept[key]
                continue
            self._kept.move_to_end(key)
            found[key] = state
            nodes.append(node)
        core.store.use(nodes)
        return found

    def keep(self, core: EngineCore, states: Mapping[FragmentKey, str]) -> None:
        """Take over states of fragments that were computed; what is kept already, or is too much, is released."""
        for key, state in states.items():
            known = self._kept.pop(key, None)
            if known is not None:
                _release(core, known)
            self._kept[key] = state
        while len(self._kept) > self.most:
            _release(core, self._kept.popitem(last=False)[1])

    def clear(self, core: EngineCore) -> None:
        """Let go of all."""
        while self._kept:
            _release(core, self._kept.popitem(last=False)[1])


def _release(core: EngineCore, state: str) -> None:
    with suppress(DagError):  # it was released by its name, or its time was over
        core.release_state(state)
