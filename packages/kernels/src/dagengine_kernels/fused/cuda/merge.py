"""Partial results of a plan into outputs by one launch (csrc/cuda/merge.cu); the definition is lse.py's.

Knows a plan's merge lists and tensors on one CUDA device; not what made the parts.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused.cuda.driver import Kernel, Launch, Variant, current_stream, kernel
from dagengine_kernels.fused.cuda.params import address, packer
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
        ordered: one warp adds a row's parts in their order, and parts with lse2 = -inf leave no trace in the bits;
            `split` is then 1.
    """

    rows: Tensor
    indptr: Tensor
    parts: Tensor
    split: int | None = None
    ordered: bool = False

    @classmethod
    def load(cls, arrays: PlanArrays, device: torch.device) -> MergeLists:
        """A copy of the lists of `arrays` on `device`."""
        lists = (arrays.merge_rows, arrays.merge_indptr, arrays.merge_parts)
        return cls(*(torch.from_numpy(x).to(device) for x in lists))


_PARAMS = packer(_Params)


class Merge:
    """The launches of `merge_parts` with the same lists, of at least one row, and the same partial results.

    Args:
        lists, o_part, lse2_part, pdl: as there.
        dtype, num_heads: of out.
    """

    def __init__(
        self,
        lists: MergeLists,
        o_part: Tensor,
        lse2_part: Tensor,
        dtype: torch.dtype,
        num_heads: int,
        *,
        pdl: bool = True,
    ) -> None:
        self.lists, self._parts = lists, (o_part, lse2_part)
        self._dtype, self._pdl = dtype, pdl
        self._addresses = tuple(
            x.data_ptr() for x in (o_part, lse2_part, lists.rows, lists.indptr, lists.parts)
        )
        self._sizes = len(lists.rows), num_heads // o_part.shape[1]

    @cached_property
    def _launch(self) -> Launch:
        lists, (o_part, _) = self.lists, self._parts
        num_rows, (_, group, dim) = len(lists.rows), o_part.shape
        split = 1 if lists.ordered else lists.split or split_of(len(lists.parts), num_rows)
        found = _kernel(self._dtype, o_part.dtype, dim, group, split, lists.ordered, o_part.device.index)
        grid = (-(-num_rows * group * split // WARPS), 1, 1)
        return found.prepare(grid, (WARPS * 32, 1, 1), 0, pdl=self._pdl)

    def __call__(self, out: Tensor, lse2: Tensor | None, sinks: Tensor | None, stream: int) -> None:
        """Queue one; the tensors are as `merge_parts` takes them."""
        params = _PARAMS.pack(*self._addresses, out.data_ptr(), address(lse2), address(sinks), *self._sizes)
        self._launch(stream, params)


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
    _check(o_part, lse2_part, out, lse2, sinks)
    if len(lists.rows) == 0:
        return
    if stream is None:
        stream = current_stream(out.device.index)
    Merge(lists, o_part, lse2_part, out.dtype, out.shape[1], pdl=pdl)(out, lse2, sinks, stream)


def split_of(num_parts: int, num_rows: int) -> int:
    """How many warps share a row where `num_rows` rows have `num_parts` parts in all."""
    average = num_parts / num_rows
    return 1 if average <= FEW_PARTS else 2 if average <= 2 * FEW_PARTS else 4


@functools.cache
def _kernel(
    dtype: torch.dtype, part_dtype: torch.dtype, dim: int, group: int, split: int, ordered: bool, device: int
) -> Kernel:
    macros = {
        "DTYPE": DTYPES[dtype],
        "PART_DTYPE": DTYPES[part_dtype],
        "HEAD_DIM": dim,
        "GROUP": group,
        "VEC": 4 if dim % 128 == 0 else 2 if dim % 2 == 0 else 1,
        "SPLIT": split,
        "ORDERED": int(ordered),
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
                ("ORDERED", ordered),
            ),
        )
        for dtype, part, dim, group, split, ordered in (
            (2, 0, 128, 4, 1, 0),
            (2, 0, 128, 4, 1, 1),
            (2, 0, 128, 4, 2, 0),
            (2, 0, 128, 8, 4, 0),
            (2, 0, 64, 3, 1, 0),
            (2, 0, 64, 3, 1, 1),
            (1, 0, 128, 4, 4, 0),
            (2, 2, 128, 4, 1, 0),
            (0, 0, 64, 2, 1, 0),
        )
    )
