"""A plan's device arrays after one decode step, by one launch (csrc/cuda/advance.cu); planner_twin.advance defines it.

Knows entries, tails and a step counter on one CUDA device; not sequences.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused.cuda.driver import Variant, current_stream, kernel

THREADS = 128


class _Params(ctypes.Structure):
    _fields_ = (
        ("entries", ctypes.c_void_p),
        ("tails", ctypes.c_void_p),
        ("step", ctypes.c_void_p),
        ("num_sequences", ctypes.c_int),
        ("page_size", ctypes.c_int),
    )


def advance(
    entries: Tensor,
    tails: Tensor,
    step: Tensor,
    page_size: int,
    *,
    stream: int | None = None,
    pdl: bool = True,
) -> None:
    """One token more for every sequence with a tail, in place; `step` grows by 1.

    Args:
        entries: int32 [E, 4].
        tails: int32 [B, 3], as `PlanArrays.tails`.
        step: int32 [1], what attention adds to the rows' positions.
        stream: a CUDA stream handle, the current one by default.
        pdl: may be started before the kernel before it in the stream has ended.
    Raises: KernelError (invalid_argument).
    """
    for field, tensor, columns in (("entries", entries, 4), ("tails", tails, 3)):
        if tensor.dtype != torch.int32 or tensor.shape[1:] != (columns,) or not tensor.is_contiguous():
            raise KernelError(INVALID_ARGUMENT, f"must be contiguous int32 [.., {columns}]", field)
    if step.dtype != torch.int32 or step.numel() != 1:
        raise KernelError(INVALID_ARGUMENT, "must be int32 [1]", "step")
    params = _Params(
        entries=entries.data_ptr(),
        tails=tails.data_ptr(),
        step=step.data_ptr(),
        num_sequences=len(tails),
        page_size=page_size,
    )
    if stream is None:
        stream = current_stream(entries.device.index)
    blocks = max(1, -(-len(tails) // THREADS))
    kernel("advance", "advance", {}, entries.device.index).launch(
        (blocks, 1, 1), (THREADS, 1, 1), 0, stream, params, pdl=pdl
    )


def prepare(device: int | None = None) -> None:
    """Have the kernel loaded, so that its first launch can be captured. Raises: KernelError (backend_not_loadable)."""
    kernel("advance", "advance", {}, device)


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return (Variant("advance", "advance", ()),)
