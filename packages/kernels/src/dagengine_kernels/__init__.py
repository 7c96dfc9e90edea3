"""Attention over lists of KV-cache segments that are anywhere, cut anywhere and seen at any position.

Knows tensors and segment tables; not requests, models or policies.
"""

from dagengine_kernels.append import AppendPlan, append_kv, empty_pages, plan_append
from dagengine_kernels.backend import AttentionBackend, AttentionShape, Capabilities, Plan
from dagengine_kernels.errors import KernelError
from dagengine_kernels.lse import apply_sinks, merge, merge_many
from dagengine_kernels.registry import BackendEntry, backends, get_backend
from dagengine_kernels.rotary import RotaryTable, build_table, rotate, rotate_by_delta
from dagengine_kernels.segments import DELTA, HI, LO, PAGE, STORED, SegmentTable, SequenceSegments

__all__ = [
    "DELTA",
    "HI",
    "LO",
    "PAGE",
    "STORED",
    "AppendPlan",
    "AttentionBackend",
    "AttentionShape",
    "BackendEntry",
    "Capabilities",
    "KernelError",
    "Plan",
    "RotaryTable",
    "SegmentTable",
    "SequenceSegments",
    "append_kv",
    "apply_sinks",
    "backends",
    "build_table",
    "empty_pages",
    "get_backend",
    "merge",
    "merge_many",
    "plan_append",
    "rotate",
    "rotate_by_delta",
]
