"""What a new node refers to: parents that it keeps alive, reads that its tokens attend. Checks that both fit
the new node; takes no hold and no page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

from dagengine_kvstore.errors import KVStoreError
from dagengine_kvstore.nodes import NodeRecord, NodeStatus

Mode = Literal["inherit", "digest", "artifact"]
MODES = ("inherit", "digest", "artifact")
Signature = tuple[tuple[str, str], ...]


class Read(NamedTuple):
    """One laid-out run of a sealed node's tokens, seen at `node.own_start + offset + delta`."""

    node: NodeRecord
    start: int
    stop: int
    delta: int = 0

    @property
    def view_start(self) -> int:
        return self.node.own_start + self.start + self.delta


class Parent(NamedTuple):
    """What a new node keeps alive.

    inherit: everything `node` passes on and its tokens [0, stop), for as long as the new node is held;
    digest: the same, until the new node is sealed; artifact: only the tokens [start, stop).
    """

    node: NodeRecord
    mode: Mode
    start: int
    stop: int

    @classmethod
    def inherit(cls, node: NodeRecord, at: int | None = None) -> Parent:
        return cls(node, "inherit", 0, node.length if at is None else at)

    @classmethod
    def digest(cls, node: NodeRecord, at: int | None = None) -> Parent:
        return cls(node, "digest", 0, node.length if at is None else at)

    @classmethod
    def artifact(cls, node: NodeRecord, start: int, stop: int) -> Parent:
        return cls(node, "artifact", start, stop)


def check_references(
    parents: Sequence[Parent], reads: Sequence[Read], signature: Signature, salt: str
) -> None:
    """Whether a node with this signature and salt may refer to `parents` and `reads`.

    Raises KVStoreError `state_not_found` (another tenant's), `parent_failed`, `state_not_sealed`,
    `span_out_of_range`, `signature_mismatch`, `state_released` (nothing holds it any more),
    `edge_mix_forbidden`, `invalid_mode`.
    """
    modes = {parent.mode for parent in parents}
    if {"inherit", "digest"} <= modes:
        message = "a node inherits or digests, not both; artifact mixes with either"
        raise KVStoreError("edge_mix_forbidden", message, field="parents")
    for index, (node, mode, start, stop) in enumerate(parents):
        check_readable(node, start, stop, salt, "parents", index)
        if node.signature != signature:
            raise _other_signature(node, signature, f"parents[{index}]")
        if mode not in MODES:
            message = f"mode must be inherit, digest or artifact, not {mode!r}"
            raise KVStoreError("invalid_mode", message, field=f"parents[{index}].mode")
        if mode != "artifact" and start != 0:
            message = f"{mode} starts at 0, not {start}"
            raise KVStoreError("span_out_of_range", message, field=f"parents[{index}].start")
        check_held(node, start, stop, passed=mode != "artifact", field="parents", index=index)
    for index, (node, start, stop, _) in enumerate(reads):
        check_readable(node, start, stop, salt, "reads", index)
        if node.signature != signature:
            raise _other_signature(node, signature, f"reads[{index}]")
        if start == stop:
            raise KVStoreError(
                "span_out_of_range", "a read holds at least one token", field=f"reads[{index}]"
            )


def check_readable(
    node: NodeRecord, start: int, stop: int, salt: str | None, field: str, index: int | None = None
) -> None:
    """Whether tokens [start, stop) of a node can be referred to (salt None: not checked).

    Args:
        field: what a refusal names, or with `index` the list of which it names one.
    """
    if (
        node.status is NodeStatus.SEALED
        and (salt is None or node.salt == salt)
        and type(start) is int
        and type(stop) is int
        and 0 <= start <= stop <= len(node.tokens)
    ):
        return
    field = _named(field, index)
    if salt is not None and node.salt != salt:
        raise KVStoreError("state_not_found", f"there is no state of node {node.uid}", field=field)
    if node.status is NodeStatus.ABORTED:
        raise KVStoreError("parent_failed", f"node {node.uid} was aborted and leaves no state", field=field)
    if node.status is NodeStatus.WRITING:
        raise KVStoreError("state_not_sealed", f"node {node.uid} is still being written", field=field)
    if not _is_int(start) or not _is_int(stop) or not 0 <= start <= stop <= node.length:
        message = f"[{start}, {stop}) is not inside the {node.length} tokens of node {node.uid}"
        raise KVStoreError("span_out_of_range", message, field=field)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _named(field: str, index: int | None) -> str:
    return field if index is None else f"{field}[{index}]"


def check_held(
    node: NodeRecord, start: int, stop: int, *, passed: bool, field: str, index: int | None = None
) -> None:
    """Whether somebody still holds tokens [start, stop) and, with `passed`, what the node passes on.

    `field` and `index` as in `check_readable`.
    """
    if (passed and node.root.refs == 0) or not node.covers(start, stop):
        message = f"nothing holds tokens [{start}, {stop}) of node {node.uid} any more"
        raise KVStoreError("state_released", message, field=_named(field, index))


def _other_signature(node: NodeRecord, signature: Signature, field: str) -> KVStoreError:
    theirs, new = dict(node.signature), dict(signature)
    name = next(n for n in sorted(theirs.keys() | new.keys()) if theirs.get(n) != new.get(n))
    message = f"node {node.uid} has {name} {theirs.get(name)!r}, the new node {new.get(name)!r}"
    return KVStoreError("signature_mismatch", message, field=f"{field}.signature.{name}")
