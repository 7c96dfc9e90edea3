"""From a model's folder to an engine core: config, geometry, weights, pool, signature.

The dtype, the pool's size and the threads are decided here, once, and reported; nothing is decided silently.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from dagengine_kernels import get_backend
from dagengine_kvstore import KVStore
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import (
    ModelAdapter,
    ModelGeometry,
    adapter_for,
    geometry_from_config,
    position_policies,
)

from .config import EngineConfig
from .core import EngineCore, Observer
from .errors import DagError, as_dag_error
from .models.registry import Model, model_class
from .runner import Runner
from .tokenizer import Tokenizer
from .weights import Closing, DummySource, SafetensorsSource

log = logging.getLogger("dagengine")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


@dataclass(frozen=True)
class ModelFiles:
    """What a folder says of its model."""

    folder: Path
    config: dict[str, Any]
    geometry: ModelGeometry
    eos_token_ids: tuple[int, ...]


def find_model(model: str | os.PathLike[str]) -> Path:
    """The folder of a model: the path itself, or a snapshot of the Hub repository of that id.

    Raises:
        DagError: `model_not_found`.
    """
    folder = Path(model)
    if (folder / "config.json").exists():
        return folder
    if folder.exists() or str(model).count("/") != 1:
        raise DagError(
            "model_not_found", f"{str(model)!r} is no folder with a config.json, nor a Hub id", "model"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        hint = "install dagengine[hub] to load models by their Hub id"
        raise DagError("model_not_found", f"{str(model)!r} is no folder; {hint}", "model") from None
    try:
        return Path(snapshot_download(str(model), allow_patterns=["*.json", "*.safetensors", "*.jinja"]))
    except Exception as error:
        raise DagError(
            "model_not_found", f"the Hub has no {str(model)!r} for us: {error}", "model"
        ) from error


def read_model(folder: Path) -> ModelFiles:
    """Read `config.json` and `generation_config.json`; refuse what the engine does not compute exactly."""
    try:
        config = json.loads((folder / "config.json").read_text())
        generation_path = folder / "generation_config.json"
        generation = json.loads(generation_path.read_text()) if generation_path.exists() else {}
    except ValueError as error:
        raise DagError(
            "invalid_weights", f"{folder} holds a config that is no JSON: {error}", "model"
        ) from None
    try:
        geometry = geometry_from_config(config)
    except Exception as error:
        raise as_dag_error(error, "model") from None
    eos = generation.get("eos_token_id") if isinstance(generation, dict) else None
    ids = [eos] if isinstance(eos, int) else list(eos or ())
    return ModelFiles(folder, config, geometry, tuple(dict.fromkeys([*ids, *geometry.eos_token_ids])))


def build_core(
    model: str | os.PathLike[str],
    config: EngineConfig,
    *,
    chat_template: str | None = None,
    observer: Observer | None = None,
) -> EngineCore:
    """Load a model and build its engine core on the CPU.

    The work is done by a thread that ends with it. A thread that multiplied once keeps OpenMP workers, and on a
    machine without cores to spare those of the caller would slow every step of the engine's thread.

    Raises:
        DagError: `model_not_found`, `unsupported`, `invalid_weights`, or a refusal of the configuration.
    """
    with ThreadPoolExecutor(1, "dagengine-build") as pool:
        return pool.submit(_build_core, model, config, chat_template, observer).result()


def _build_core(
    model: str | os.PathLike[str],
    config: EngineConfig,
    chat_template: str | None,
    observer: Observer | None,
) -> EngineCore:
    folder = find_model(model)
    files = read_model(folder)
    device = torch.device("cpu")
    dtype = DTYPES["float32" if config.dtype == "auto" else config.dtype]
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    tokenizer = Tokenizer(folder, chat_template) if (folder / "tokenizer.json").exists() else None
    if config.load_format == "dummy":
        source: Any = DummySource(
            config.seed or 0, dtype=dtype, device=device, tied=files.geometry.tie_word_embeddings
        )
    else:
        source = SafetensorsSource(folder, dtype=dtype, device=device)
    with Closing(source) as tensors:
        loaded = model_class(files.geometry.architecture).load(files.geometry, tensors)
    identity = weights_identity(folder, config)
    return assemble(
        loaded,
        files.geometry,
        config,
        identity=identity,
        dtype=dtype,
        device=device,
        eos_token_ids=files.eos_token_ids,
        tokenizer=tokenizer,
        observer=observer,
    )


def assemble(
    model: Model,
    geometry: ModelGeometry,
    config: EngineConfig,
    *,
    identity: str,
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    eos_token_ids: tuple[int, ...] = (),
    tokenizer: Tokenizer | None = None,
    observer: Observer | None = None,
    adapter: ModelAdapter | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> EngineCore:
    """Put an engine core around a loaded model.

    Args:
        identity: stands for the weights in the signature of every state.
        clock: seconds that only grow; the states' times to live are measured by it.
    """
    device = device or torch.device("cpu")
    max_model_len = config.max_model_len or geometry.max_positions
    if max_model_len > geometry.max_positions:
        raise DagError(
            "position_overflow",
            f"max_model_len must be at most the model's {geometry.max_positions}, not {max_model_len}",
            "max_model_len",
        )
    for group in geometry.groups:
        if group.kv_kind != "full" or group.sinks:
            raise DagError(
                "kv_kind_unsupported", f"layers of kind {group.kv_kind!r} are not supported", "model"
            )
    if config.attention_backend != "auto":
        try:
            get_backend(config.attention_backend)
        except Exception as error:
            raise as_dag_error(error, "attention_backend") from None
    try:
        position_policies.get(config.position_policy)
    except Exception as error:
        raise as_dag_error(error, "position_policy") from None
    kv_heads = {(g.num_kv_heads, g.head_dim) for g in geometry.groups}
    if len(kv_heads) != 1:
        raise DagError("unsupported", "layers with different KV shapes are not supported", "model")
    num_pages = config.kv_pages or _pages(geometry, config, dtype, max_model_len)
    try:
        arena = TorchArena(
            geometry.num_layers,
            num_pages,
            config.page_size,
            geometry.groups[0].num_kv_heads,
            geometry.groups[0].head_dim,
            dtype,
            device,
        )
        store = KVStore(num_pages, config.page_size, clock=clock)
    except (MemoryError, RuntimeError):
        message = f"the memory does not hold {num_pages} KV pages of {config.page_size} tokens; ask for fewer"
        raise DagError("capacity", message, "kv_pages" if config.kv_pages else "kv_memory_gib") from None
    log.info(
        "model %s, %s on %s, %d KV pages of %d tokens, at most %d positions, %d threads",
        geometry.architecture, dtype, device, num_pages, config.page_size, max_model_len, torch.get_num_threads(),
    )  # fmt: skip
    core = EngineCore(
        replace(config, kv_pages=num_pages, max_model_len=max_model_len),
        store,
        Runner(model, geometry, arena, max_positions=max_model_len, device=device),
        geometry,
        adapter or adapter_for(geometry),
        signature(geometry, identity, dtype, max_model_len),
        max_model_len=max_model_len,
        eos_token_ids=eos_token_ids,
        tokenizer=tokenizer,
        observer=observer,
    )
    log.info(
        "attention backend %s (%s): %s",
        core.default_backend, core.attention.implementation, core.attention.reason,
    )  # fmt: skip
    return core


def signature(
    geometry: ModelGeometry, identity: str, dtype: torch.dtype, max_model_len: int
) -> dict[str, str]:
    """What two states must share to meet in one node; not the page size, not where they lie."""
    rope = ";".join(g.rope.signature() if g.rope else "none" for g in geometry.groups)
    heads = ";".join(f"{len(g.layers)}x{g.num_kv_heads}x{g.head_dim}:{g.kv_kind}" for g in geometry.groups)
    return {
        "model": identity,
        "dtype": str(dtype).removeprefix("torch."),
        "kv_geometry": heads,
        "position_scheme": f"{rope};regime={max_model_len if _length_dependent(geometry) else 'any'}",
        "adapter": "none",
    }


def weights_identity(folder: Path, config: EngineConfig) -> str:
    """A name for the weights: names, sizes and headers of the files, or the seed of dummy ones."""
    digest = hashlib.blake2b(digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    if config.load_format == "dummy":
        digest.update(f"dummy:{config.seed or 0}".encode())
        return digest.hexdigest()
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb") as file:
            header = file.read(8 + min(int.from_bytes(file.read(8), "little"), 1 << 24))
        digest.update(f"{path.name}:{path.stat().st_size}:{path.stat().st_mtime_ns}".encode())
        digest.update(header)
    return digest.hexdigest()


def _length_dependent(geometry: ModelGeometry) -> bool:
    return any(g.rope is not None and g.rope.kind in ("dynamic", "longrope") for g in geometry.groups)


def _pages(geometry: ModelGeometry, config: EngineConfig, dtype: torch.dtype, max_model_len: int) -> int:
    per_token = sum(2 * g.num_kv_heads * g.head_dim * len(g.layers) for g in geometry.groups) * dtype.itemsize
    pages = int(config.kv_memory_gib * 2**30) // (per_token * config.page_size)
    enough = config.max_num_seqs * -(-max_model_len // config.page_size)
    if pages < 1:
        raise DagError("invalid_request", "kv_memory_gib is too small for a single page", "kv_memory_gib")
    return min(pages, enough)
