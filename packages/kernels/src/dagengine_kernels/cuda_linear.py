"""A layer's product with a half or bfloat16 weight on a CUDA device, with what stands around it. Knows no models.

    y = act(norm(x) W + b) + residual        act: the identity, or silu(gate) * up of a gated layer

    rows of x                     product                                  norm                    gate
    few (`FEW_ROWS`)              gemv.cu, at the speed of the weight      inside                  inside
    up to 64 (`STREAMED_ROWS`)    streamed.cu, for capability 9.0          norm.cu                 inside
    more                          cuBLAS through torch                     norm.cu                 gate.cu
    many (`GATED_ROWS`), gated    gated.cu where its tiles are `BUSY`, for  norm.cu                 inside
                                  capability 9.0 and y of x's dtype
                                  without bias and residual
    1 .. 16, batch_invariant      skinny.cu                                up to 8 rows inside     inside
    more, batch_invariant         tiled.cu, with skinny.cu's bits          norm.cu                 inside

Sums are in float32; torch lets cuBLAS round parts of them to half or bfloat16 unless the caller forbids it
(`torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`). A normed x is rounded to the weight's dtype, and
y once, the residual included; only cuBLAS's products of a gated layer are rounded before the gate as well. With
`batch_invariant` a row's bits depend neither on the number of rows nor on its place among them; that costs up to four
times cuBLAS's time (`tools/bench/linear`). The RMS norm is that of Zhang and Sennrich, 2019; the gate that of Shazeer,
2020.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dagengine_kernels.errors import INVALID_ARGUMENT, UNSUPPORTED, KernelError
from dagengine_kernels.fused import native
from dagengine_kernels.fused.cuda import gate, gemv, skinny, streamed, tiled
from dagengine_kernels.fused.cuda import gated as gated_product
from dagengine_kernels.fused.cuda import norm as rms
from dagengine_kernels.fused.cuda.products import STEP, Layer, Product

DEVICE = "cuda"
DTYPES = (torch.float16, torch.bfloat16)

CAPABILITIES = (9, 10)
"""Of devices that have bulk copies and 227 KiB of shared memory per block."""

FEW_ROWS = {"gated": 0, "normed": 1, "plain": 2}
"""Up to this many rows gemv.cu is the fastest in a model's step, for a gated layer, another one with a norm, and one
without: alone, a gated layer of one row takes as long either way."""

STREAMED_ROWS = {"gated": 64, "normed": 64, "plain": 64}
"""Of more rows, up to this many are streamed.cu's; cuBLAS and the launches around it win from the next on."""

GATED_ROWS = 1024
"""From so many rows on a gated layer is gated.cu's where its layout is BUSY: 1 to 18 % sooner than cuBLAS and gate.cu,
and up to a third later where it is not."""

BUSY = 0.85
"""Part of the rows and outputs of all rounds that is there."""

KEPT_ROWS = 64
"""Up to this many rows a layer's launches are prepared once for each number of them."""

_Way = tuple[Product | None, bool]
"""What multiplies, None for cuBLAS; and whether it takes x before the norm."""


