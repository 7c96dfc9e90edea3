"""What the engine must know of a model to place, store and attend its keys and values.

Plain facts, already checked: no file format, no weights. Layers that rotate, look back and share heads in the
    same
way form one group; the models built so far have one group.
"""

from __future__ import annotations

from dataclasses import dataclass

from .rope import RopeSpec


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that store and attend their keys and values alike.

    Attributes:
        layers: indexes of the layers, ascending.
        kv_kind: ``full`` where the state is one key and one value per token and KV head.
        num_kv_heads, head_dim: shape of one token's key and of its value.
        rope: the rotation, or None for layers without one.
        window: tokens that a query sees back, itself included, or None.
        softcap: soft cap of the attention logits, or None.
        sinks: whether each head has a learned attention sink.
        scale: multiplier of the attention logits.
        chunk: positions per chunk of chunked attention, or None.
    """

    layers: tuple[int, ...]
    kv_kind: str
    num_kv_heads: int
    head_dim: int
    rope: RopeSpec | None
    window: int | None
    softcap: float | None
    sinks: bool
    scale: float
    chunk: int | None = None


@dataclass(frozen=True, slots=True)
class ModelGeometry:
    """A decoder-only model, without its weights.

    Attributes:
        architecture: name of the model class, such as ``LlamaForCausalLM``.
        model_type: family name, such as ``llama``.
        max_positions: positions run from 0 to ``max_positions - 1``.
        attention_bias: biases on the query, key and value projections.
        attention_out_bias: a bias on the attention's output projection.
        mlp_bias: biases on the projections of the feed-forward part.
        qk_norm: RMS norm of every query and key head before the rotation.
        dtype: the checkpoint's ``float32``, ``float16`` or ``bfloat16``, or None where it does not say.
        bos_token_id, eos_token_ids: None and empty where the configuration does not say.
        groups: every layer is in exactly one group.
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_positions: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    qk_norm: bool
    hidden_act: str
    dtype: str | None
    bos_token_id: int | None
    eos_token_ids: tuple[int, ...]
    groups: tuple[LayerGroup, ...]
