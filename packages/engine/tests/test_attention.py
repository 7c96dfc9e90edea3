"""Which backend `auto` stands for, that what runs is said, and that one that cannot run is refused at the start."""

import logging

import pytest

from dagengine.build import build_core
from dagengine.config import EngineConfig
from dagengine.errors import DagError
from dagengine_kernels import KernelError
from dagengine_kernels.errors import UNSUPPORTED
from dagengine_kernels.fused import native
from dagengine_kernels.fused.backend import FusedBackend

SMALL = {"device": "cpu", "load_format": "dummy", "seed": 1, "page_size": 4, "kv_pages": 64}


def core(folder, **options):
    return build_core(folder, EngineConfig(**SMALL, **options))


@pytest.mark.skipif(bool(native.why_missing()), reason="the kernels' compiled part is missing")
def test_auto_is_fused_where_it_runs_and_the_log_says_what_that_is(model_folder, caplog):
    with caplog.at_level(logging.INFO, "dagengine"):
        found = core(model_folder)
    assert found.default_backend == "fused"
    assert found.attention.implementation.startswith("fused-cpu-")
    assert (
        f"attention backend fused ({found.attention.implementation}): the fastest on cpu" in caplog.messages
    )


def test_auto_is_segmented_where_fused_does_not_run_and_says_why(model_folder, monkeypatch):
    monkeypatch.setattr(native, "why_missing", lambda: "no compiler was found")
    found = core(model_folder)
    assert found.default_backend == "segmented"
    assert "fused cannot run" in found.attention.reason
    assert "no compiler was found" in found.attention.reason


def test_auto_is_segmented_for_a_dtype_that_fused_does_not_take(model_folder):
    found = core(model_folder, dtype="float64")
    assert found.default_backend == "segmented"
    assert "float64" in found.attention.reason


def test_a_backend_that_cannot_run_the_model_is_refused_at_the_start(model_folder):
    with pytest.raises(DagError) as refused:
        core(model_folder, dtype="float64", attention_backend="fused")
    assert refused.value.code == "capability_missing"
    assert "float64" in refused.value.message


def test_auto_without_any_backend_names_every_reason(model_folder, monkeypatch):
    def refuse(self, *args, **kwargs):
        raise KernelError(UNSUPPORTED, "not today")

    monkeypatch.setattr(FusedBackend, "plan", refuse)
    monkeypatch.setattr("dagengine_kernels.segmented.SegmentedBackend.plan", refuse)
    with pytest.raises(DagError) as refused:
        core(model_folder)
    assert refused.value.field == "attention_backend"
    assert "fused cannot run" in refused.value.message
    assert "segmented cannot run" in refused.value.message


def test_auto_does_not_hide_a_mistake(model_folder, monkeypatch):
    monkeypatch.setenv("DAGENGINE_CPU_ISA", "nonsense")
    with pytest.raises(DagError, match="nonsense"):
        core(model_folder)


def test_an_asked_for_backend_is_taken(model_folder):
    found = core(model_folder, attention_backend="segmented")
    assert (found.default_backend, found.attention.reason) == ("segmented", "asked for")
    assert found.attention.implementation == "torch-cpu-flash"
