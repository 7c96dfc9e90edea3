"""Steps an engine core by hand and keeps what it showed: terminal events, logits by request and offset."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from dagengine.build import assemble, build_core
from dagengine.config import EngineConfig
from dagengine.core import EngineCore, Observer
from dagengine.devices import find_device
from dagengine.model_files import read_model
from dagengine.models.registry import model_class
from dagengine.request import Choice, ContextRef, FinishedEvent, Keep, Request
from dagengine.sampling import SamplingParams
from dagengine.tokenizer import Tokenizer
from dagengine.weights import Closing, SafetensorsSource
from dagengine_kvstore import KVStoreError

MAX_STEPS = 20_000


class LoadedModel:
    """Weights loaded once, for engine cores of many settings.

    Args:
        device: `cpu` or `cuda`.
        window: of all layers, whatever the folder says.
    """

    def __init__(
        self,
        folder: Path,
        device: str = "cpu",
        dtype: torch.dtype = torch.float32,
        *,
        window: int | None = None,
    ) -> None:
        self.files = read_model(folder)
        self.geometry, self.device, self.dtype = self.files.geometry, find_device(device), dtype
        if window is not None:
            groups = tuple(replace(group, window=window) for group in self.geometry.groups)
            self.geometry = replace(self.geometry, groups=groups)
        source = SafetensorsSource(folder, dtype=dtype, device=self.device)
        with Closing(source) as tensors:
            self.model = model_class(self.geometry.architecture).load(self.geometry, tensors)
        self.tokenizer = Tokenizer(folder) if (folder / "tokenizer.json").exists() else None

    def core(self, config: EngineConfig, observer: Observer) -> EngineCore:
        return assemble(
            self.model,
            self.geometry,
            config,
            identity="shared",
            dtype=self.dtype,
            device=self.device,
            eos_token_ids=self.files.eos_token_ids,
            tokenizer=self.tokenizer,
            observer=observer,
        )


class Driver:
    """An engine core, of a folder or of weights that are loaded already.

    A folder's model runs on the CPU, unless `options` say where, in float32.

    Attributes:
        logits: request id to own offset (of the token that the logits follow) to logits [vocab].
        check_every_step: whether the store counts its pages again after each step.
    """

    def __init__(self, source: Path | LoadedModel, **options: Any) -> None:
        self.logits: dict[str, dict[int, Tensor]] = {}
        self.check_every_step = False
        config = EngineConfig(**{"device": "cpu", "dtype": "float32", **options})
        self.core: EngineCore = (
            source.core(config, self._observe)
            if isinstance(source, LoadedModel)
            else build_core(source, config, observer=self._observe)
        )

    def run(self, *requests: Request) -> list[FinishedEvent]:
        """Submit requests as one group, step until all ended, and return their terminal events in order."""
        self.core.submit_group(requests)
        ended: dict[str, FinishedEvent] = {}
        for _ in range(MAX_STEPS):
            if not self.core.has_work:
                break
            for event in self.core.step():
                if isinstance(event, FinishedEvent):
                    assert event.request_id not in ended, "a request ended twice"
                    ended[event.request_id] = event
            if self.check_every_step:
                self.core.store.check()
        assert not self.core.has_work, "the requests did not end"
        return [ended[request.id] for request in requests]

    def choice(self, request: Request) -> Choice:
        """Run one request that must succeed."""
        (event,) = self.run(request)
        if event.error is not None:
            raise event.error
        return event.choices[0]

    def evict_all(self) -> int:
        """Evict every state that may be evicted, and spoil every page that nothing refers to.

        A page that is read without having been computed again then makes the logits NaN. Returns how many
        pages went.
        """
        dropped = 0
        for record in list(self.core.preparer._records.values()):
            if record.sealed and record.held:
                try:
                    dropped += self.core.store.evict(record)
                except KVStoreError as error:
                    assert error.code in ("state_in_use", "not_recomputable"), error
        self._spoil_unused()
        return dropped

    def _spoil_unused(self) -> None:
        """Take all pages that nobody uses, which also forgets what they held, and fill them with NaN.

        It is no step, so nothing but its end on the device keeps a load from filling these pages before it does.
        """
        store, arena = self.core.store, self.core._runner.arena
        stats = store.stats()
        writer = store.begin([], [], 0, signature={"spoiled": ""})
        writer.reserve((stats.pages_free + stats.pages_cached) * store.page_size)
        for layer in range(self.core.geometry.num_layers):
            arena.layer(layer)[writer.pages] = float("nan")
        if arena.layer(0).is_cuda:
            torch.cuda.synchronize(arena.layer(0).device)
        writer.abort()

    def release_all(self) -> None:
        """Release every handle; then nothing may be left alive."""
        for state in self.core.store.states():
            self.core.release_state(state.id)
        self.core.store.check()
        stats = self.core.store.stats()
        assert stats.pages_live == 0 and stats.states == 0 and stats.leases == 0, stats

    def _observe(self, request_id: str, index: int, offset: int, logits: Tensor) -> None:
        assert index == 0
        self.logits.setdefault(request_id, {})[offset] = logits.detach().to("cpu", copy=True)


def request(
    name: str,
    input_ids: Sequence[int],
    max_tokens: int = 0,
    *,
    context: Sequence[ContextRef] = (),
    position: str = "linear",
    options: Mapping[str, object] | None = None,
    backend: str | None = None,
    keep: bool = True,
    turn_start: int | None = None,
) -> Request:
    """A greedy request that samples exactly `max_tokens` tokens (none: it only computes its input)."""
    return Request(
        id=name,
        input_ids=tuple(input_ids),
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        if max_tokens
        else None,
        context=tuple(context),
        position=position,
        position_options=dict(options or {}),
        backend=backend,
        keep=Keep() if keep else None,
        turn_start=turn_start,
    )


TINY: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 24,
    "vocab_size": 101,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}


def save_tiny_llama(
    folder: Path, seed: int, *, dtype: torch.dtype = torch.float32, **config: Any
) -> dict[str, Tensor]:
    """Write a random Llama, or Qwen3, whose attention is far from uniform, and return its tensors.

    `config` overrides keys of `TINY`, in which head_dim is not hidden/heads and three query heads share a KV head.
    """
    config = TINY | config
    generator = torch.Generator().manual_seed(seed)
    hidden, inner, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]

    def matrix(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain / columns**0.5

    def norm(size: int = hidden) -> Tensor:
        return 1 + 0.2 * torch.randn(size, generator=generator)

    tensors = {
        "model.embed_tokens.weight": matrix(vocab, hidden, hidden**0.5),
        "model.norm.weight": norm(),
        "lm_head.weight": matrix(vocab, hidden, 2.0),
    }
    for index in range(config["num_hidden_layers"]):
        layer = f"model.layers.{index}"
        tensors |= {
            f"{layer}.input_layernorm.weight": norm(),
            f"{layer}.post_attention_layernorm.weight": norm(),
            f"{layer}.self_attn.q_proj.weight": matrix(queries, hidden, 1.4),
            f"{layer}.self_attn.k_proj.weight": matrix(keys, hidden, 1.4),
            f"{layer}.self_attn.v_proj.weight": matrix(keys, hidden),
            f"{layer}.self_attn.o_proj.weight": matrix(hidden, queries, 1.5),
            f"{layer}.mlp.gate_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.up_proj.weight": matrix(inner, hidden),
            f"{layer}.mlp.down_proj.weight": matrix(hidden, inner),
        }
        if config["model_type"] == "qwen3":
            tensors |= {f"{layer}.self_attn.{one}_norm.weight": norm(config["head_dim"]) for one in "qk"}
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return tensors
