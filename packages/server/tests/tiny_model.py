"""A model folder that takes no download: two random layers, a byte-level tokenizer, a chat template.

Deterministic for a seed, and small enough that a step takes about a millisecond.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<s>")
MERGES = (("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"))
HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 32, 2, 4, 2, 8, 64
CHAT_TEMPLATE = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe kind.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{% if message['role'] == 'developer' %}{{ raise_exception('developers are not known here') }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def build(folder: Path, *, max_positions: int = 512, seed: int = 0) -> Path:
    """Write the model into `folder`, which is made. Returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer()
    vocab = tokenizer.get_vocab_size(with_added_tokens=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": vocab,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "bos_token_id": tokenizer.token_to_id("<s>"),
        "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    names = {"bos_token": "<s>", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(names))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    save_file(_weights(vocab, seed), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bos = tokenizer.token_to_id("<s>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A $B", special_tokens=[("<s>", bos)]
    )
    return tokenizer


def _weights(vocab: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int, scale: float = 0.3) -> torch.Tensor:
        return torch.randn(rows, columns, generator=generator) * scale

    weights = {
        "model.embed_tokens.weight": matrix(vocab, HIDDEN, 1.0),
        "model.norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(HIDDEN),
            f"{prefix}.self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            f"{prefix}.self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            f"{prefix}.mlp.gate_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.up_proj.weight": matrix(MLP, HIDDEN),
            f"{prefix}.mlp.down_proj.weight": matrix(HIDDEN, MLP),
        }
    return weights
