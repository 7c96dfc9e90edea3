"""Qwen3 dense: Llama's wiring with an RMS norm per head on q and k, before the rotation."""

from __future__ import annotations

from .llama import LlamaForCausalLM


class Qwen3ForCausalLM(LlamaForCausalLM):
    """Qwen3's per-head norms are the geometry's `qk_norm`; its head_dim is independent of hidden/heads."""
