"""What this card can do at best, measured in the same run: copy, pure read, bf16 matmul. Knows torch and Triton only.

copy    bytes read + written per second by a device-to-device copy of 4 GiB
read    bytes per second by a Triton kernel that reads 4 GiB and keeps one number per block
matmul  operations per second of an 8192 x 8192 x 8192 bf16 product of random numbers
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

import torch

from bench import kernels_timing

SIDE = 8192


@dataclass(frozen=True)
class Ceilings:
    """Bytes per second and operations per second, medians; and the samples as microseconds per call."""

    copy: float
    read: float
    matmul: float
    samples: dict[str, list[float]]

    def floor_us(self, num_bytes: int, flops: int) -> float:
        """The larger of the time to read the bytes and the time of the operations."""
        return max(num_bytes / self.read, flops / self.matmul) * 1e6


def measure(memory: torch.Tensor, replays: int = 9) -> Ceilings:
    """Measure on the device of `memory`, a random bf16 vector of at least 8 GiB that is read and written over.

    Its first half is copied onto its second half.
    """
    half = memory.numel() // 2
    source, target = memory[:half], memory[half : 2 * half]
    from bench import kernels_streams as streams

    width, per_block = 2048, 16
    words, target_words = source.view(torch.int32), target.view(torch.int32)
    blocks = words.numel() // (width * per_block)
    out = torch.empty(blocks, dtype=torch.int32, device=memory.device)
    a, b = (memory[i * SIDE * SIDE : (i + 1) * SIDE * SIDE].view(SIDE, SIDE) for i in (0, 1))
    product = torch.empty_like(a)

    def copy() -> None:
        streams.copy[(blocks,)](words, target_words, per_block, width, num_warps=8)

    def torch_copy() -> None:
        target.copy_(source)

    def read() -> None:
        streams.read[(blocks,)](words, out, per_block, width, num_warps=8)

    def matmul() -> None:
        torch.matmul(a, b, out=product)

    captured = {name: kernels_timing.capture([f], 1) for name, f in (("copy", copy), ("read", read))}
    kernels_timing.race(captured, replays)
    captured["matmul"] = kernels_timing.capture([matmul], 1)
    kernels_timing.race({"matmul": captured["matmul"]}, replays)
    samples = {name: c.samples for name, c in captured.items()}
    samples["torch's copy"] = kernels_timing.eager(torch_copy, replays)
    seconds = {name: median(values) * 1e-6 for name, values in samples.items()}
    words_read = blocks * width * per_block * 4
    return Ceilings(
        copy=max(2 * words_read / seconds["copy"], 2 * source.nbytes / seconds["torch's copy"]),
        read=words_read / seconds["read"],
        matmul=2 * SIDE**3 / seconds["matmul"],
        samples=samples,
    )
