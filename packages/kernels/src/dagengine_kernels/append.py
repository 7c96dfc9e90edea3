"""Writing new tokens into pages. Knows slots and positions; not who owns a page.

    slot = page * page_size + row          K goes to kv_layer[page, 0, :, row], V to kv_layer[page, 1, :, row]
    slot < 0                               nowhere: the row pads a batch

K is normed (where a model norms its heads) and rotated in float32 at its stored position by tables built in
float64, rounded once to the pages' dtype and never rewritten. V is stored as it comes.

On a CUDA device one launch does it all (fused/cuda/append.py), on a CPU one native call (fused/append_cpu.py);
`AppendPlan.implementation` says what runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused import native
from dagengine_kernels.fused.append_cpu import CpuAppender
from dagengine_kernels.fused.cuda import driver
from dagengine_kernels.fused.cuda.append import Appender
from dagengine_kernels.rotary import RotaryTable, check_head_dim, expand_rows, turn


@dataclass(frozen=True, eq=False)
class HeadNorm:
    """RMS norm over the elements of a head, x * weight / sqrt(mean(x^2) + eps), in float32 and rounded once.

    Attributes:
        weight: float32 [D].
        eps: added to the mean square.
    """

    weight: Tensor
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, H, D] normed, in float32 (float64 where x is)."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight.to(x.dtype)


@dataclass(frozen=True, eq=False)
class AppendPlan:
    """Where one step's tokens go, for every layer of a group; made by `plan_append`.

    Attributes:
        positions, slots: int64 [T]. On a CUDA device they may be buffers that are overwritten between replays of a
            captured graph; a plan that is captured is made in the capture, since torch's path keeps what it derives.
        rotary: None for layers without positions.
        page_size: tokens per page.
        settled: as `plan_append` was told.
    """

    positions: Tensor
    slots: Tensor
    rotary: RotaryTable | None
    page_size: int
    settled: bool = False

    @cached_property
    def implementation(self) -> str:
        """What `write` runs: ``cuda`` or ``cpu`` (for what they take: see there) or ``torch``."""
        if self.slots.is_cuda:
            return "cuda" if driver.unavailable() is None else "torch"
        return "cpu" if self.slots.device.type == "cpu" and native.why_missing() is None else "torch"

    def write(
        self,
        k: Tensor,
        v: Tensor,
        kv_layer: Tensor,
        *,
        k_norm: HeadNorm | None = None,
        q: Tensor | None = None,
        q_norm: HeadNorm | None = None,
    ) -> Tensor | None:
        """Norm and rotate k and write k and v into the pages, in place; norm q on the way, or make it contiguous.

        The kernel takes float32, bfloat16 and float16 in one dtype with the pages and heads of up to 512 contiguous
        elements (interleaved pairs of even alignment); torch writes anything else. Rows whose slot is negative are not
        written; their q is normed like any other.

        Args:
            k, v: [T, Hkv, D].
            kv_layer: [pages, 2, Hkv, page_size, D].
            k_norm: applied to k before its rotation.
            q: [T, Hq, D], for attention, which wants it contiguous; q_norm: applied to it. It is not rotated.
        Returns: q in its dtype, normed if it has a norm, contiguous; None without one.
        Raises: KernelError (invalid_argument).
        """
        shapes = k.shape, v.shape, kv_layer.shape, None if q is None else q.shape
        if shapes not in self._checked:
            self._check(k, v, kv_layer, q)
            self._checked.add(shapes)
        if k_norm is not None or q_norm is not None:
            self._check_norms(k, q, k_norm, q_norm)
        if self.implementation == "cuda":
            layout = self._appender.layout(k, v, kv_layer, q)
            if layout is not None:
                return self._appender.write(
                    layout,
                    k,
                    v,
                    kv_layer,
                    k_weight=None if k_norm is None else k_norm.weight,
                    k_eps=0.0 if k_norm is None else k_norm.eps,
                    q=q,
                    q_weight=None if q_norm is None else q_norm.weight,
                    q_eps=0.0 if q_norm is None else q_norm.eps,
                )
        if self.implementation == "cpu" and self._cpu_appender.takes(k, v, kv_layer):
            weight, eps = (None, 0.0) if k_norm is None else (k_norm.weight, k_norm.eps)
            self._cpu_appender.write(k, v, kv_layer, k_weight=weight, k_eps=eps)
            return _for_attention(q, q_norm)
        if k_norm is not None:
            k = k_norm(k)
        if self.rotary is not None and self._turning is not None:
            k = turn(k, *self._turning, self.rotary.rotary_dim, self.rotary.pairing)
        self._put(k.to(kv_layer.dtype), v.to(kv_layer.dtype), kv_layer.permute(0, 3, 1, 2, 4))
        return _for_attention(q, q_norm)

    def _check(self, k: Tensor, v: Tensor, kv_layer: Tensor, q: Tensor | None) -> None:
        tokens = len(self.slots)
        if k.shape != v.shape or k.shape[0] != tokens or k.shape[1:] != kv_layer.shape[2::2]:
            want = [tokens, kv_layer.shape[2], kv_layer.shape[4]]
            message = f"k and v must be {want}, are {[*k.shape]}, {[*v.shape]}"
            raise KernelError(INVALID_ARGUMENT, message, "k")
        if kv_layer.shape[3] != self.page_size:
            message = f"has {kv_layer.shape[3]} tokens per page, the plan {self.page_size}"
            raise KernelError(INVALID_ARGUMENT, message, "kv_layer")
        if self.rotary is not None:
            check_head_dim(self.rotary, k.shape[-1])
        if q is not None and (q.ndim != 3 or len(q) != tokens or q.shape[2] != k.shape[2]):
            message = f"must be [{tokens}, Hq, {k.shape[2]}], is {[*q.shape]}"
            raise KernelError(INVALID_ARGUMENT, message, "q")

    def _check_norms(
        self, k: Tensor, q: Tensor | None, k_norm: HeadNorm | None, q_norm: HeadNorm | None
    ) -> None:
        if q is None and q_norm is not None:
            raise KernelError(INVALID_ARGUMENT, "q_norm comes with the q that it is for", "q")
        for field, norm in (("k_norm", k_norm), ("q_norm", q_norm)):
            if norm is None:
                continue
            weight = norm.weight
            if weight.shape != k.shape[2:] or weight.dtype != torch.float32 or not weight.is_contiguous():
                message = f"its weight must be float32 [{k.shape[2]}], is {weight.dtype} {[*weight.shape]}"
                raise KernelError(INVALID_ARGUMENT, message, field)

    @cached_property
    def _checked(self) -> set[tuple[torch.Size | None, ...]]:
        """Shapes of tensors that fit."""
        return set()

    @cached_property
    def _appender(self) -> Appender:
        slots, positions = (x.to(torch.int64).contiguous() for x in (self.slots, self.positions))
        return Appender(slots, positions, self.rotary, self.page_size, settled=self.settled)

    @cached_property
    def _cpu_appender(self) -> CpuAppender:
        slots, positions = (x.to(torch.int64).contiguous() for x in (self.slots, self.positions))
        return CpuAppender(slots, positions, self.rotary, self.page_size)

    def _put(self, k: Tensor, v: Tensor, by_token: Tensor) -> None:
        """Write k and v into [pages, page_size, 2, Hkv, D].

        A row that is not written puts what another row puts, at the same place; where none is written, what is there.
        So nothing depends on how many are: on a CUDA device asking that would wait for it, and could not be captured.
        """
        page, row, source, some = self._places
        if source is not None and some is not None:
            held = by_token[page, row]
            k = torch.where(some, k[source], held[:, 0])
            v = torch.where(some, v[source], held[:, 1])
        by_token[page, row, 0] = k
        by_token[page, row, 1] = v

    @cached_property
    def _places(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Page and row of each token; where rows may be left out also whose K and V it puts, and whether any does."""
        slots, source, some = self.slots, None, None
        if slots.numel() and (slots.is_cuda or bool((slots < 0).any())):
            written = slots >= 0
            some = written.any()
            source = torch.where(
                written, torch.arange(len(slots), device=slots.device), written.int().argmax()
            )
            slots = slots[source].clamp_min(0)
        return slots // self.page_size, slots % self.page_size, source, some

    @cached_property
    def _turning(self) -> tuple[Tensor, Tensor] | None:
        if self.rotary is None:
            return None
        return expand_rows(*self.rotary.rows(self.positions), self.rotary.pairing)


