"""Engine logits against the dense walk in float64, over random graphs."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from devices import DEVICES, on_gpu
from torch import Tensor

from dagengine.request import ContextRef
from dagengine_core_graph import Inherit

from .dense_walk import DenseLlama, DenseWalk
from .driver import Driver, request
from .graphs import POLICIES, Node, random_plan, run_at_once, run_by_state

BAR = 1e-4
BACKENDS = ("reference", "packed", "segmented", "naive", "fused")
PAGE_SIZES = (1, 3, 16)
PLACES = [("cpu", backend, page_size) for backend in BACKENDS for page_size in PAGE_SIZES]
PLACES += [
    on_gpu("cuda", backend, page_size)
    for backend in ("reference", "packed", "segmented")
    for page_size in PAGE_SIZES
]
PLACES += [on_gpu("cuda", backend, 16) for backend in ("naive", "fused")]
NOTICED = [("cpu", backend, 3) for backend in BACKENDS]
NOTICED += [on_gpu("cuda", backend, 16 if backend == "fused" else 3) for backend in BACKENDS]


def largest_difference(
    plan: list[Node],
    tokens: dict[str, tuple[int, ...]],
    logits: dict[str, dict[int, Tensor]],
    model: DenseLlama,
) -> float:
    """Max |engine logit - dense logit| over every sampled position of the graph."""
    walk = DenseWalk(model)
    worst, compared = 0.0, 0
    for node in plan:
        expected = walk.add(
            node.name,
            [ref.reference() for ref in node.refs],
            tokens[node.name],
            policy=node.policy,
            own_start=node.options.get("own_start"),
            spans=node.spans(),
        )
        assert len(logits.get(node.name, {})) == node.max_tokens
        for offset, found in logits.get(node.name, {}).items():
            worst = max(worst, float((found.double() - expected[offset]).abs().max()))
            compared += 1
    assert compared > 0
    return worst


@pytest.mark.parametrize(("device", "backend", "page_size"), PLACES)
@pytest.mark.parametrize("policy", [*POLICIES, None], ids=[*POLICIES, "mixed"])
def test_logits_are_the_dense_walks(
    tiny_folder: Path,
    tiny_dense: DenseLlama,
    policy: str | None,
    device: str,
    backend: str,
    page_size: int,
) -> None:
    driver = Driver(
        tiny_folder,
        device=device,
        page_size=page_size,
        attention_backend=backend,
        kv_pages=1200 // page_size,
    )
    worst = 0.0
    for seed in range(4):
        plan = random_plan(1000 * page_size + seed, policy=policy)
        tokens = (run_at_once if seed % 2 else run_by_state)(driver, plan)
        worst = max(worst, largest_difference(plan, tokens, driver.logits, tiny_dense))
        driver.logits.clear()
    print(f"max |delta logit| = {worst:.2e}")
    assert worst <= BAR
    driver.release_all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("overlap", [False, True])
def test_logits_are_the_dense_walks_when_backends_change_along_a_path(
    tiny_folder: Path, tiny_dense: DenseLlama, overlap: bool, device: str
) -> None:
    driver = Driver(tiny_folder, device=device, page_size=3, kv_pages=400, overlap=overlap)
    for seed in range(4):
        plan = random_plan(seed, backends=BACKENDS)
        tokens = run_at_once(driver, plan) if seed % 2 else run_by_state(driver, plan)
        assert largest_difference(plan, tokens, driver.logits, tiny_dense) <= BAR
        driver.logits.clear()


@pytest.mark.parametrize(("device", "backend", "page_size"), NOTICED)
def test_the_comparison_would_notice_one_token_or_one_position(
    tiny_folder: Path, tiny_dense: DenseLlama, device: str, backend: str, page_size: int
) -> None:
    driver = Driver(tiny_folder, device=device, page_size=page_size, kv_pages=200, attention_backend=backend)
    walk = DenseWalk(tiny_dense)
    texts = {"a": [5, 17, 33, 2, 90], "b": [8, 8, 41, 77], "c": [60, 61, 62, 63, 64, 65, 66]}
    refs = []
    for name, text in texts.items():
        walk.add(name, [], text)
        refs.append(ContextRef(state=driver.choice(request(name, text)).dag.state))
    driver.choice(request("q", [11, 12, 13], 1, context=refs))
    found = driver.logits["q"][2].double()

    seen, views = walk.views([Inherit(name) for name in texts], "linear")

    def difference(seen: list, views: list[int], own_start: int) -> float:
        logits, _ = walk.encode([11, 12, 13], seen, views, own_start)
        return float((found - logits[2]).abs().max())

    assert difference(seen, views, len(seen)) <= BAR
    for missing in range(len(seen)):
        rest = [i for i in range(len(seen)) if i != missing]
        assert difference([seen[i] for i in rest], [views[i] for i in rest], len(seen)) > 10 * BAR
    for (_, begin), moved in itertools.product(enumerate((0, 5, 9)), (-1, 1)):
        shifted = [view + moved if begin <= i < begin + 4 else view for i, view in enumerate(views)]
        assert difference(seen, shifted, len(seen)) > 10 * BAR
