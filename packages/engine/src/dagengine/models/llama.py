"""Llama 2 and 3.x, SmolLM 1 and 2, TinyLlama: no biases by default, RoPE, grouped-query attention."""

from __future__ import annotations

from dagengine_positions import ModelGeometry

from ..weights import WeightSource, take_head
from .layers import Attention, Decoder, DecoderLayer, GatedMLP
from .linear import Linear, make_linear
from .norm import RMSNorm


class LlamaForCausalLM(Decoder):
    """Wiring of the Llama family; its relatives differ in biases and in q/k norms, which the geometry says."""

    @classmethod
    def load(
        cls, geometry: ModelGeometry, source: WeightSource, *, batch_invariant: bool = False
    ) -> LlamaForCausalLM:
        """Take every tensor of the model from `source`, fusing q/k/v and gate/up on the way.

        Raises: DagError (unsupported) where `batch_invariant` cannot be promised.
        """
        hidden, eps = geometry.hidden_size, geometry.rms_norm_eps
        embedding = source.take("model.embed_tokens.weight", (geometry.vocab_size, hidden))
        layers = tuple(
            _layer(geometry, source, index, batch_invariant) for index in range(geometry.num_layers)
        )
        norm = RMSNorm(source.take("model.norm.weight", (hidden,)), eps)
        head = take_head(source, embedding, tied=geometry.tie_word_embeddings)
        output = make_linear(head, shared=True, batch_invariant=batch_invariant)
        return cls(embedding, layers, norm, output, batch_invariant)


def _layer(geometry: ModelGeometry, source: WeightSource, index: int, batch_invariant: bool) -> DecoderLayer:
    hidden, dim, eps = geometry.hidden_size, geometry.head_dim, geometry.rms_norm_eps
    heads, kv_heads, inner = geometry.num_heads, geometry.num_kv_heads, geometry.intermediate_size
    attention, mlp = f"model.layers.{index}.self_attn", f"model.layers.{index}.mlp"

    def linear(
        names: tuple[str, ...],
        rows: tuple[int, ...],
        columns: int,
        bias: bool,
        norm: RMSNorm | None = None,
        gated: bool = False,
        over_residual: bool = False,
    ) -> Linear:
        weight = source.take_fused([f"{n}.weight" for n in names], [(r, columns) for r in rows])
        biases = source.take_fused([f"{n}.bias" for n in names], [(r,) for r in rows]) if bias else None
        return make_linear(
            weight,
            biases,
            norm=norm,
            gated=gated,
            over_residual=over_residual,
            batch_invariant=batch_invariant,
        )

    def norm(name: str, size: int) -> RMSNorm:
        return RMSNorm(source.take(f"{name}.weight", (size,)), eps)

    return DecoderLayer(
        Attention(
            layer=index,
            qkv=linear(
                tuple(f"{attention}.{p}_proj" for p in "qkv"),
                (heads * dim, kv_heads * dim, kv_heads * dim),
                hidden,
                geometry.attention_bias,
                norm(f"model.layers.{index}.input_layernorm", hidden),
            ),
            out=linear(
                (f"{attention}.o_proj",),
                (hidden,),
                heads * dim,
                geometry.attention_out_bias,
                over_residual=True,
            ),
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=dim,
            q_norm=norm(f"{attention}.q_norm", dim) if geometry.qk_norm else None,
            k_norm=norm(f"{attention}.k_norm", dim) if geometry.qk_norm else None,
        ),
        GatedMLP(
            gate_up=linear(
                (f"{mlp}.gate_proj", f"{mlp}.up_proj"),
                (inner, inner),
                hidden,
                geometry.mlp_bias,
                norm(f"model.layers.{index}.post_attention_layernorm", hidden),
                gated=True,
            ),
            down=linear((f"{mlp}.down_proj",), (hidden,), inner, geometry.mlp_bias, over_residual=True),
        ),
    )
