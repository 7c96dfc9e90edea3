"""Partial results of a plan into outputs by one launch (csrc/cuda/merge.cu); the definition is lse.py's.

Knows a plan's merge lists and tensors on one CUDA device; not what made the parts.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Variant, kernel
from dagengine_kernels.fused.cuda.vectors import DTYPES
from dagengine_kernels.fused.plan import PlanArrays

WARPS = 4
"""Per block."""

FEW_PARTS = 8
"""Parts that one warp has under way; where rows have more on average, several warps share a row."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("o_part", ctypes.c_void_p),
        ("lse2_part", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
        ("indptr", ctypes.c_void_p),
        ("parts", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("lse2", ctypes.c_void_p),
        ("sinks", ctypes.c_void_p),
        ("num_rows", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
    )


@dataclass(frozen=True, eq=False)
class MergeLists:
    """The merge lists of a plan on a device, int32 (see fused/plan.py).

    Attributes:
        rows: [J]; entries past the plan's own may be -1 and are passed over.
        indptr: [J + 1]; what belongs to such entries is not read.
        parts: indices into the first axis of the partial results.
        split: how many warps share a row, 1, 2 or 4; None chooses by the lengths of `parts` and `rows`.
    """

    rows: Tensor
    indptr: Tensor
    parts: Tensor
    split: int | None = None

    @classmethod
    def load(cls, arrays: PlanArrays, device: torch.device) -> MergeLists:
        """A copy of the lists of `arrays` on `device`."""
        lists = (arrays.merge_rows, arrays.merge_indptr, arrays.merge_parts)
        return cls(*(torch.from_numpy(x).to(device) for x in lists))


def merge_parts(
    lists: MergeLists,
    o_part: Tensor,
    lse2_part: Tensor,
    out: Tensor,
    lse2: Tensor | None = None,
    sinks: Tensor | None = None,
    *,
    stream: int | None = None,
    pdl: bool = True,
) -> None:
    """Write the listed rows of `out` (and `lse2`); the others stay as they are.

    Args:
        lists: which parts make which row.
        o_part: float32 or out's dtype [P, G, D]; lse2_part: float32 [P, G], base 2, -inf where nothing was seen.
        out: [T, Hq, D]; lse2: float32 [T, Hq], base 2; all contiguous.
        sinks: float32 [Hq] logits (base e), taken into the softmax of every listed row.
        stream: a CUDA stream handle, the current one by default.
        pdl: may be started before the kernel before it in the stream has ended.
    A row without parts, or with empty ones only, becomes 0 and -inf (with sinks: 0 and the sink alone).
    Raises: KernelError (invalid_argument, capability_missing).
    """
    num_rows = len(lists.rows)
    num_heads, dim = out.shape[1:]
    group = o_part.shape[1]
    _check(o_part, lse2_part, out, lse2, sinks)
    if num_rows == 0:
        return
    split = lists.split or split_of(len(lists.parts), num_rows)
    params = _Params(
        o_part=o_part.data_ptr(),
        lse2_part=lse2_part.data_ptr(),
        rows=lists.rows.data_ptr(),
        indptr=lists.indptr.data_ptr(),
        parts=lists.parts.data_ptr(),
        out=out.data_ptr(),
        lse2=None if lse2 is None else lse2.data_ptr(),
        sinks=None if sinks is None else sinks.data_ptr(),
        num_rows=num_rows,
        kv_heads=num_heads // group,
    )
    if stream is None:
        stream = torch.cuda.current_stream(out.device).cuda_stream
    found = _kernel(out.dtype, o_part.dtype, dim, group, split, out.device.index)
    found.launch(
        (-(-num_rows * group * split // WARPS), 1, 1), (WARPS * 32, 1, 1), 0, stream, params, pdl=pdl
    )


def split_of(num_parts: int, num_rows: int) -> int:
    """How many warps share a row where `num_rows` rows have `num_parts` parts in all."""
    average = num_parts / num_rows
    return 1 if average <= FEW_PARTS else 2 if average <= 2 * FEW_PARTS else 4


@functools.cache
def _kernel(
    dtype: torch.dtype, part_dtype: torch.dtype, dim: int, group: int, split: int, device: int
) -> Kernel:
    macros = {
        "DTYPE": DTYPES[dtype],
        "PART_DTYPE": DTYPES[part_dtype],
        "HEAD_DIM": dim,
        "GROUP": group,
        "VEC": 4 if dim % 128 == 0 else 2 if dim % 2 == 0 else 1,
        "SPLIT": split,
    }
    return kernel("merge", "merge_parts", macros, device)


def _check(o_part: Tensor, lse2_part: Tensor, out: Tensor, lse2: Tensor | None, sinks: Tensor | None) -> None:
    if out.dtype not in DTYPES:
        raise KernelError(UNSUPPORTED, f"no merge into {out.dtype}", "out")
    parts, group = o_part.shape[:2]
    want: tuple[tuple[str, Tensor | None, tuple[int, ...], tuple[torch.dtype, ...]], ...] = (
        ("o_part", o_part, (parts, group, out.shape[2]), (torch.float32, out.dtype)),
        ("lse2_part", lse2_part, (parts, group), (torch.float32,)),
        ("out", out, tuple(out.shape), (out.dtype,)),
        ("lse2", lse2, tuple(out.shape[:2]), (torch.float32,)),
        ("sinks", sinks, tuple(out.shape[1:2]), (torch.float32,)),
    )
    for field, tensor, shape, dtypes in want:
        if tensor is None:
            continue
        if tensor.shape != shape or tensor.dtype not in dtypes or not tensor.is_contiguous():
            message = f"must be contiguous {list(shape)} {dtypes[0]}, is {list(tensor.shape)} {tensor.dtype}"
            raise KernelError(INVALID_ARGUMENT, message, field)
    if out.shape[1] % group:
        raise KernelError(
            INVALID_ARGUMENT, f"{group} heads per kv head do not divide {out.shape[1]}", "o_part"
        )


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    return tuple(
        Variant(
            "merge",
            "merge_parts",
            (
                ("DTYPE", dtype),
                ("PART_DTYPE", part),
                ("HEAD_DIM", dim),
                ("GROUP", group),
                ("VEC", 4 if dim == 128 else 2),
                ("SPLIT", split),
            ),
        )
        for dtype, part, dim, group, split in (
            (2, 0, 128, 4, 1),
            (2, 0, 128, 4, 2),
            (2, 0, 128, 8, 4),
            (2, 0, 64, 3, 1),
            (1, 0, 128, 4, 4),
            (2, 2, 128, 4, 1),
            (0, 0, 64, 2, 1),
        )
    )