def _for_attention(q: Tensor | None, norm: HeadNorm | None) -> Tensor | None:
    if q is None:
        return None
    return q.contiguous() if norm is None else norm(q).to(q.dtype)


def plan_append(
    positions: Tensor,
    slots: Tensor,
    rotary: RotaryTable | None,
    page_size: int,
    *,
    settled: bool = False,
) -> AppendPlan:
    """Prepare once per step what `AppendPlan.write` needs in every layer.

    Args:
        positions: int64 [T] stored positions, in [0, rotary.length).
        slots: int64 [T], page * page_size + row, distinct; negative ones are passed over.
        settled: a promise that both were complete when the last kernel that waits for all before it started: they are
            read while the kernel before `write` ends.
    Raises: KernelError (invalid_argument).
    """
    if positions.shape != slots.shape or positions.ndim != 1:
        message = f"positions {[*positions.shape]} and slots {[*slots.shape]} must both be [T]"
        raise KernelError(INVALID_ARGUMENT, message, "slots")
    return AppendPlan(positions, slots, rotary, page_size, settled)


def append_kv(
    k: Tensor, v: Tensor, positions: Tensor, slots: Tensor, rotary: RotaryTable | None, kv_layer: Tensor
) -> None:
    """`plan_append` and `AppendPlan.write` in one call.

    Args:
        k: [T, Hkv, D] unrotated, after any qk-norm; v: [T, Hkv, D].
        positions: int64 [T] stored positions.
        slots: int64 [T], page * page_size + row, distinct; negative ones are passed over.
        rotary: None stores k as it is.
        kv_layer: [pages, 2, Hkv, page_size, D], written in place.
    Raises: KernelError (invalid_argument).
    """
    plan_append(positions, slots, rotary, kv_layer.shape[3]).write(k, v, kv_layer)


def empty_pages(
    num_pages: int,
    num_kv_heads: int,
    page_size: int,
    head_dim: int,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The pages of one layer, [pages, 2, Hkv, page_size, D], zeroed."""
    return torch.zeros(num_pages, 2, num_kv_heads, page_size, head_dim, dtype=dtype, device=device)
