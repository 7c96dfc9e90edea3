"""From a model's folder to an engine core: config, geometry, weights, pool, signature.

The device, the dtype, the pool's size and the threads are decided here, once, and reported; nothing is decided
silently.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from dagengine_kernels import get_backend
from dagengine_kvstore import KVStore, KVStoreError, Transfer, eviction_policy
from dagengine_kvstore.torch_arena import TorchArena
from dagengine_positions import (
    ModelAdapter,
    ModelGeometry,
    adapter_for,
    position_policies,
)

from .config import POOL_SIZES, EngineConfig
from .core import EngineCore, Observer
from .costs import MeasuredCosts, Priors, StepCosts
from .cuda_runner import make_runner
from .devices import place, use_device
from .errors import DagError, as_dag_error, shown
from .host_tier import HostTier, make_host_tier
from .memory import gib_of, num_host_pages, num_pages
from .model_files import find_model, read_model
from .models.linear import why_not_invariant
from .models.registry import Model, model_class
from .tokenizer import Tokenizer
from .upcoming import Upcoming
from .weights import Closing, DummySource, SafetensorsSource, WeightSource, stored_dtype

log = logging.getLogger("dagengine")

WIDE_ROW = 2**15
"""Elements from which on torch sums a row by itself in another way than among others (its grain size)."""


def build_core(
    model: str | os.PathLike[str],
    config: EngineConfig,
    *,
    chat_template: str | None = None,
    observer: Observer | None = None,
    text: bool = True,
) -> EngineCore:
    """Load a model and build its engine core.

    The work is done by a thread that ends with it. A thread that multiplied once keeps OpenMP workers, and on a
    machine without cores to spare those of the caller would slow every step of the engine's thread.

    Args:
        text: whether to load the folder's tokenizer; without it requests and answers are token ids.

    Raises:
        DagError: `model_not_found`, `unsupported`, `invalid_weights`, or a refusal of the configuration.
    """
    with ThreadPoolExecutor(1, "dagengine-build") as pool:
        return pool.submit(_build_core, model, config, chat_template, observer, text).result()


def _build_core(
    model: str | os.PathLike[str],
    config: EngineConfig,
    chat_template: str | None,
    observer: Observer | None,
    text: bool,
) -> EngineCore:
    folder = find_model(model)
    files = read_model(folder)
    _check_kv_layout(files.geometry)
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    checkpoint = files.geometry.dtype or (None if config.load_format == "dummy" else stored_dtype(folder))
    placement = place(config, files.geometry, checkpoint)
    device, dtype = placement.device, placement.dtype
    log.info("device %s: %s", device, placement.reason)
    use_device(device)
    _check_options(config, device, dtype, files.geometry)
    if device.type == "cuda":
        # cuBLAS may otherwise add up parts of a sum in bfloat16: errors above the rounding of the result.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    has_text = text and (folder / "tokenizer.json").exists()
    if chat_template is not None and not isinstance(chat_template, str):
        rule = f"chat_template is the text of a template, not {shown(chat_template)}"
        raise DagError("invalid_request", rule, "chat_template")
    if chat_template is not None and not has_text:
        message = "no tokenizer is loaded, so there is nothing that a chat template would be used for"
        raise DagError("unsupported", message, "chat_template")
    tokenizer = Tokenizer(folder, chat_template) if has_text else None
    begin = time.perf_counter()
    if config.load_format == "dummy":
        source: Any = DummySource(
            config.seed or 0, dtype=dtype, device=device, tied=files.geometry.tie_word_embeddings
        )
    else:
        source = SafetensorsSource(folder, dtype=dtype, device=device)
    with Closing(source) as tensors:
        loaded = load_model(files.geometry, tensors, batch_invariant=config.batch_invariant)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        taken = gib_of(torch.cuda.memory_allocated(device))
        log.info("weights loaded in %.1f s, %s on %s", time.perf_counter() - begin, taken, device)
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
    transfer: Callable[[TorchArena], Transfer] | None = None,
    costs: StepCosts | None = None,
) -> EngineCore:
    """Put an engine core around a loaded model.

    Args:
        identity: stands for the weights in the signature of every state.
        dtype, device: where the model is and in what; the configuration's own are for whoever loads one.
        clock: seconds that only grow; the states' times to live are measured by it, and steps and transfers.
        transfer: makes the host tier, in place of what `cpu_kv_gib` and `kv_directory` ask for.
        costs: of loading and computing again; None: measured ones.
    """
    device = device or torch.device("cpu")
    _check_options(config, device, dtype, geometry)
    if config.batch_invariant and getattr(model, "batch_invariant", False) is not True:
        raise DagError("unsupported", "the model was loaded without it", "batch_invariant")
    given, config = config, config.on(device.type)
    max_model_len = config.max_model_len or geometry.max_positions
    if max_model_len > geometry.max_positions:
        raise DagError(
            "position_overflow",
            f"max_model_len must be at most the model's {geometry.max_positions}, not {max_model_len}",
            "max_model_len",
        )
    _check_kv_layout(geometry)
    if config.attention_backend != "auto":
        try:
            get_backend(config.attention_backend)
        except Exception as error:
            found = as_dag_error(error)
            raise DagError(found.code, found.message, "attention_backend") from None
    try:
        position_policies.get(config.position_policy)
    except Exception as error:
        raise as_dag_error(error, "position_policy") from None
    try:
        eviction = eviction_policy(config.eviction)
    except Exception as error:
        found = as_dag_error(error)
        raise DagError(found.code, found.message, "eviction") from None
    memory = None
    if device.type == "cuda":
        torch.cuda.empty_cache()
        memory = torch.cuda.mem_get_info(device)
    pages = num_pages(geometry, config, dtype, max_model_len, memory)
    num_host = num_host_pages(geometry, config, dtype)
    upcoming = Upcoming()
    try:
        arena = TorchArena(
            geometry.num_layers,
            pages,
            config.page_size,
            geometry.groups[0].num_kv_heads,
            geometry.groups[0].head_dim,
            dtype,
            device,
        )
    except (MemoryError, RuntimeError):
        message = f"the memory does not hold {pages} KV pages of {config.page_size} tokens; ask for fewer"
        asked = [name for name in POOL_SIZES if getattr(given, name) is not None]
        automatic = "gpu_memory_utilization" if device.type == "cuda" else "kv_memory_gib"
        raise DagError("capacity", message, asked[0] if asked else automatic) from None
    tier: HostTier | None = None
    if transfer is not None or num_host:
        assert config.max_num_batched_tokens is not None
        priors = Priors.of(geometry, arena.page_bytes, device.type)
        measured = MeasuredCosts(config.page_size, config.max_num_batched_tokens, priors)
        tier = make_host_tier(arena, num_host, config, device, costs or measured, clock, transfer)
    with ExitStack() as unfinished:
        if tier is not None:
            unfinished.callback(tier.close)
        # KV that was computed at other positions gives the same attention in other bits.
        try:
            store = KVStore(
                pages,
                config.page_size,
                clock=clock,
                eviction=eviction,
                reuse_across_positions=not config.batch_invariant,
                transfer="none" if tier is None else tier.transfer,
                costs=None if tier is None else tier.costs,
                next_use=upcoming,
            )
        except KVStoreError as error:
            raise as_dag_error(error) from None
        if tier is not None:
            tier.serve(store)
        log.info(
            "model %s, %s on %s, %d KV pages of %d tokens, at most %d positions, %d threads",
            geometry.architecture, dtype, device, pages, config.page_size, max_model_len, torch.get_num_threads(),
        )  # fmt: skip
        core = EngineCore(
            replace(
                config,
                device=str(device),
                dtype=str(dtype).removeprefix("torch."),
                kv_pages=pages,
                kv_memory_gib=None,
                gpu_memory_utilization=None,
                max_model_len=max_model_len,
            ),
            store,
            make_runner(
                model,
                geometry,
                arena,
                max_positions=max_model_len,
                device=device,
                max_num_seqs=config.max_num_seqs,
                enforce_eager=config.enforce_eager,
            ),
            geometry,
            adapter or adapter_for(geometry),
            signature(geometry, identity, dtype, max_model_len),
            max_model_len=max_model_len,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            observer=observer,
            host_tier=tier,
            upcoming=upcoming,
        )
        unfinished.pop_all()
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


def load_model(geometry: ModelGeometry, source: WeightSource, *, batch_invariant: bool = False) -> Model:
    """The model of a geometry's architecture.

    Raises: DagError, also (unsupported) where `batch_invariant` is asked for and its class does not promise it.
    """
    found = model_class(geometry.architecture)
    if not batch_invariant:
        return found.load(geometry, source)
    if "batch_invariant" not in inspect.signature(found.load).parameters:
        message = f"the model class for {geometry.architecture!r} does not promise it"
        raise DagError("unsupported", message, "batch_invariant")
    invariant: Any = found
    model: Model = invariant.load(geometry, source, batch_invariant=True)
    return model


def _check_options(
    config: EngineConfig, device: torch.device, dtype: torch.dtype, geometry: ModelGeometry
) -> None:
    """Refuse what this device cannot do. Raises: DagError naming the option."""
    if config.batch_invariant:
        reason = why_not_invariant(dtype, device)
        if reason is None and device.type == "cpu" and geometry.hidden_size >= WIDE_ROW:
            reason = f"the norm of a single row of {geometry.hidden_size} is split among threads on a CPU"
        if reason is not None:
            raise DagError("unsupported", reason, "batch_invariant")
    if config.gpu_memory_utilization is not None and device.type != "cuda":
        message = f"the model runs on {device}; size its pool with kv_memory_gib or kv_pages"
        raise DagError("invalid_request", message, "gpu_memory_utilization")


def _check_kv_layout(geometry: ModelGeometry) -> None:
    """Refuse layers whose KV does not fit pages of one kind and shape. Raises: DagError."""
    for group in geometry.groups:
        if group.kv_kind != "full" or group.sinks:
            raise DagError(
                "kv_kind_unsupported", f"layers of kind {group.kv_kind!r} are not supported", "model"
            )
    if len({(g.num_kv_heads, g.head_dim) for g in geometry.groups}) != 1:
        raise DagError("unsupported", "layers with different KV shapes are not supported", "model")
