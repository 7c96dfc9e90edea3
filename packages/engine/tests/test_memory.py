"""How large the pool is, by what was asked for and what the memory holds."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dagengine import DagError, EngineConfig, memory
from dagengine.build import build_core
from dagengine.memory import host_memory_left, num_host_pages, num_pages, page_bytes, step_reserve
from dagengine.model_files import read_model
from dagengine_positions import ModelGeometry

GIB = 2**30
PAGE = 2 * 2 * 8 * 2 * 4 * 64  # K and V, two heads of 8, two layers, float32, 64 tokens


@pytest.fixture
def geometry(model_folder: Path) -> ModelGeometry:
    return read_model(model_folder).geometry


def pages(geometry: ModelGeometry, device: str, memory: tuple[int, int] | None, **options: Any) -> int:
    return num_pages(geometry, EngineConfig(**options).on(device), torch.float32, 1 << 30, memory)


def test_defaults_are_the_devices() -> None:
    cpu, gpu = EngineConfig().on("cpu"), EngineConfig().on("cuda")
    assert (cpu.max_num_seqs, cpu.max_num_batched_tokens) == (64, 512)
    assert (gpu.max_num_seqs, gpu.max_num_batched_tokens) == (256, 8192)
    assert EngineConfig(max_num_seqs=3, max_num_batched_tokens=5).on("cuda").max_num_seqs == 3


def test_a_page_is_what_its_keys_and_values_take(geometry: ModelGeometry) -> None:
    assert page_bytes(geometry, 64, torch.float32) == PAGE
    assert page_bytes(geometry, 64, torch.bfloat16) == PAGE // 2


def test_on_a_cpu_the_pool_is_two_gib_or_what_was_asked_for(geometry: ModelGeometry) -> None:
    assert pages(geometry, "cpu", None) == 2 * GIB // PAGE
    assert pages(geometry, "cpu", None, kv_memory_gib=0.5) == GIB // 2 // PAGE
    assert pages(geometry, "cpu", None, kv_pages=7) == 7


def test_on_a_gpu_the_pool_is_what_the_fraction_leaves(geometry: ModelGeometry) -> None:
    config = EngineConfig().on("cuda")
    reserve = step_reserve(geometry, config, torch.float32, 1 << 30)
    free, total = 60 * GIB, 100 * GIB
    assert pages(geometry, "cuda", (free, total)) == (90 * GIB - 40 * GIB - reserve) // PAGE
    half = pages(geometry, "cuda", (free, total), gpu_memory_utilization=0.5)
    assert half == (50 * GIB - 40 * GIB - reserve) // PAGE
    assert pages(geometry, "cuda", (free, total), kv_memory_gib=3) == 3 * GIB // PAGE
    assert pages(geometry, "cuda", (free, total), kv_pages=9) == 9


def test_the_reserve_grows_with_the_step(geometry: ModelGeometry) -> None:
    config = EngineConfig().on("cuda")

    def reserve(of: EngineConfig, max_model_len: int = 20_000) -> int:
        return step_reserve(geometry, of, torch.bfloat16, max_model_len)

    base = reserve(config)
    tokens = reserve(replace(config, max_num_batched_tokens=2 * 8192))
    rows = reserve(replace(config, max_num_seqs=512))
    per_row = 4 * 32 + 2 * (4 + 2 * 2) * 8 + 2 * 4 * 8 + 3 * 48
    assert tokens - base == 8192 * 2 * per_row
    assert rows - base == 256 * 20 * geometry.vocab_size
    invariant = replace(config, batch_invariant=True)
    assert reserve(invariant, 4096) == base
    assert reserve(invariant) - base == 4 * 8192 * 4 * (8 + 1) * 5


def test_a_pool_is_never_larger_than_what_all_sequences_fill(geometry: ModelGeometry) -> None:
    config = EngineConfig(max_num_seqs=2).on("cpu")
    assert num_pages(geometry, config, torch.float32, 100) == 2 * 2


def test_no_room_for_a_page_names_the_option(geometry: ModelGeometry) -> None:
    with pytest.raises(DagError) as refused:
        pages(geometry, "cuda", (GIB, 100 * GIB))
    assert (refused.value.code, refused.value.field) == ("capacity", "gpu_memory_utilization")
    assert "99.0 GiB are taken" in refused.value.message
    with pytest.raises(DagError) as refused:
        pages(geometry, "cpu", None, kv_memory_gib=1e-9)
    assert refused.value.field == "kv_memory_gib"


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"kv_pages": 4, "kv_memory_gib": 1.0}, "kv_memory_gib"),
        ({"kv_pages": 4, "gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({"kv_memory_gib": 1.0, "gpu_memory_utilization": 0.5}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 0}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": 1.01}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization"),
        ({"kv_memory_gib": -1}, "kv_memory_gib"),
        ({"enforce_eager": 1}, "enforce_eager"),
        ({"batch_invariant": "yes"}, "batch_invariant"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
    ],
)
def test_a_pool_is_sized_one_way_and_options_are_checked(options: dict[str, Any], field: str) -> None:
    with pytest.raises(DagError) as refused:
        EngineConfig(**options)
    assert (refused.value.code, refused.value.field) == ("invalid_request", field)


@pytest.mark.parametrize(
    ("options", "code", "field"),
    [
        ({"gpu_memory_utilization": 0.5}, "invalid_request", "gpu_memory_utilization"),
        ({"batch_invariant": True, "kv_pages": 8}, "unsupported", "batch_invariant"),
    ],
)
def test_what_a_cpu_cannot_do_is_refused_before_weights_are_loaded(
    model_folder: Path, options: dict[str, Any], code: str, field: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dagengine.build.DummySource", None)
    with pytest.raises(DagError) as refused:
        build_core(model_folder, EngineConfig(device="cpu", load_format="dummy", **options))
    assert (refused.value.code, refused.value.field) == (code, field)


def test_what_was_decided_is_in_the_cores_configuration(model_folder: Path) -> None:
    config = EngineConfig(device="cpu", load_format="dummy", kv_memory_gib=0.001, enforce_eager=True)
    found = build_core(model_folder, config).config
    assert (found.device, found.dtype, found.enforce_eager) == ("cpu", "float32", True)
    assert (found.kv_pages, found.kv_memory_gib) == (int(0.001 * GIB) // PAGE, None)
    assert (found.max_num_seqs, found.max_num_batched_tokens) == (64, 512)


def test_the_host_tier_is_what_was_asked_for(
    geometry: ModelGeometry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def host_pages(**options: Any) -> int:
        return num_host_pages(geometry, EngineConfig(**options), torch.float32)

    def refused(gib: float) -> tuple[str, str | None]:
        with pytest.raises(DagError) as error:
            host_pages(cpu_kv_gib=gib)
        return error.value.code, error.value.field

    monkeypatch.setattr(memory, "host_memory_left", lambda: 2 * GIB)
    assert host_pages() == host_pages(cpu_kv_gib=0) == 0
    assert host_pages(cpu_kv_gib=1.5) == int(1.5 * GIB) // PAGE
    assert refused(1e-9) == ("invalid_request", "cpu_kv_gib")
    assert refused(2.5) == ("capacity", "cpu_kv_gib")
    for wrong in (-1, True, "1", float("nan")):
        assert refused(wrong) == ("invalid_request", "cpu_kv_gib")


def test_memory_left_is_the_least_of_the_machines_and_the_groups(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    assert host_memory_left(meminfo, cgroup) is None
    meminfo.write_text("MemTotal:       64 kB\nMemAvailable:       48 kB\n")
    assert host_memory_left(meminfo, cgroup) == 48 << 10
    cgroup.mkdir()
    (cgroup / "memory.current").write_text("1000\n")
    (cgroup / "memory.max").write_text("max\n")
    assert host_memory_left(meminfo, cgroup) == 48 << 10
    (cgroup / "memory.max").write_text("5000\n")
    assert host_memory_left(meminfo, cgroup) == 4000


def test_a_full_page_cache_leaves_the_groups_memory(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4999\n")
    (tmp_path / "memory.stat").write_text("anon 900\nfile 4000\ninactive_file 3500\nactive_file 500\n")
    assert host_memory_left(tmp_path / "none", tmp_path) == 3501


def test_an_eviction_policy_that_is_not_there_is_refused(model_folder: Path) -> None:
    with pytest.raises(DagError) as error:
        build_core(model_folder, EngineConfig(load_format="dummy", kv_pages=4, eviction="nope"))
    assert (error.value.code, error.value.field) == ("plugin_not_found", "eviction")
