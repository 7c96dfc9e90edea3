"""Random models of known shapes are real folders: every tensor, an index where needed, the same bits for a seed."""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dagengine import LLM, DagError, SamplingParams
from dagengine.model_files import read_model
from dagengine.shapes import SHAPES, shape_config, tensors_of, write_config, write_model
from dagengine.weights import INDEX, SafetensorsSource


@pytest.mark.parametrize(
    ("name", "parameters"), [("llama-3.1-8b", 8_030_261_248), ("qwen3-0.6b", 596_049_920)]
)
def test_a_shape_has_as_many_parameters_as_the_model_it_is_of(name: str, parameters: int) -> None:
    assert sum(prod(shape) for shape in tensors_of(shape_config(name)).values()) == parameters


def test_an_unknown_shape_is_refused_with_those_there_are() -> None:
    with pytest.raises(DagError, match=r"qwen3-0\.6b") as refused:
        shape_config("llama")
    assert refused.value.field == "shape"


@pytest.mark.parametrize("shard_bytes", [1 << 30, 100_000])
def test_a_written_model_holds_every_tensor_and_runs(tmp_path: Path, shard_bytes: int) -> None:
    folder = write_model(tmp_path / "m", SHAPES["tiny"], seed=1, device="cpu", shard_bytes=shard_bytes)
    files = sorted(folder.glob("*.safetensors"))
    assert (len(files) > 1) == (folder / INDEX).exists() == (shard_bytes < 1 << 20)
    found = {}
    for file in files:
        with safe_open(file, framework="pt") as tensors:
            found |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}
            assert len(tensors.keys()) == 1 or file.stat().st_size < shard_bytes + 10_000
    assert found == tensors_of(SHAPES["tiny"])
    if len(files) > 1:
        index = json.loads((folder / INDEX).read_text())
        assert index["metadata"]["total_size"] == 2 * sum(prod(shape) for shape in found.values())
    with LLM(folder, device="cpu", kv_pages=16) as llm:
        assert len(llm.generate([3, 4], SamplingParams(max_tokens=3, ignore_eos=True)).token_ids) == 3


def test_a_seed_decides_the_weights_whatever_the_files(tmp_path: Path) -> None:
    def embedding(name: str, seed: int, shard_bytes: int) -> torch.Tensor:
        folder = write_model(
            tmp_path / name, SHAPES["tiny"], seed=seed, device="cpu", shard_bytes=shard_bytes
        )
        source = SafetensorsSource(folder, dtype=torch.float32, device=torch.device("cpu"))
        return source.take("model.layers.1.mlp.down_proj.weight", (128, 256)).clone()

    one = embedding("a", 1, 1 << 30)
    assert torch.equal(one, embedding("b", 1, 100_000))
    assert not torch.equal(one, embedding("c", 2, 1 << 30))


def test_a_written_model_is_the_dummy_model_of_its_seed(tmp_path: Path) -> None:
    prompt, params = list(range(9)), SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
    written = write_model(tmp_path / "m", SHAPES["tiny"], seed=6, device="cpu")
    made = write_config(tmp_path / "config-alone", SHAPES["tiny"])
    with LLM(written, device="cpu", dtype="bfloat16", kv_pages=16) as llm:
        real = llm.generate(prompt, params)
    with LLM(made, device="cpu", dtype="bfloat16", kv_pages=16, load_format="dummy", seed=6) as llm:
        dummy = llm.generate(prompt, params)
    assert real.token_ids == dummy.token_ids


def test_weights_are_never_written_over(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "m", SHAPES["tiny"], seed=1, device="cpu")
    with pytest.raises(DagError, match="another folder"):
        write_model(folder, SHAPES["tiny"], seed=2, device="cpu")


def test_the_configuration_is_one_that_the_engine_reads(tmp_path: Path) -> None:
    for name, config in SHAPES.items():
        files = read_model(write_config(tmp_path / name, config))
        assert files.eos_token_ids == (config["eos_token_id"],)
        assert files.geometry.dtype == "bfloat16"
