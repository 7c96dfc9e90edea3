"""Where a model runs: what is asked for or refused, what `auto` takes and why. GPUs are pretended where none is."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from dagengine import LLM, DagError, EngineConfig, SamplingParams, devices
from dagengine.build import build_core
from dagengine.devices import describe, place, use_device
from dagengine.model_files import read_model
from dagengine.weights import SafetensorsSource

SMALL: dict[str, Any] = {"load_format": "dummy", "seed": 1, "page_size": 4, "kv_pages": 64}


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two GPUs that can be named, and not used."""
    monkeypatch.setattr(devices, "why_no_cuda", lambda: None)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)


def placed(folder: Path, checkpoint: str | None = "bfloat16", **options: Any) -> devices.Placement:
    return place(EngineConfig(**options), read_model(folder).geometry, checkpoint)


@pytest.mark.parametrize(
    "name", ["gpu", "cuda:", "cuda:-1", "cuda:01", "cuda:1 ", "CPU", "mps", "", 0, None, "cpu:0"]
)
def test_a_name_that_is_no_device_is_refused(name: Any) -> None:
    with pytest.raises(DagError) as refused:
        EngineConfig(device=name)
    assert (refused.value.code, refused.value.field) == ("invalid_request", "device")
    assert "cuda:N" in refused.value.message


@pytest.mark.parametrize("name", ["cuda", "cuda:0"])
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(model_folder: Path, name: str) -> None:
    with pytest.raises(DagError) as refused:
        LLM(model_folder, device=name, **SMALL)
    assert (refused.value.code, refused.value.field) == ("unsupported", "device")
    assert "CUDA" in refused.value.message


def test_auto_is_the_cpu_without_a_gpu_and_the_log_says_why(
    model_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, "dagengine"):
        core = build_core(model_folder, EngineConfig(**SMALL))
    assert (core.config.device, core.config.dtype) == ("cpu", "float32")
    assert f"device cpu: {devices.why_no_cuda()}" in caplog.messages


@pytest.mark.usefixtures("two_gpus")
def test_a_gpu_is_counted(model_folder: Path) -> None:
    assert placed(model_folder, device="cuda").device == torch.device("cuda:1")
    assert placed(model_folder, device="cuda:0").device == torch.device("cuda:0")
    with pytest.raises(DagError) as refused:
        placed(model_folder, device="cuda:2")
    assert (refused.value.code, refused.value.field) == ("invalid_request", "device")
    assert "cuda:0 to cuda:1" in refused.value.message


