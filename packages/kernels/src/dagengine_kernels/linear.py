"""A layer's product with a bfloat16 weight on the CPU, with what stands around it. Knows tensors; no models, no names.

    y = act(norm(x) W + b) + residual        act: the identity, or silu(gate) * up of a gated layer

The weight is packed once, in the order in which a step reads it, and widened to float32 in registers: sums are in
float32, in the order of the inputs, and rounded once. A row's result is the same bits in every batch, and for every
number of threads. The RMS norm is that of Zhang and Sennrich, 2019; the gate that of Shazeer, 2020.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dagengine_kernels.errors import INVALID_ARGUMENT, KernelError
from dagengine_kernels.fused import native

DTYPES = {torch.float32: 0, torch.bfloat16: 1}
"""As attend_cpu.h numbers them."""


class PackedLinear:
    """One layer.

    Args:
        weight: bfloat16 [out, in] on the CPU; of a gated layer [2 * out, in], the gate's rows first.
        bias: [out], or [2 * out].
        norm: [in], the weight of the norm that x goes through; None for no norm.
        eps: of the norm.
        gated: whether y = silu(gate) * up.
        isa: "avx512", "avx2" or "portable"; None takes the widest that the machine has.
    Raises: KernelError (invalid_argument, or capability_missing without the native module).
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        norm: Tensor | None = None,
        eps: float = 0.0,
        gated: bool = False,
        isa: str | None = None,
    ) -> None:
        linear = native.load().linear
        if weight.ndim != 2 or weight.dtype != torch.bfloat16 or weight.device.type != "cpu":
            raise KernelError(INVALID_ARGUMENT, "must be bfloat16 [out, in] on the CPU", "weight")
        rows, self.num_inputs = weight.shape
        if not rows or not self.num_inputs or (gated and rows % 2):
            message = (
                f"must have inputs and outputs{', an even number,' if gated else ''} not {[*weight.shape]}"
            )
            raise KernelError(INVALID_ARGUMENT, message, "weight")
        for name, vector, size in (("bias", bias, rows), ("norm", norm, self.num_inputs)):
            if vector is not None and vector.shape != (size,):
                raise KernelError(INVALID_ARGUMENT, f"must be [{size}], is {[*vector.shape]}", name)
        isas = linear.isas()
        if isa is not None and isa not in isas:
            raise KernelError(INVALID_ARGUMENT, f"this machine runs {', '.join(isas)}, not {isa!r}", "isa")
        self.isa = isa or isas[0]
        self.num_outputs = rows // 2 if gated else rows
        weight = weight.contiguous()
        bias, norm = (None if t is None else t.to(torch.float32).contiguous() for t in (bias, norm))
        self._native = linear.PackedLinear(
            weight.data_ptr(), rows, self.num_inputs, gated, _address(bias), _address(norm), eps, self.isa
        )

    @staticmethod
    def unavailable() -> str | None:
        """Why there are no packed layers in this installation; None if there are."""
        return native.why_missing()

    def __call__(
        self, x: Tensor, residual: Tensor | None = None, *, dtype: torch.dtype | None = None
    ) -> Tensor:
        """y [T, out] of x [T, in].

        Args:
            x: float32 or bfloat16.
            residual: [T, out] in y's dtype, added before the rounding.
            dtype: of y, float32 or bfloat16; x's own by default.
        Raises: KernelError (invalid_argument).
        """
        dtype = dtype or x.dtype
        rows = len(x)
        if x.dtype not in DTYPES or dtype not in DTYPES:
            raise KernelError(INVALID_ARGUMENT, f"takes float32 and bfloat16, not {x.dtype}, {dtype}", "x")
        if x.shape != (rows, self.num_inputs):
            raise KernelError(INVALID_ARGUMENT, f"must be [T, {self.num_inputs}], is {[*x.shape]}", "x")
        if x.stride(1) != 1:
            x = x.contiguous()
        residual_row = 0
        if residual is not None:
            if residual.shape != (rows, self.num_outputs) or residual.dtype != dtype:
                message = (
                    f"must be {dtype} {[rows, self.num_outputs]}, is {residual.dtype} {[*residual.shape]}"
                )
                raise KernelError(INVALID_ARGUMENT, message, "residual")
            if residual.stride(1) != 1:
                residual = residual.contiguous()
            residual_row = residual.stride(0)
        y = torch.empty(rows, self.num_outputs, dtype=dtype)
        self._native.run(
            x.data_ptr(),
            x.stride(0),
            DTYPES[x.dtype],
            rows,
            _address(residual),
            residual_row,
            y.data_ptr(),
            self.num_outputs,
            DTYPES[dtype],
            torch.get_num_threads(),
        )
        return y


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()
