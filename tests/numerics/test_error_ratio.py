"""Fused attention in 16 bits: how far the logits are from float64, beside the same model in ordinary attention.

                   ‖ logits with fused attention    − logits in float64 ‖
    error ratio =  ───────────────────────────────────────────────────────     over all sampled tokens of random graphs
                   ‖ logits with ordinary attention − logits in float64 ‖

Ordinary attention is the backend `reference`: it brings every K to where it is seen, attends densely in float64 and
rounds the result to 16 bits once. Whatever else happens is the same code: weights, products, norms, KV rounded into its
pages. No attention that reads 16-bit pages and writes 16 bits is much nearer to float64, so the bar is, if anything,
too strict. The float64 is the dense walk over the same weights, widened. Sampled tokens are forced, so that all three
see the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import on_gpu
from torch import Tensor

from dagengine.request import Request
from dagengine.sampling import SamplingParams
from dagengine_kernels.backend import Plan
from dagengine_kernels.reference import ReferenceBackend

from .dense_walk import DenseLlama, DenseWalk
from .driver import TINY, Driver, LoadedModel, save_tiny_llama
from .graphs import Node, random_plan, run_by_state

BAR = 1.25
MARGIN = 100.0
SEEDS = range(4)
SIZES = {"hidden_size": 256, "intermediate_size": 384, "num_hidden_layers": 3, "vocab_size": 320}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}


@dataclass(frozen=True)
class Shape:
    """A model of the shapes that the fused kernels for a GPU take."""

    head_dim: int
    heads: int
    kv_heads: int
    window: int | None = None
    family: Mapping[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        heads = {"num_attention_heads": self.heads, "num_key_value_heads": self.kv_heads}
        return TINY | SIZES | heads | {"head_dim": self.head_dim} | dict(self.family or {})


SHAPES = {
    "64, four to one": Shape(64, 4, 1),
    "64, no groups": Shape(64, 4, 4),
    "128, four to one": Shape(128, 4, 1),
    "128, two to one, qk-norm": Shape(128, 4, 2, family=QWEN3),
    "64, window": Shape(64, 4, 1, window=20),
    "128, window, qk-norm": Shape(128, 4, 4, window=33, family=QWEN3),
}
PLACES = [pytest.param("cpu", torch.bfloat16, 16, marks=pytest.mark.slow)]
PLACES += [
    on_gpu("cuda", dtype, page_size) for dtype in (torch.bfloat16, torch.float16) for page_size in (16, 64)
]


class Models:
    """One model in 16 bits on a device, and in float64."""

    def __init__(self, folder: Path, shape: Shape, device: str, dtype: torch.dtype) -> None:
        tensors = save_tiny_llama(folder, seed=31, dtype=dtype, **shape.config)
        self.loaded = LoadedModel(folder, device, dtype, window=shape.window)
        self.dense = DenseLlama(shape.config, tensors, window=shape.window)

    def driver(self, backend: str, page_size: int) -> Driver:
        return Driver(self.loaded, attention_backend=backend, page_size=page_size, kv_pages=3000 // page_size)


@dataclass
class Errors:
    """Sums of squares of what `seen` differs from the truth by, and of the truth itself."""

    error: float = 0.0
    truth: float = 0.0

    def add(self, seen: Tensor, truth: Tensor) -> None:
        assert seen.isfinite().all()
        self.error += float((seen.double() - truth).square().sum())
        self.truth += float(truth.square().sum())

    @property
    def relative(self) -> float:
        return (self.error / self.truth) ** 0.5


def forced(plan: list[Node]) -> list[Node]:
    """The plan as a driver runs it: every node samples one token of its own over and over."""
    return [_Forced(**vars(node)) for node in plan]


@dataclass(frozen=True)
class _Forced(Node):
    @property
    def token(self) -> int:
        return self.input_ids[-1]

    def request(self, *arguments: Any, **options: Any) -> Request:
        asked = super().request(*arguments, **options)
        if asked.sampling is None:
            return asked
        bias: SamplingParams = replace(asked.sampling, logit_bias={self.token: MARGIN})
        return replace(asked, sampling=bias)


def plans() -> list[list[Node]]:
    """Graphs whose contexts are longer than a page of 64 tokens."""
    found = [random_plan(700 + seed, size=8, vocab=SIZES["vocab_size"], longest=70) for seed in SEEDS]
    return [forced(plan) for plan in found]


def measure(models: Models, *drivers: Driver) -> list[float]:
    """The relative error of each driver, over every sampled token of every graph."""
    errors = [Errors() for _ in drivers]
    for plan in plans():
        tokens = []
        for driver in drivers:
            driver.logits.clear()
            tokens.append(run_by_state(driver, plan))
        assert all(other == tokens[0] for other in tokens), "a token was not forced"
        walk = DenseWalk(models.dense)
        for node in plan:
            truth = walk.add(
                node.name,
                [ref.reference() for ref in node.refs],
                tokens[0][node.name],
                policy=node.policy,
                own_start=node.options.get("own_start"),
                spans=node.spans(),
            )
            for driver, sums in zip(drivers, errors, strict=True):
                found = driver.logits.get(node.name, {})
                assert len(found) == node.max_tokens
                for offset, seen in found.items():
                    sums.add(seen, truth[offset])
    for driver in drivers:
        driver.release_all()
    return [sums.relative for sums in errors]


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize(("device", "dtype", "page_size"), PLACES)
def test_fused_attention_errs_hardly_more_than_ordinary_attention(
    tmp_path: Path, shape: Shape, device: str, dtype: torch.dtype, page_size: int
) -> None:
    models = Models(tmp_path, shape, device, dtype)
    fused, ordinary = models.driver("fused", page_size), models.driver("reference", page_size)
    have, want = measure(models, fused, ordinary)
    ran = fused.core._backend("fused").implementation
    print(f"{ran}: {have:.2e} / {want:.2e} = {have / want:.3f}")
    assert ran.startswith(f"fused-{device}")
    assert 0 < want < 0.1
    assert have / want <= BAR


def test_the_ratio_would_notice_queries_of_fewer_bits(tmp_path: Path) -> None:
    models = Models(tmp_path, SHAPES["64, four to one"], "cpu", torch.bfloat16)
    ordinary, coarse = models.driver("reference", 16), models.driver("reference", 16)
    coarse.core._backends["reference"] = CoarseBackend()
    want, have = measure(models, ordinary, coarse)
    print(f"{have / want:.2f}")
    assert have / want > BAR


class CoarseBackend(ReferenceBackend):
    """Queries are rounded to 4 bits, half of what bfloat16 has."""

    def run(self, plan: Plan, layer: int, q: Tensor, kv_layer: Tensor, **options: Any) -> Any:
        return super().run(plan, layer, q.to(torch.float8_e4m3fn).to(q.dtype), kv_layer, **options)
