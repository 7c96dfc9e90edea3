"""One GGUF file of the Llama architecture → an ordinary Hugging Face folder.

Knows the GGUF names of Llama tensors, llama.cpp's order of the q and k rows, and the byte-level BPE
vocabularies that llama.cpp names. Does not know where the file came from. What it does not know it refuses:
an unknown key, tensor or pre-tokenizer would make a model that runs and answers wrongly.

Needs gguf, numpy, safetensors and torch; not transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

# What a pre-tokenizer that llama.cpp calls by name is in the vocabulary of the `tokenizers` library.
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
PRE_TOKENIZERS: Mapping[str, Mapping[str, Any]] = {
    "gpt-2": _BYTE_LEVEL,
    "smollm": {
        "type": "Sequence",
        "pretokenizers": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    },
}

# Keys of the GGUF that say nothing about the computation.
_DESCRIPTIVE = ("GGUF.", "general.")
_HANDLED = {
    "llama.block_count",
    "llama.context_length",
    "llama.embedding_length",
    "llama.feed_forward_length",
    "llama.attention.head_count",
    "llama.attention.head_count_kv",
    "llama.attention.layer_norm_rms_epsilon",
    "llama.rope.freq_base",
    "llama.rope.dimension_count",
    "llama.vocab_size",
    "tokenizer.chat_template",
    "tokenizer.ggml.add_bos_token",
    "tokenizer.ggml.add_space_prefix",
    "tokenizer.ggml.bos_token_id",
    "tokenizer.ggml.eos_token_id",
    "tokenizer.ggml.merges",
    "tokenizer.ggml.model",
    "tokenizer.ggml.padding_token_id",
    "tokenizer.ggml.pre",
    "tokenizer.ggml.token_type",
    "tokenizer.ggml.tokens",
    "tokenizer.ggml.unknown_token_id",
}

_TOP_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL_TOKEN = 3  # tokenizer.ggml.token_type of a special token
_USER_TOKEN = 4  # an added token that is ordinary text


class ConversionError(Exception):
    """The GGUF file holds something that this converter does not know; the message names it."""


def convert(gguf_file: Path, folder: Path) -> dict[str, str]:
    """Writes the five files of a Hugging Face folder, the weights as model.safetensors.

    `folder` must exist. Weights are dequantised to float32 and rounded to bfloat16 (to nearest, ties to
    even).
    Returns a description: the GGUF's name, licence and quantisation. Raises ConversionError.
    """
    import gguf

    reader = gguf.GGUFReader(gguf_file)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    check_fields(fields)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    names = tensor_names(int(fields["llama.block_count"]), tensors.keys())
    tied = "output.weight" not in tensors

    _write_json(folder / "config.json", model_config(fields, tied=tied))
    _write_json(folder / "generation_config.json", generation_config(fields))
    _write_json(folder / "tokenizer.json", tokenizer_json(fields))
    _write_json(folder / "tokenizer_config.json", tokenizer_config(fields))
    _write_weights(folder / "model.safetensors", fields, tensors, names)

    kinds: dict[str, int] = {}
    for tensor in reader.tensors:
        kinds[tensor.tensor_type.name] = kinds.get(tensor.tensor_type.name, 0) + 1
    return {
        "name": str(fields.get("general.name", gguf_file.stem)),
        "license": str(fields.get("general.license", "not stated")),
        "quantisation": ", ".join(f"{kind} ×{count}" for kind, count in sorted(kinds.items())),
    }


def check_fields(fields: Mapping[str, Any]) -> None:
    """Refuses a file whose keys this converter does not understand wholly."""
    architecture = fields.get("general.architecture")
    if architecture != "llama":
        raise ConversionError(f"general.architecture is {architecture!r}; only 'llama' can be converted")
    unknown = [name for name in fields if name not in _HANDLED and not name.startswith(_DESCRIPTIVE)]
    if unknown:
        raise ConversionError(
            f"keys that could change the computation and are not known here: {', '.join(unknown)}"
        )
    if fields.get("tokenizer.ggml.model") != "gpt2":
        raise ConversionError(
            f"tokenizer.ggml.model is {fields.get('tokenizer.ggml.model')!r}; "
            "only byte-level BPE ('gpt2') is known"
        )
    if fields.get("tokenizer.ggml.pre") not in PRE_TOKENIZERS:
        raise ConversionError(
            f"tokenizer.ggml.pre is {fields.get('tokenizer.ggml.pre')!r}; "
            f"known are {', '.join(PRE_TOKENIZERS)}"
        )
    if fields.get("tokenizer.ggml.add_space_prefix") or fields.get("tokenizer.ggml.add_bos_token"):
        raise ConversionError("a space or BOS token that the tokenizer adds by itself is not supported")


def tensor_names(num_layers: int, present: Any) -> dict[str, str]:
    """GGUF name → Hugging Face name; every tensor of the file is named once and no tensor may be missing."""
    names = dict(_TOP_TENSORS)
    for layer in range(num_layers):
        for old, new in _LAYER_TENSORS.items():
            names[f"blk.{layer}.{old}"] = f"model.layers.{layer}.{new}"
    extra = [name for name in present if name not in names]
    missing = [name for name in names if name not in present and name != "output.weight"]
    if extra or missing:
        raise ConversionError(f"tensors do not fit a Llama model: unknown {extra}, missing {missing}")
    return {name: new for name, new in names.items() if name in present}


def unpermute(weight: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """Rows of q or k, [heads * head_dim, hidden]: llama.cpp's order → Hugging Face's.

    llama.cpp rotates neighbouring rows, Hugging Face rows half a head apart:

        llama.cpp     0 d/2  1 d/2+1  2 d/2+2 …        [heads, head_dim / 2, 2]
        Hugging Face  0 1 2 … d/2 d/2+1 d/2+2 …        [heads, 2, head_dim / 2]
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return pairs.swapaxes(1, 2).reshape(rows, columns)


