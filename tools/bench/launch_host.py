"""What a step that is launched kernel by kernel costs the host, by part, over a driver that does nothing.

    PYTHONPATH=tools python -m bench.launch_host

The kernels' launches of one decoder layer, and the layer with the model's code around them, in microseconds of CPU at
several numbers of rows. What runs is the product but for the driver's own calls and the compiler; tensors are the
CPU's, whose allocations cost less than a device's.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import pstats
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import patch

import torch

from dagengine.cuda_runner import CudaRunner
from dagengine.models.llama import LlamaForCausalLM
from dagengine.weights import DummySource
from dagengine_kernels import AppendPlan, SegmentTable, SequenceSegments, cuda_linear, plan_append
from dagengine_kernels.cuda_linear import CudaLinear
from dagengine_kernels.fused.backend import FusedBackend
from dagengine_kernels.fused.cuda import driver, norm
from dagengine_kernels.fused.cuda.attend import CudaExecutor
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import geometry_from_config

CPU = torch.device("cpu")
PAGE_SIZE = 64
NUM_PAGES = 64
SMS = 132
LAYERS = 8
BLOCK = 40
"""Calls that are timed at once; the least counts, since others use the machine too."""

HEADS, KV_HEADS, HEAD_DIM = 8, 2, 128
HIDDEN, INNER = 512, 1024
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "vocab_size": 64,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}


class NoFunction:
    """A loaded kernel whose launches do nothing."""

    def __init__(self, name: str) -> None:
        self.name = name

    def launch(self, *given: object) -> None:
        pass


class NoModule:
    def __init__(self, cubin: bytes, device: int) -> None:
        pass

    def function(self, name: str) -> NoFunction:
        return NoFunction(name)


NO_DRIVER = SimpleNamespace(
    CudaError=RuntimeError, Module=NoModule, tensor_map=lambda *given: bytes(128), driver_version=lambda: 0
)


@contextmanager
def without_device() -> Iterator[None]:
    """Tensors of the CPU pass for a device's, and no launch does anything."""
    with ExitStack() as stack:
        for target, name, value in (
            (driver, "_native", lambda: NO_DRIVER),
            (driver, "cubin", lambda *given: b""),
            (driver, "unavailable", lambda: None),
            (driver, "_kernels", {}),
            (driver, "_modules", {}),
            (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
            (norm, "DEVICE", "cpu"),
            (cuda_linear, "DEVICE", "cpu"),
            (torch.cuda, "current_device", lambda: 0),
            (torch.cuda, "get_device_capability", lambda device=None: (9, 0)),
            (torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=SMS)),
            (AppendPlan, "implementation", "cuda"),
            (CudaLinear, "unavailable", staticmethod(lambda weight: None)),
            (CudaExecutor, "unavailable", classmethod(lambda cls, device: None)),
            (CudaExecutor, "capabilities", replace(CudaExecutor.capabilities, devices=("cpu",))),
        ):
            stack.enter_context(patch.object(target, name, value, create=name.startswith("_cuda")))
        yield


class Parts:
    """A model of LAYERS layers and one step of `rows` rows behind NUM_PAGES // 2 pages."""

    def __init__(self, rows: int, batch_invariant: bool) -> None:
        geometry = geometry_from_config(MODEL)
        source = DummySource(7, dtype=torch.bfloat16, device=CPU, tied=False)
        model = LlamaForCausalLM.load(geometry, source, batch_invariant=batch_invariant)
        arena = TorchArena(LAYERS, NUM_PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, torch.bfloat16)
        self.runner = CudaRunner(model, geometry, arena, max_positions=8192, device=CPU, enforce_eager=True)
        self.backend = FusedBackend("cuda", batch_invariant=batch_invariant)
        ((_, shape, rotary),) = self.runner._groups
        begin = NUM_PAGES // 2 * PAGE_SIZE
        pages = begin // PAGE_SIZE + -(-rows // PAGE_SIZE)
        extents = [(page, 0, PAGE_SIZE, page * PAGE_SIZE, 0) for page in range(pages)]
        table = SegmentTable.from_sequences(
            [SequenceSegments(begin, rows, extents, 0)], page_size=PAGE_SIZE, num_pages=NUM_PAGES
        )
        slot = self.backend.new_slot(CPU)
        self.plan = self.backend.plan(table, shape, rotary, device=CPU, dtype=torch.bfloat16, slot=slot)
        positions = torch.arange(begin, begin + rows)
        self.append = plan_append(positions, positions, rotary, PAGE_SIZE)
        self.positions, self.ids = positions, torch.zeros(rows, dtype=torch.int64)
        self.kv = arena.layer(0)
        self.x = torch.zeros(rows, HIDDEN, dtype=torch.bfloat16)
        self.inner = torch.zeros(rows, INNER, dtype=torch.bfloat16)
        self.heads = torch.zeros(rows, HEADS, HEAD_DIM, dtype=torch.bfloat16)
        joined = torch.zeros(rows, HEADS + 2 * KV_HEADS, HEAD_DIM, dtype=torch.bfloat16)
        self.q, self.k, self.v = joined.split([HEADS, KV_HEADS, KV_HEADS], dim=1)

    def listed(self) -> dict[str, Callable[[], object]]:
        """What is timed, by name."""
        layer = self.runner.model.layers[0]
        attention, mlp, x = layer.attention, layer.mlp, self.x
        mixed = self.heads.view(len(x), -1)
        return {
            "qkv": lambda: attention.qkv(x),
            "append": lambda: self.append.write(self.k, self.v, self.kv, q=self.q),
            "attend": lambda: self.backend.run(self.plan, 0, self.heads, self.kv),
            "out": lambda: attention.out(mixed, x),
            "gate up": lambda: mlp.gate_up(x),
            "down": lambda: mlp.down(self.inner, x),
            "layer": self.layers,
        }

    def layers(self) -> None:
        """All layers, as a step runs them."""
        self.runner._layers(self.ids, self.positions, self.positions, [self.plan], self.backend)


@torch.inference_mode()
def measure(rows: int, repeats: int, batch_invariant: bool) -> dict[str, float]:
    """Microseconds of each part: the least mean of a block."""
    found = {}
    for name, call in Parts(rows, batch_invariant).listed().items():
        count = BLOCK if name != "layer" else BLOCK // LAYERS
        call()
        means = []
        for _ in range(repeats // BLOCK):
            began = time.thread_time()
            for _ in range(count):
                call()
            means.append((time.thread_time() - began) / count * 1e6)
        found[name] = min(means) / (LAYERS if name == "layer" else 1)
    return found


@torch.inference_mode()
def profile(rows: int, repeats: int, batch_invariant: bool, most: int) -> None:
    parts = Parts(rows, batch_invariant)
    parts.layers()
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(repeats // LAYERS):
        parts.layers()
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(most)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=4000)
    parser.add_argument("--rows", type=int, action="append")
    parser.add_argument("--batch-invariant", action="store_true")
    parser.add_argument("--profile", type=int, metavar="N", help="the N costliest functions, by own time")
    chosen = parser.parse_args()
    gc.disable()
    with without_device():
        for index, rows in enumerate(chosen.rows or (1, 8, 32, 64)):
            if chosen.profile:
                profile(rows, chosen.repeats, chosen.batch_invariant, chosen.profile)
                continue
            found = measure(rows, chosen.repeats, chosen.batch_invariant)
            if not index:
                print("rows", *(f"{name:>8}" for name in found), " µs")
            print(f"{rows:4}", *(f"{took:8.1f}" for took in found.values()))


if __name__ == "__main__":
    main()
