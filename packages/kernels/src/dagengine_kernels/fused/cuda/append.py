"""K and V of new tokens into pages by one launch (csrc/cuda/append.cu): norm, rotation, paged write.

Knows tensors on one CUDA device; dagengine_kernels/append.py says what is computed, in torch.
"""

from __future__ import annotations

import ctypes
import weakref

import torch
from torch import Tensor

from dagengine_kernels.fused.cuda.driver import Launch, Variant, current_stream, kernel
from dagengine_kernels.fused.cuda.params import address, packer
from dagengine_kernels.fused.cuda.vectors import HeadLayout, alignment, head_layout
from dagengine_kernels.rotary import RotaryTable, exact_rows

WARPS = 8
"""Per block."""

ENOUGH_WARPS = 132 * 64
"""Warps that keep the device busy to the end: with fewer tokens, several warps share a token's heads."""

BATCH = 1
"""Heads that a thread has under way."""

FINE = 256
"""Rows of the fine table of angles: position p is turned by rows p % FINE and FINE + p // FINE of one table."""

MANY_TOKENS = 4096
"""From this many on, what is written would not stay in L2 until it is read."""


class _Params(ctypes.Structure):
    _fields_ = (
        ("k", ctypes.c_void_p),
        ("v", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("slots", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("k_weight", ctypes.c_void_p),
        ("q", ctypes.c_void_p),
        ("q_out", ctypes.c_void_p),
        ("q_weight", ctypes.c_void_p),
        ("k_token", ctypes.c_int64),
        ("k_head", ctypes.c_int64),
        ("v_token", ctypes.c_int64),
        ("v_head", ctypes.c_int64),
        ("q_token", ctypes.c_int64),
        ("q_head", ctypes.c_int64),
        ("tokens", ctypes.c_int),
        ("kv_heads", ctypes.c_int),
        ("q_heads", ctypes.c_int),
        ("page_size", ctypes.c_int),
        ("kv_rows", ctypes.c_int),
        ("q_rows", ctypes.c_int),
        ("k_eps", ctypes.c_float),
        ("q_eps", ctypes.c_float),
    )


_PARAMS = packer(_Params)


class Appender:
    """One step's tokens, for every layer of a group.

    Args:
        slots, positions: int64 [T], contiguous, on the device; read anew by every launch. K and V of a row with a
            negative slot go nowhere.
        rotary: None stores k as it is.
        settled: as `plan_append` was told.
    """

    def __init__(
        self,
        slots: Tensor,
        positions: Tensor,
        rotary: RotaryTable | None,
        page_size: int,
        *,
        settled: bool = False,
    ) -> None:
        self._settled = settled
        self._slots, self._positions, self._rotary = slots, positions, rotary
        self._launches: dict[tuple[object, ...], tuple[Launch, int, int]] = {}
        self._layouts: dict[tuple[object, ...], HeadLayout | None] = {}
        self._table = None if rotary is None else two_tables(rotary, slots.device)
        self._given = slots.data_ptr(), positions.data_ptr(), address(self._table)
        self._sizes = len(slots), page_size
        self._device = slots.device.index

    def layout(self, k: Tensor, v: Tensor, kv_layer: Tensor, q: Tensor | None) -> HeadLayout | None:
        """How the kernel would take these tensors; None where it does not."""
        # What decides: alignments are powers of two up to 16.
        key = (
            kv_layer.dtype,
            kv_layer.shape,
            kv_layer.stride(),
            *(None if x is None else (x.dtype, x.stride(), x.data_ptr() % 16) for x in (k, v, q)),
            kv_layer.data_ptr() % 16,
        )
        if key not in self._layouts:
            self._layouts[key] = self._layout(k, v, kv_layer, q)
        return self._layouts[key]

    def _layout(self, k: Tensor, v: Tensor, kv_layer: Tensor, q: Tensor | None) -> HeadLayout | None:
        given = [k, v] if q is None else [k, v, q]
        if any(x.dtype != kv_layer.dtype or x.stride(-1) != 1 for x in given) or not kv_layer.is_contiguous():
            return None
        dim = kv_layer.shape[-1]
        aligned = alignment(*given, kv_layer.data_ptr(), dim * kv_layer.element_size())
        return head_layout(kv_layer.dtype, dim, self._rotary, aligned)

    def write(
        self,
        layout: HeadLayout,
        k: Tensor,
        v: Tensor,
        kv_layer: Tensor,
        *,
        k_weight: Tensor | None = None,
        k_eps: float = 0.0,
        q: Tensor | None = None,
        q_weight: Tensor | None = None,
        q_eps: float = 0.0,
        pdl: bool = True,
    ) -> Tensor | None:
        """Queue the launch.

        Args:
            layout: from `layout`, for these tensors.
            k, v: [T, Hkv, D]; kv_layer: [pages, 2, Hkv, page_size, D]; q: [T, Hq, D].
            k_weight, q_weight: float32 [D], contiguous.
            pdl: may be started before the kernel before it in the stream has ended.
        Returns: q [T, Hq, D], contiguous and, with a weight, normed; None without one.
        """
        tokens, kv_heads = k.shape[:2]
        out = None if q is None else torch.empty_like(q, memory_format=torch.contiguous_format)
        if tokens == 0:
            return out
        q_heads = 0 if q is None else q.shape[1]
        normed = q is not None and q_weight is not None
        key = (layout, k_weight is not None, q is not None, normed, pdl, tokens, kv_heads, q_heads)
        found = self._launches.get(key)
        if found is None:
            found = self._launches[key] = self._prepare(*key)
        launch, kv_rows, q_rows = found
        num_slots, page_size = self._sizes
        k_token, k_head, _ = k.stride()
        v_token, v_head, _ = v.stride()
        q_token, q_head, _ = (0, 0, 0) if q is None else q.stride()
        params = _PARAMS.pack(
            k.data_ptr(),
            v.data_ptr(),
            kv_layer.data_ptr(),
            *self._given,
            address(k_weight),
            address(q),
            address(out),
            address(q_weight) if normed else 0,
            k_token,
            k_head,
            v_token,
            v_head,
            q_token,
            q_head,
            num_slots,
            kv_heads,
            q_heads,
            page_size,
            kv_rows,
            q_rows,
            k_eps if k_weight is not None else 0.0,
            q_eps if q is not None else 0.0,
        )
        launch(current_stream(self._device), params)
        return out

    def _prepare(
        self,
        layout: HeadLayout,
        k_norm: bool,
        with_q: bool,
        q_norm: bool,
        pdl: bool,
        tokens: int,
        kv_heads: int,
        q_heads: int,
    ) -> tuple[Launch, int, int]:
        """A launch, and among how many warps it shares out a token's heads of K and V, and of q."""
        choices = _choices(k_norm, with_q, q_norm, tokens >= MANY_TOKENS, self._settled)
        found = kernel("append", "append", {**layout.macros(), **choices}, self._device)
        blocks = -(-tokens // (WARPS * 32 // layout.lanes))
        kv_rows = _sharing(blocks, kv_heads)
        q_rows = _sharing(blocks, q_heads) if with_q else 0
        launch = found.prepare((blocks, kv_rows + q_rows, 1), (WARPS * 32, 1, 1), 0, pdl=pdl)
        return launch, kv_rows, q_rows


_tables: weakref.WeakKeyDictionary[RotaryTable, dict[torch.device, Tensor]] = weakref.WeakKeyDictionary()


def two_tables(rotary: RotaryTable, device: torch.device) -> Tensor:
    """float32 [FINE + length / FINE rounded up, rotary_dim / 2, 2], cos and sin built in float64; made once.

    Rows FINE, FINE + 1, .. are those of the positions 0, FINE, .. and contain `attention_scaling`; the first FINE are
    those of 0, 1, .. and do not.
    """
    held = _tables.setdefault(rotary, {})
    if device not in held:
        fine = exact_rows(rotary, torch.arange(FINE), scaled=False)
        coarse = exact_rows(rotary, torch.arange(0, rotary.length, FINE), scaled=True)
        cos, sin = (torch.cat(pair) for pair in zip(fine, coarse, strict=True))
        held[device] = torch.stack((cos, sin), -1).to(device, torch.float32)
    return held[device]


def _sharing(blocks: int, heads: int) -> int:
    """Among how many warps the heads of a token are shared out."""
    return max(1, min(-(-heads // BATCH), -(-ENOUGH_WARPS // (blocks * WARPS))))


def _choices(k_norm: bool, with_q: bool, q_norm: bool, many: bool, settled: bool) -> dict[str, int]:
    norms = {"NORM_K": int(k_norm), "WITH_Q": int(with_q), "NORM_Q": int(q_norm)}
    return {**norms, "BATCH": BATCH, "STREAMING": int(many), "FINE": FINE, "SETTLED": int(settled)}


def variants() -> tuple[Variant, ...]:
    """What the compile gate builds."""
    listed = []
    for dtype, head_dim, rotary_dim, interleaved, vec, lanes, norms, q in (
        (2, 128, 128, 0, 8, 8, False, False),
        (2, 128, 128, 0, 8, 8, True, True),
        (2, 128, 128, 1, 8, 8, False, False),
        (2, 128, 128, 0, 8, 8, False, True),
        (2, 64, 64, 0, 8, 4, False, True),
        (2, 256, 64, 0, 8, 16, True, True),
        (1, 128, 128, 0, 8, 8, False, False),
        (0, 64, 64, 0, 4, 8, False, False),
        (2, 128, 0, 0, 8, 8, False, False),
    ):
        macros = {
            "DTYPE": dtype,
            "HEAD_DIM": head_dim,
            "ROTARY_DIM": rotary_dim,
            "INTERLEAVED": interleaved,
            "VEC": vec,
            "LANES": lanes,
            **_choices(norms, q, norms, not q, q),
        }
        listed.append(Variant("append", "append", tuple(macros.items())))
    return tuple(listed)