def model_config(fields: Mapping[str, Any], *, tied: bool) -> dict[str, Any]:
    heads = int(fields["llama.attention.head_count"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "head_dim": int(fields["llama.rope.dimension_count"]),
        "hidden_act": "silu",
        "hidden_size": int(fields["llama.embedding_length"]),
        "intermediate_size": int(fields["llama.feed_forward_length"]),
        "max_position_embeddings": int(fields["llama.context_length"]),
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": int(fields["llama.block_count"]),
        "num_key_value_heads": int(fields.get("llama.attention.head_count_kv", heads)),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
        "rms_norm_eps": _shortest(fields["llama.attention.layer_norm_rms_epsilon"]),
        "rope_scaling": None,
        "rope_theta": _shortest(fields["llama.rope.freq_base"]),
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": int(fields.get("llama.vocab_size", len(fields["tokenizer.ggml.tokens"]))),
    }


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "bos_token_id": int(fields["tokenizer.ggml.bos_token_id"]),
        "eos_token_id": int(fields["tokenizer.ggml.eos_token_id"]),
        "pad_token_id": int(fields["tokenizer.ggml.padding_token_id"]),
    }


def tokenizer_json(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The `tokenizers` library's file: byte-level BPE with the GGUF's vocabulary and special tokens."""
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise ConversionError("tokenizer.ggml.tokens holds the same token twice")
    kinds = [int(kind) for kind in fields["tokenizer.ggml.token_type"]]
    merges = [merge.split(" ") for merge in fields["tokenizer.ggml.merges"]]
    broken = [merge for merge in merges if len(merge) != 2]
    if broken:
        raise ConversionError(f"tokenizer.ggml.merges: not two parts: {broken[:3]}")
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": kind == _CONTROL_TOKEN,
        }
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=True))
        if kind in (_CONTROL_TOKEN, _USER_TOKEN)
    ]
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": PRE_TOKENIZERS[fields["tokenizer.ggml.pre"]],
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: index for index, token in enumerate(tokens)},
            "merges": merges,
        },
    }


def tokenizer_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "add_prefix_space": False,
        "bos_token": tokens[int(fields["tokenizer.ggml.bos_token_id"])],
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[int(fields["tokenizer.ggml.eos_token_id"])],
        "model_max_length": int(fields["llama.context_length"]),
        "pad_token": tokens[int(fields["tokenizer.ggml.padding_token_id"])],
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": tokens[int(fields["tokenizer.ggml.unknown_token_id"])],
    }
    if "tokenizer.chat_template" in fields:
        config["chat_template"] = fields["tokenizer.chat_template"]
    return config


def _write_weights(
    file: Path, fields: Mapping[str, Any], tensors: Mapping[str, Any], names: Mapping[str, str]
) -> None:
    import gguf
    import torch
    from safetensors.torch import save_file

    heads = int(fields["llama.attention.head_count"])
    kv_heads = int(fields.get("llama.attention.head_count_kv", heads))
    entries: dict[str, torch.Tensor] = {}
    for old, new in names.items():
        tensor = tensors[old]
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if values.shape != tuple(reversed([int(size) for size in tensor.shape])):
            raise ConversionError(f"{old}: {values.shape} after dequantisation, the file says {tensor.shape}")
        if not np.isfinite(values).all():
            raise ConversionError(f"{old} holds values that are not finite")
        if old.endswith("attn_q.weight"):
            values = unpermute(values, heads)
        elif old.endswith("attn_k.weight"):
            values = unpermute(values, kv_heads)
        entries[new] = torch.from_numpy(np.array(values)).to(torch.bfloat16)
    save_file(entries, file, metadata={"format": "pt"})


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 → 1e-05."""
    return float(str(np.float32(value)))


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
