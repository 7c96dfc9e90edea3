"""A paged KV store whose states are shared by a graph of requests. See KVStore."""

from dagengine_kvstore.costs import CostModel
from dagengine_kvstore.errors import (
    KVStoreError,
    LeakError,
    NotResident,
    OutOfHostPages,
    OutOfPages,
    PinBudgetExceeded,
)
from dagengine_kvstore.events import Event, EventLog
from dagengine_kvstore.eviction import Candidate, EvictionPolicy, LeastRecentlyUsed, NextUse
from dagengine_kvstore.layout import KVLayout, LayerGroupLayout
from dagengine_kvstore.leases import Lease
from dagengine_kvstore.nodes import Extent, NodeRecord, NodeStatus, Recipe
from dagengine_kvstore.references import Mode, Parent, Read
from dagengine_kvstore.registry import Plugin, plugins
from dagengine_kvstore.stats import StateInfo, StoreStats
from dagengine_kvstore.store import KVStore
from dagengine_kvstore.tiers import Completion, Copy, NoTransfer, Tier, Transfer
from dagengine_kvstore.writer import RestoreWriter, Writer

__all__ = [
    "Candidate",
    "Completion",
    "Copy",
    "CostModel",
    "Event",
    "EventLog",
    "EvictionPolicy",
    "Extent",
    "KVLayout",
    "KVStore",
    "KVStoreError",
    "LayerGroupLayout",
    "LeakError",
    "Lease",
    "LeastRecentlyUsed",
    "Mode",
    "NextUse",
    "NoTransfer",
    "NodeRecord",
    "NodeStatus",
    "NotResident",
    "OutOfHostPages",
    "OutOfPages",
    "Parent",
    "PinBudgetExceeded",
    "Plugin",
    "Read",
    "Recipe",
    "RestoreWriter",
    "StateInfo",
    "StoreStats",
    "Tier",
    "Transfer",
    "Writer",
    "plugins",
]