@pytest.mark.usefixtures("two_gpus")
def test_auto_is_the_gpu_iff_a_backend_runs_there(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(devices, "_refusal", lambda *_: None)
    assert placed(model_folder).device == torch.device("cuda:1")
    monkeypatch.setattr(devices, "_refusal", lambda *_: "too old a card")
    found = placed(model_folder)
    assert found.device == torch.device("cpu") and found.dtype == torch.float32
    assert "too old a card" in found.reason


def test_a_backend_is_tried_without_weights(model_folder: Path) -> None:
    geometry, cpu = read_model(model_folder).geometry, torch.device("cpu")
    good = devices.Placement(cpu, torch.float32, "")
    assert devices._refusal(EngineConfig(attention_backend="segmented"), geometry, good) is None
    double = devices.Placement(cpu, torch.float64, "")
    refused = devices._refusal(EngineConfig(attention_backend="fused"), geometry, double)
    assert refused is not None and "float64" in refused
    with pytest.raises(DagError, match="did you mean 'fused'"):
        devices._refusal(EngineConfig(attention_backend="fusd"), geometry, good)


@pytest.mark.usefixtures("two_gpus")
def test_dtype_auto_is_the_checkpoints_on_a_gpu_and_float32_on_a_cpu(model_folder: Path) -> None:
    assert placed(model_folder, "float16", device="cuda").dtype == torch.float16
    assert placed(model_folder, "float32", device="cuda").dtype == torch.float32
    assert placed(model_folder, None, device="cuda").dtype == torch.float32
    assert placed(model_folder, "float16", device="cpu").dtype == torch.float32
    assert placed(model_folder, "float16", device="cpu", dtype="bfloat16").dtype == torch.bfloat16
    assert placed(model_folder, "float16", device="cuda", dtype="float32").dtype == torch.float32


def test_a_cpu_is_described_by_others_and_needs_no_making_current() -> None:
    use_device(torch.device("cpu"))
    assert describe(torch.device("cpu")) == ("", {})


def test_without_text_there_is_no_tokenizer(model_folder: Path) -> None:
    core = build_core(model_folder, EngineConfig(**SMALL), text=False)
    with LLM(core=core) as llm:
        assert llm.tokenizer is None
        assert len(llm.generate([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True)).token_ids) == 2
        with pytest.raises(DagError, match="token ids"):
            llm.generate("text", max_tokens=1)


def test_a_chat_template_is_refused_where_no_tokenizer_would_use_it(
    model_folder: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(model_folder, bare)
    (bare / "tokenizer.json").unlink()
    for folder, text in ((model_folder, False), (bare, True)):
        with pytest.raises(DagError) as refused:
            build_core(folder, EngineConfig(**SMALL), chat_template="{{ messages }}", text=text)
        assert (refused.value.code, refused.value.field) == ("unsupported", "chat_template")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_model_runs_on_a_gpu_from_a_folder_and_fills_the_card_as_told(tmp_path: Path) -> None:
    from dagengine.shapes import SHAPES, write_model

    folder = write_model(tmp_path / "m", SHAPES["tiny"], seed=3, device="cuda")
    config = EngineConfig(
        device="cuda", gpu_memory_utilization=0.5, max_num_seqs=4, max_num_batched_tokens=64
    )
    core = build_core(folder, config)
    assert core.config.dtype == "bfloat16"
    assert core.attention.device.type == "cuda"
    with LLM(core=core) as llm:
        answer = llm.generate(list(range(20)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert len(answer.token_ids) == 8
    core = build_core(
        folder, EngineConfig(device="cuda:0", dtype="float32", kv_pages=64, attention_backend="segmented")
    )
    with LLM(core=core) as llm:
        wide = llm.generate(list(range(20)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    with LLM(folder, device="cpu", kv_pages=64) as llm:
        host = llm.generate(list(range(20)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True))
    assert wide.token_ids == host.token_ids


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_stream_to_a_gpu_and_arrive_as_they_are(tmp_path: Path, dtype: torch.dtype) -> None:
    from safetensors.torch import save_file

    tensors = {f"t{i}": torch.randn(300 + i, 40000, dtype=torch.bfloat16) for i in range(4)}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({}))
    device = torch.device("cuda", torch.cuda.current_device())
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    source = SafetensorsSource(tmp_path, dtype=dtype, device=device)
    fused = source.take_fused(["t0", "t1", "t2"], [(300 + i, 40000) for i in range(3)])
    alone = source.take("t3", (303, 40000))
    source.finish()
    assert torch.equal(fused.cpu(), torch.cat([tensors[f"t{i}"] for i in range(3)]).to(dtype))
    assert torch.equal(alone.cpu(), tensors["t3"].to(dtype))
    assert torch.cuda.max_memory_allocated(device) - before <= fused.nbytes + alone.nbytes + (80 << 20)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_engines_thread_uses_the_gpu_of_its_model(tmp_path: Path) -> None:
    from dagengine.shapes import SHAPES, write_model

    folder = write_model(tmp_path / "m", SHAPES["tiny"], seed=3, device="cpu")
    with LLM(folder, device="cuda:1", kv_pages=64) as llm:
        assert len(llm.generate([1, 2, 3], max_tokens=4, temperature=0.0, ignore_eos=True).token_ids) == 4
        assert llm.engine.call(lambda core: torch.cuda.current_device()).result() == 1


def test_why_there_is_no_gpu_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.version, "cuda", None)
    assert devices.why_no_cuda() == "this torch was built without CUDA"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert devices.why_no_cuda() == "torch finds no CUDA device"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert devices.why_no_cuda() is None
