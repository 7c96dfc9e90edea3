"""The RMS norm and the gate of many rows on a CUDA device."""

from dagengine_kernels.fused.cuda.gate import silu_mul
from dagengine_kernels.fused.cuda.norm import rms_norm, takes

__all__ = ["rms_norm", "silu_mul", "takes"]
