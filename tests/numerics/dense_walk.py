"""The definition in float64: each node encoded once, densely, under what it sees and where it sees it.

Shares no code with the engine. Visible tokens come from the brute-force definition of the graph, positions
are computed token by token from what the policies promise, and K and V are kept per token, K unrotated, so
that every reader rotates it at the position where it sees it. Llama's mathematics is written out once more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from dagengine_core_graph import ContextGraph, NodeSpans, Reference, definition


class DenseLlama:
    """A Llama or Qwen3 without biases, in float64.

    Args:
        tensors: by their Hugging Face names.
        window: tokens that a token sees in every layer, itself included, counted by positions; None: all before it.
    """

    def __init__(
        self, config: Mapping[str, Any], tensors: Mapping[str, Tensor], *, window: int | None = None
    ) -> None:
        self.window = window
        self.tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self.num_layers = int(config["num_hidden_layers"])
        self.heads = int(config["num_attention_heads"])
        self.kv_heads = int(config["num_key_value_heads"])
        self.dim = int(config["head_dim"])
        self.eps = float(config["rms_norm_eps"])
        self.theta = float(config["rope_theta"])

    def encode(
        self,
        tokens: Sequence[int],
        own_positions: Sequence[int],
        context: Sequence[tuple[Tensor, Tensor]],
        views: Sequence[int],
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Logits [n, vocab] of every own token, and per layer its K (normed, unrotated) and V, [n, kv heads, dim].

        Args:
            context: per layer K (unrotated) and V [m, kv heads, dim] of the visible tokens, seen at `views`.
        """
        n, m = len(tokens), len(views)
        x = self._weight("model.embed_tokens")[torch.tensor(tokens)]
        sees = torch.ones(n, m + n, dtype=torch.bool)
        for row in range(n):
            for column in range(n):
                sees[row, m + column] = column <= row
        if self.window is not None:
            at = torch.tensor([*views, *own_positions])
            sees &= at > torch.tensor(own_positions)[:, None] - self.window
        kept = []
        for index in range(self.num_layers):
            layer = f"model.layers.{index}"
            a = self._norm(x, f"{layer}.input_layernorm")
            q = self._project(a, f"{layer}.self_attn.q_proj", self.heads)
            k = self._project(a, f"{layer}.self_attn.k_proj", self.kv_heads)
            v = self._project(a, f"{layer}.self_attn.v_proj", self.kv_heads)
            if f"{layer}.self_attn.q_norm.weight" in self.tensors:
                q = self._norm(q, f"{layer}.self_attn.q_norm")
                k = self._norm(k, f"{layer}.self_attn.k_norm")
            kept.append((k, v))
            all_k = torch.cat([self._rotate(context[index][0], views), self._rotate(k, own_positions)])
            all_v = torch.cat([context[index][1], v])
            q = self._rotate(q, own_positions)
            out = torch.empty(n, self.heads, self.dim, dtype=torch.float64)
            for head in range(self.heads):
                kv_head = head // (self.heads // self.kv_heads)
                scores = q[:, head] @ all_k[:, kv_head].T / self.dim**0.5
                weights = torch.softmax(scores.masked_fill(~sees, -torch.inf), dim=-1)
                out[:, head] = weights @ all_v[:, kv_head]
            x = x + out.reshape(n, -1) @ self._weight(f"{layer}.self_attn.o_proj").T
            a = self._norm(x, f"{layer}.post_attention_layernorm")
            gate = a @ self._weight(f"{layer}.mlp.gate_proj").T
            up = a @ self._weight(f"{layer}.mlp.up_proj").T
            x = x + (gate * torch.sigmoid(gate) * up) @ self._weight(f"{layer}.mlp.down_proj").T
        return self._norm(x, "model.norm") @ self._weight("lm_head").T, kept

    def no_context(self) -> list[tuple[Tensor, Tensor]]:
        empty = torch.empty(0, self.kv_heads, self.dim, dtype=torch.float64)
        return [(empty, empty)] * self.num_layers

    def _weight(self, name: str) -> Tensor:
        return self.tensors[f"{name}.weight"]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self._weight(name)

    def _project(self, x: Tensor, name: str, heads: int) -> Tensor:
        return (x @ self._weight(name).T).reshape(len(x), heads, self.dim)

    def _rotate(self, x: Tensor, positions: Sequence[int]) -> Tensor:
        """Pairs (i, i + dim/2) turned by position * theta^(-2i/dim) (Su et al., 2021)."""
        half = self.dim // 2
        frequency = self.theta ** (-torch.arange(half, dtype=torch.float64) * 2 / self.dim)
        angle = torch.tensor(positions, dtype=torch.float64)[:, None, None] * frequency
        first, second = x[..., :half], x[..., half:]
        return torch.cat(
            [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], dim=-1
        )


class DenseWalk:
    """A graph of encoded nodes. Nodes are added once their tokens are known, parents first."""

    def __init__(self, model: DenseLlama) -> None:
        self.model = model
        self.graph = ContextGraph()
        self.own_start: dict[object, int] = {}
        self.kept: dict[object, list[tuple[Tensor, Tensor]]] = {}

    def add(
        self,
        name: str,
        references: Sequence[Reference],
        tokens: Sequence[int],
        *,
        policy: str = "linear",
        own_start: int | None = None,
        spans: NodeSpans | None = None,
    ) -> Tensor:
        """Encode a node; logits [n, vocab] of its tokens."""
        seen, views = self.views(references, policy)
        start = max(views, default=-1) + 1 if own_start is None else own_start
        logits, self.kept[name] = self.encode(tokens, seen, views, start)
        self.own_start[name] = start
        self.graph.add(name, references, length=len(tokens), spans=spans, sealed=True)
        return logits

    def views(self, references: Sequence[Reference], policy: str) -> tuple[list[definition.Token], list[int]]:
        """Every visible token, and the position at which the policy puts it."""
        parts = definition.parts(self.graph, references)
        seen = [token for part in parts for token in part]
        if policy == "linear":
            return seen, list(range(len(seen)))
        if policy == "native":
            return seen, [self.own_start[node.id] + offset for node, offset in seen]
        assert policy == "explicit"
        starts = [reference.start or 0 for reference in references]
        return seen, [start + i for start, part in zip(starts, parts, strict=True) for i in range(len(part))]

    def encode(
        self, tokens: Sequence[int], seen: Sequence[definition.Token], views: Sequence[int], own_start: int
    ) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        """Encode tokens over given instances at given positions."""
        context = self.model.no_context()
        if seen:
            context = [
                (
                    torch.stack([self.kept[node.id][layer][0][offset] for node, offset in seen]),
                    torch.stack([self.kept[node.id][layer][1][offset] for node, offset in seen]),
                )
                for layer in range(self.model.num_layers)
            ]
        return self.model.encode(tokens, range(own_start, own_start + len(tokens)), context, views)
