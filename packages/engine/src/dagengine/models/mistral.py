"""Mistral without a sliding window (7B v0.3, Nemo): Llama's wiring and names; head_dim may differ from hidden/heads."""

from __future__ import annotations

from .llama import LlamaForCausalLM


class MistralForCausalLM(LlamaForCausalLM):
    """Mistral has Llama's tensors; what differs is in the geometry."""
