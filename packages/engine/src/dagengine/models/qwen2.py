"""Qwen2 and Qwen2.5 dense: Llama's wiring with biases on q, k and v, none on the output projection."""

from __future__ import annotations

from .llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Qwen2's biases are the geometry's `attention_bias` without `attention_out_bias`."""
