"""Model folders of well-known shapes with seeded random weights, for speed runs: real ones, as the Hub has them.

A shape is a `config.json`. Which tensors it takes is asked of the model class, so nothing about them is written here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from dagengine_positions import geometry_from_config

from .devices import DTYPES, find_device
from .errors import DagError
from .models.registry import model_class
from .weights import INDEX, SINGLE, DummySource, fused_shape

SHARD_BYTES = 2 << 30

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 128000,
        "eos_token_id": 128001,
    },
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 151643,
        "eos_token_id": 151645,
    },
    "tiny": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 1024,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
    },
}
"""By name: the configurations of Llama 3.1 8B and Qwen3 0.6B, and one that runs anywhere in milliseconds."""


class Wanted:
    """A source that hands out tensors without memory and notes what was asked for."""

    def __init__(self, *, tied: bool) -> None:
        self.tensors: dict[str, tuple[int, ...]] = {}
        self._tied = tied

    def has(self, name: str) -> bool:
        return not (self._tied and name == "lm_head.weight")

    def take(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        self.tensors[name] = shape
        return torch.empty(shape, device="meta")

    def take_fused(self, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> torch.Tensor:
        self.tensors.update(zip(names, shapes, strict=True))
        return torch.empty(fused_shape(shapes), device="meta")

    def finish(self) -> None:
        """Nothing was handed out."""


def shape_config(name: str) -> Mapping[str, Any]:
    """The configuration of a shape. Raises DagError `model_not_found`, naming those there are."""
    if name not in SHAPES:
        raise DagError("model_not_found", f"{name!r} is not one of {', '.join(SHAPES)}", "shape")
    return SHAPES[name]


def tensors_of(config: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model of a configuration takes, in the order it takes them."""
    geometry = geometry_from_config(dict(config))
    wanted = Wanted(tied=geometry.tie_word_embeddings)
    model_class(geometry.architecture).load(geometry, wanted)
    return wanted.tensors


def write_config(folder: Path, config: Mapping[str, Any]) -> Path:
    """`config.json` and `generation_config.json` in `folder`, which is made. Returns it.

    With `load_format="dummy"` this is a model.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config), indent=2) + "\n")
    ids = {name: config[name] for name in ("bos_token_id", "eos_token_id") if name in config}
    (folder / "generation_config.json").write_text(json.dumps(ids, indent=2) + "\n")
    return folder


def write_model(
    folder: Path, config: Mapping[str, Any], *, seed: int, device: str, shard_bytes: int = SHARD_BYTES
) -> Path:
    """A Hugging Face folder of the configuration, without a tokenizer: the weights are those of a dummy model.

    Args:
        seed: with the device's type it decides the weights, as it does for `load_format="dummy"`.
        device: where they are drawn, as `EngineConfig.device` names it.
        shard_bytes: a file holds no more, unless one tensor is larger; several files come with an index.

    Raises:
        DagError: `invalid_request` where the folder holds weights already; a device that is not there.
    """
    if (folder / INDEX).exists() or any(folder.glob("*.safetensors")):
        raise DagError(
            "invalid_request", f"{folder.name} holds weights already; name another folder", "folder"
        )
    dtype = DTYPES[str(config.get("torch_dtype") or "float32")]
    source = DummySource(
        seed, dtype=dtype, device=find_device(device), tied=bool(config.get("tie_word_embeddings"))
    )
    shards = _shards(tensors_of(config), dtype.itemsize, shard_bytes)
    write_config(folder, config)
    names = [SINGLE] if len(shards) == 1 else [
        f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))
    ]  # fmt: skip
    weight_map: dict[str, str] = {}
    for file, shard in zip(names, shards, strict=True):
        tensors = {name: source.take(name, shape).cpu() for name, shape in shard.items()}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    if len(shards) > 1:
        total = sum(_size(shape) * dtype.itemsize for shard in shards for shape in shard.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")
    return folder


def _shards(
    tensors: Mapping[str, tuple[int, ...]], itemsize: int, shard_bytes: int
) -> list[dict[str, tuple[int, ...]]]:
    """The tensors in order, in as few runs as stay below the size."""
    shards: list[dict[str, tuple[int, ...]]] = []
    used = shard_bytes
    for name, shape in tensors.items():
        size = _size(shape) * itemsize
        if not shards or used + size > shard_bytes:
            shards.append({})
            used = 0
        shards[-1][name] = shape
        used += size
    return shards


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for side in shape:
        size *= side
    return size