class CudaLinear:
    """One layer. Threads may share it: what a call prepares for the next ones is never written again.

    Args:
        weight: half or bfloat16 [out, in] on a CUDA device, the layout of checkpoints; of a gated layer [2 * out, in],
            the gate's rows first. Held, not copied, if its rows are contiguous and a multiple of 64 long.
        bias: [out], or [2 * out].
        norm: [in], the weight of the norm that x goes through; None for no norm.
        eps: of the norm.
        gated: whether y = silu(gate) * up.
        batch_invariant: whether a row's bits are to be the same in every batch.
        over_residual: whether y may be written over the residual, which saves cuBLAS a copy of it.
        few_rows: up to how many rows gemv.cu is used if x fits, at most gemv.MAX_ROWS; by default those of FEW_ROWS.
            Without effect if `batch_invariant`.
        streamed_rows: up to how many rows streamed.cu is used where gemv.cu is not, at most streamed.MAX_ROWS; by
            default those of STREAMED_ROWS. Without effect if `batch_invariant`, and on devices of another capability
            than 9.0.
        gated_rows: from how many rows on gated.cu is used, more than KEPT_ROWS; by default GATED_ROWS. Without effect
            where gated.cu is not for the layer or the device, or its tiles would not be BUSY, and if `batch_invariant`.
    Raises: KernelError (invalid_argument, or capability_missing where `unavailable` says why).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        batch_invariant: bool = False,
        over_residual: bool = False,
        few_rows: int | None = None,
        streamed_rows: int | None = None,
        gated_rows: int = GATED_ROWS,
    ) -> None:
        if weight.ndim != 2 or weight.dtype not in DTYPES or weight.device.type != DEVICE:
            raise KernelError(
                INVALID_ARGUMENT, "must be half or bfloat16 [out, in] on a CUDA device", "weight"
            )
        reason = self.unavailable(weight)
        if reason is not None:
            raise KernelError(UNSUPPORTED, reason, "weight")
        rows, self.num_inputs = weight.shape
        if not rows or not self.num_inputs or (gated and rows % 2):
            message = (
                f"must have inputs and outputs{', an even number,' if gated else ''} not {[*weight.shape]}"
            )
            raise KernelError(INVALID_ARGUMENT, message, "weight")
        for name, vector, size in (("bias", bias, rows), ("norm", norm, self.num_inputs)):
            if vector is not None and (vector.shape != (size,) or vector.device != weight.device):
                message = f"must be [{size}] on {weight.device}, is {[*vector.shape]} on {vector.device}"
                raise KernelError(INVALID_ARGUMENT, message, name)
        if norm is not None and self.num_inputs > rms.MAX_INPUTS:
            message = f"is of at most {rms.MAX_INPUTS} inputs, not {self.num_inputs}"
            raise KernelError(INVALID_ARGUMENT, message, "norm")
        kind = "gated" if gated else "plain" if norm is None else "normed"
        few_rows = FEW_ROWS[kind] if few_rows is None else few_rows
        streamed_rows = STREAMED_ROWS[kind] if streamed_rows is None else streamed_rows
        for name, given, most in (
            ("few_rows", few_rows, gemv.MAX_ROWS),
            ("streamed_rows", streamed_rows, streamed.MAX_ROWS),
        ):
            if not 0 <= given <= most:
                raise KernelError(INVALID_ARGUMENT, f"must be 0 to {most}, is {given}", name)
        if gated_rows <= KEPT_ROWS:
            raise KernelError(INVALID_ARGUMENT, f"must be over {KEPT_ROWS}, is {gated_rows}", "gated_rows")
        self.num_outputs = rows // 2 if gated else rows
        self._few_rows = few_rows
        capability = torch.cuda.get_device_capability(weight.device)
        self._streamed_rows = streamed_rows if capability == streamed.CAPABILITY else 0
        self._gated_rows = None
        if gated and bias is None and capability == gated_product.CAPABILITY:
            self._gated_rows = gated_rows
        self._over_residual = over_residual
        self.batch_invariant = batch_invariant
        self._layer = Layer(
            weight=_padded(weight, STEP).contiguous(),
            num_inputs=self.num_inputs,
            num_outputs=self.num_outputs,
            gated=gated,
            bias=None if bias is None else bias.to(torch.float32).contiguous(),
            norm=None if norm is None else _padded(norm.to(torch.float32), 8),
            eps=eps,
        )
        self._device = weight.device
        self._norm = None
        if self._layer.norm is not None:
            self._norm = rms.Norm(self._layer.norm, eps, inputs=self.num_inputs)
        self._transposed = self._layer.weight[:, : self.num_inputs].t()
        self._whole_row = (self.num_inputs, 1) if self.num_inputs % 8 == 0 else None
        self._products: dict[tuple[int, torch.dtype], _Way] = {}
        self._tiled: dict[tuple[tiled.Tile, torch.dtype], tiled.Tiled] = {}
        exact = bias is None or bias.dtype == weight.dtype
        self._bias = bias.contiguous() if bias is not None and exact else None
        self._bias_is_exact = exact
        self._sms = torch.cuda.get_device_properties(weight.device).multi_processor_count

    @staticmethod
    def unavailable(weight: Tensor) -> str | None:
        """Why a layer of this weight cannot be made in this installation; None if it can."""
        if weight.device.type != "cuda" or weight.dtype not in DTYPES:
            return f"takes half and bfloat16 on a CUDA device, not {weight.dtype} on {weight.device}"
        capability = torch.cuda.get_device_capability(weight.device)
        if capability[0] not in CAPABILITIES:
            return "needs compute capability 9.x or 10.x, this device has {}.{}".format(*capability)
        return native.why_missing()

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """y [T, out] of x [T, in], queued on the current stream.

        Args:
            x: in the weight's dtype, on its device.
            residual: [T, out] in y's dtype, added before the rounding; not to be read any more after a call of a layer
                made with `over_residual`.
            dtype: of y, x's own or float32; x's own by default.
        Raises: KernelError (invalid_argument).
        """
        dtype = dtype or x.dtype
        shape = x.shape
        rows = shape[0]
        if x.dtype != self._layer.weight.dtype or x.device != self._device:
            message = f"must be {self._layer.weight.dtype} on {self._device}, is {x.dtype} on {x.device}"
            raise KernelError(INVALID_ARGUMENT, message, "x")
        if shape != (rows, self.num_inputs):
            raise KernelError(INVALID_ARGUMENT, f"must be [T, {self.num_inputs}], is {[*shape]}", "x")
        if dtype not in (x.dtype, torch.float32):
            raise KernelError(INVALID_ARGUMENT, f"is {x.dtype} or float32, not {dtype}", "dtype")
        if residual is not None:
            right = residual.shape == (rows, self.num_outputs) and residual.dtype == dtype
            if not right or residual.device != self._device:
                message = (
                    f"must be {dtype} {[rows, self.num_outputs]} on {x.device}, "
                    f"is {residual.dtype} {[*residual.shape]} on {residual.device}"
                )
                raise KernelError(INVALID_ARGUMENT, message, "residual")
            if residual.stride(1) != 1:
                residual = residual.contiguous()
        if rows == 0:
            return torch.empty(0, self.num_outputs, dtype=dtype, device=x.device)
        product, norms = self._products.get((rows, dtype)) or self._way(rows, dtype, residual is None)
        if product is None:
            return self._by_cublas(self._normed(x), residual, dtype)
        y = torch.empty(rows, self.num_outputs, dtype=dtype, device=self._device)
        product(self._aligned(x) if norms else self._normed(x), residual, y)
        return y

    def _way(self, rows: int, dtype: torch.dtype, alone: bool) -> _Way:
        """What multiplies so many rows into y of `dtype`, `alone` without a residual; kept for up to KEPT_ROWS."""
        found = self._invariant(rows, dtype) if self.batch_invariant else self._fastest(rows, dtype, alone)
        if rows <= KEPT_ROWS:
            self._products[rows, dtype] = found
        return found

    def _fastest(self, rows: int, dtype: torch.dtype, alone: bool) -> _Way:
        layer = self._layer
        given = (rows, self.num_inputs, self.num_outputs, layer.gated, self._sms)
        few = gemv.layout(*given) if rows <= self._few_rows else None
        if few is not None:
            return gemv.Gemv(layer, few, dtype, norm=layer.norm is not None), True
        many = streamed.layout(*given) if rows <= self._streamed_rows else None
        if many is not None:
            return streamed.Streamed(layer, many, dtype), False
        if (
            self._gated_rows is not None
            and rows >= self._gated_rows
            and alone
            and dtype == layer.weight.dtype
        ):
            chosen = gated_product.layout(rows, self.num_inputs, self.num_outputs, self._sms)
            if chosen is not None and chosen.busy >= BUSY:
                return gated_product.Gated(layer, chosen), False
        return None, False

    def _invariant(self, rows: int, dtype: torch.dtype) -> _Way:
        """By the kernels that share an order of sums."""
        layer = self._layer
        for inside in (True, False) if layer.norm is not None else (False,):
            chosen = skinny.layout(rows, self.num_inputs, self.num_outputs, layer.gated, inside, self._sms)
            if chosen is not None:
                return skinny.Skinny(layer, chosen, dtype, norm=inside), inside
        tile = tiled.tile_for(rows, len(layer.weight), self._sms)
        if (tile, dtype) not in self._tiled:
            self._tiled[tile, dtype] = tiled.Tiled(layer, tile, dtype)
        return self._tiled[tile, dtype], False

    def _aligned(self, x: Tensor) -> Tensor:
        """x as the kernels take it."""
        if x.stride() == self._whole_row and x.data_ptr() % 16 == 0:
            return x
        return _padded(x, 8)

    def _normed(self, x: Tensor) -> Tensor:
        """x through the norm, if any, as the kernels take it."""
        x = self._aligned(x)
        return x if self._norm is None else self._norm(x)

    def _by_cublas(self, x: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
        layer, weight = self._layer, self._transposed
        if x.shape[1] != self.num_inputs:
            x = x[:, : self.num_inputs]
        rounded_twice = residual is not None and (layer.gated or layer.bias is not None)
        if dtype != x.dtype or not self._bias_is_exact or rounded_twice:
            y = torch.mm(x, weight, out_dtype=torch.float32)
            if layer.bias is not None:
                y += layer.bias
            if layer.gated:
                gates, up = y.chunk(2, dim=-1)
                y = F.silu(gates).mul_(up)
            if residual is not None:
                y += residual
            return y.to(dtype)
        if residual is not None:
            if self._over_residual and _apart(residual, x):
                return residual.addmm_(x, weight)
            return torch.addmm(residual, x, weight)
        y = torch.mm(x, weight) if self._bias is None else torch.addmm(self._bias, x, weight)
        return gate.silu_mul(y) if layer.gated else y


def _apart(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors lie in memory that was allocated apart."""
    return a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def _padded(tensor: Tensor, multiple: int) -> Tensor:
    """`tensor` with zeros to a multiple of `multiple` on its last axis, and rows at multiples of 16 bytes, apart."""
    short = -tensor.shape[-1] % multiple
    if short:
        return F.pad(tensor, (0, short))
    size = tensor.element_size()
    aligned = all(stride * size % 16 == 0 for stride in tensor.stride()[:-1]) and tensor.data_ptr() % 16 == 0
    if tensor.ndim == 2 and tensor.shape[0] > 1 and tensor.stride(0) < tensor.shape[1]:
        aligned = False
    return (
        tensor if tensor.stride(-1) == 1 and aligned else tensor.clone(memory_format=torch.contiguous_format)
    )
