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
from dagengine_kvstore.eviction import Candidate, EvictionPolicy, LeastRecentlyUsed, NextUse, eviction_policy
from dagengine_kvstore.layout import KVLayout, LayerGroupLayout
from dagengine_kvstore.leases import Lease
from dagengine_kvstore.move_plan import plan_moves
from dagengine_kvstore.moves import Move, MovePlan, Mover, Step, StepKind
from dagengine_kvstore.nodes import Extent, NodeRecord, NodeStatus, Recipe
from dagengine_kvstore.references import Mode, Parent, Read
from dagengine_kvstore.registry import Plugin, plugins
from dagengine_kvstore.repositioning import Reposition, Repositioned
from dagengine_kvstore.residency import page_tier
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
    "Move",
    "MovePlan",
    "Mover",
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
    "Reposition",
    "Repositioned",
    "RestoreWriter",
    "StateInfo",
    "Step",
    "StepKind",
    "StoreStats",
    "Tier",
    "Transfer",
    "Writer",
    "eviction_policy",
    "page_tier",
    "plan_moves",
    "plugins",
]
