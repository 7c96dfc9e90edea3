"""A Hugging Face ``config.json`` becomes a `ModelGeometry`, or is refused by the key at fault.

Both spellings of the rotary part are read to the same result: ``rope_theta`` with ``rope_scaling``
    (transformers 4)
and ``rope_parameters`` (transformers 5). Every key must be understood or known to leave the mathematics
alone; any other is refused, because a key that is silently skipped can mean wrong frequencies or a missing
window. A null value counts as an absent key. Where a key is absent, the default is that of the model's own
configuration class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from .errors import ConfigError, shown, suggestion, whole
from .geometry import LayerGroup, ModelGeometry
from .keys import Keys
from .rope import POSITION_LIMIT, RopeKind, RopeSpec

__all__ = ["LayerGroup", "ModelGeometry", "geometry_from_config"]


@dataclass(frozen=True, slots=True)
class _Family:
    model_type: str
    attention_bias: Literal["configured"] | tuple[bool, bool]  # or fixed: (query, key and value; output)
    mlp_bias: Literal["configured"] | bool
    window: Literal["none", "always", "switched"]
    qk_norm: bool = False
    implicit_heads: bool = False  # an absent num_key_value_heads means one per head
    implicit_head_dim: bool = True  # an absent head_dim means hidden_size / num_attention_heads


_FAMILIES = {
    "LlamaForCausalLM": _Family("llama", "configured", "configured", "none", implicit_heads=True),
    "MistralForCausalLM": _Family("mistral", (False, False), False, "always"),
    "Qwen2ForCausalLM": _Family("qwen2", (True, False), False, "switched"),
    "Qwen3ForCausalLM": _Family(
        "qwen3", "configured", False, "switched", qk_norm=True, implicit_head_dim=False
    ),
}

_SIZE_LIMIT = 2**24
_LAYER_LIMIT = 4096
_DEFAULT_THETA = 10000.0
_DTYPES = ("float32", "float16", "bfloat16")

# Keys whose only supported value leaves the mathematics as it is.
_FIXED: dict[str, object] = {
    "add_cross_attention": False,
    "is_decoder": False,
    "is_encoder_decoder": False,
    "partial_rotary_factor": 1.0,
    "pruned_heads": {},
    "rope_interleaved": False,
    "tie_encoder_decoder": False,
    "use_mrope": False,
}

# Keys about training, sampling defaults, labels and bookkeeping.
_INERT = frozenset(
    """
    _attn_implementation _attn_implementation_autoset _commit_hash _flash_attn_2_enabled _name_or_path
    attention_dropout attn_implementation bad_words_ids begin_suppress_tokens cache_implementation
    chunk_size_feed_forward cross_attention_hidden_size decoder_start_token_id diversity_penalty do_sample
    early_stopping encoder_no_repeat_ngram_size exponential_decay_length_penalty finetuning_task
    forced_bos_token_id forced_eos_token_id gradient_checkpointing id2label initializer_range is_llama_config
    label2id length_penalty max_length min_length no_repeat_ngram_size num_beam_groups num_beams
    num_return_sequences output_attentions output_hidden_states output_scores pad_token_id prefix
    pretraining_tp problem_type remove_invalid_values repetition_penalty return_dict return_dict_in_generate
    sep_token_id suppress_tokens task_specific_params temperature tf_legacy_loss tokenizer_class top_k top_p
    torchscript transformers.js_config transformers_version typical_p unsloth_fixed unsloth_version
    use_bfloat16 use_cache """.split()
)

_ROPE_FIELDS = {  # key of the rotary dict -> field of RopeSpec
    "factor": "factor",
    "low_freq_factor": "low_freq_factor",
    "high_freq_factor": "high_freq_factor",
    "original_max_position_embeddings": "original_max_positions",
    "beta_fast": "beta_fast",
    "beta_slow": "beta_slow",
    "attention_factor": "attention_factor",
    "mscale": "mscale",
    "mscale_all_dim": "mscale_all_dim",
    "truncate": "truncate",
}

_LENGTH_DEPENDENT = {
    "dynamic": "its frequencies depend on the current length, so stored keys cannot be moved",
    "longrope": "its frequencies depend on the total length, so short and long states cannot meet",
    "su": "its frequencies depend on the total length, so short and long states cannot meet",
}


def geometry_from_config(config: Mapping[str, object]) -> ModelGeometry:
    """The geometry that a model's ``config.json`` describes.

    Args:
        config: the parsed JSON object, in the form of transformers 4 or 5.

    Raises:
        ConfigError: with `field` naming the key. ``unsupported_model`` for an architecture, a rope type, a
            window or any other key whose mathematics is not known here; ``invalid_config`` for a value that
            is missing, contradictory, of the wrong type or out of range.
    """
    keys = Keys(config, "")
    architecture, family = _family(keys)
    num_layers = keys.whole("num_hidden_layers", 1, _LAYER_LIMIT)
    hidden_size = keys.whole("hidden_size", 1, _SIZE_LIMIT)
    vocab_size = keys.whole("vocab_size", 1, _SIZE_LIMIT)
    max_positions = keys.whole("max_position_embeddings", 1, POSITION_LIMIT)
    num_heads = keys.whole("num_attention_heads", 1, _SIZE_LIMIT)
    num_kv_heads = _num_kv_heads(keys, family, num_heads)
    head_dim = _head_dim(keys, family, hidden_size, num_heads)
    attention_bias, attention_out_bias = _attention_bias(keys, family)
    _refuse_window(keys, family, num_layers, max_positions)
    group = LayerGroup(
        layers=tuple(range(num_layers)),
        kv_kind="full",
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rope=_rope(keys, head_dim, max_positions),
        window=None,
        softcap=None,
        sinks=False,
        scale=head_dim**-0.5,
    )
    geometry = ModelGeometry(
        architecture=architecture,
        model_type=family.model_type,
        num_layers=num_layers,
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=keys.whole("intermediate_size", 1, _SIZE_LIMIT),
        vocab_size=vocab_size,
        max_positions=max_positions,
        rms_norm_eps=keys.real("rms_norm_eps", 1e-12, 1.0),
        tie_word_embeddings=keys.flag("tie_word_embeddings"),
        attention_bias=attention_bias,
        attention_out_bias=attention_out_bias,
        mlp_bias=keys.flag("mlp_bias") if family.mlp_bias == "configured" else keys.fixed("mlp_bias", False),
        qk_norm=family.qk_norm,
        hidden_act=_hidden_act(keys),
        dtype=_dtype(keys),
        bos_token_id=keys.token_id("bos_token_id", vocab_size),
        eos_token_ids=_eos_token_ids(keys, vocab_size),
        groups=(group,),
    )
    for name, value in _FIXED.items():
        keys.fixed(name, value)
    keys.refuse_rest(_INERT)
    return geometry


def _family(keys: Keys) -> tuple[str, _Family]:
    named = keys.take("architectures")
    model_type = keys.take("model_type")
    by_type = {family.model_type: name for name, family in _FAMILIES.items()}
    if named is None:
        if not isinstance(model_type, str) or model_type not in by_type:
            known = ", ".join(by_type)
            keys.unsupported("model_type", f"{shown(model_type)} is not one of {known}")
        return by_type[model_type], _FAMILIES[by_type[model_type]]
    if not isinstance(named, list | tuple) or len(named) != 1 or not isinstance(named[0], str):
        keys.invalid("architectures", f"must be a list of one name, not {shown(named)}")
    architecture = named[0]
    if architecture not in _FAMILIES:
        known = ", ".join(_FAMILIES)
        keys.unsupported(
            "architectures", f"{architecture!r} is not one of {known}{suggestion(architecture, _FAMILIES)}"
        )
    family = _FAMILIES[architecture]
    if model_type is not None and model_type != family.model_type:
        keys.unsupported("model_type", f"must be {family.model_type!r} for {architecture}")
    return architecture, family


def _num_kv_heads(keys: Keys, family: _Family, num_heads: int) -> int:
    default = num_heads if family.implicit_heads or keys.is_null("num_key_value_heads") else None
    num_kv_heads = keys.whole("num_key_value_heads", 1, num_heads, default)
    if num_heads % num_kv_heads:
        keys.invalid("num_key_value_heads", f"must divide num_attention_heads = {num_heads}")
    return num_kv_heads


def _head_dim(keys: Keys, family: _Family, hidden_size: int, num_heads: int) -> int:
    default = hidden_size // num_heads if family.implicit_head_dim else None
    given = keys.has("head_dim")
    head_dim = keys.whole("head_dim", 2, 2**16, default)
    if not given and hidden_size % num_heads:
        keys.invalid(
            "hidden_size", f"must be a multiple of num_attention_heads = {num_heads} without head_dim"
        )
    if head_dim % 2 or head_dim < 2:
        keys.invalid("head_dim", f"must be even to be rotated in pairs, not {head_dim}")
    return head_dim


def _attention_bias(keys: Keys, family: _Family) -> tuple[bool, bool]:
    if family.attention_bias == "configured":
        bias = keys.flag("attention_bias")
        return bias, bias
    keys.fixed("attention_bias", family.attention_bias[0])
    return family.attention_bias


def _refuse_window(keys: Keys, family: _Family, num_layers: int, max_positions: int) -> None:
    """Refuse a window that could hide a token; one no shorter than every context never does."""
    layer_types = keys.take("layer_types")
    if layer_types is not None:
        if not isinstance(layer_types, list | tuple) or len(layer_types) != num_layers:
            keys.invalid("layer_types", f"must be a list of {num_layers} layer types")
        for layer, layer_type in enumerate(layer_types):
            if layer_type != "full_attention":
                keys.unsupported(
                    f"layer_types[{layer}]", f"must be 'full_attention', not {shown(layer_type)}"
                )
    if family.window == "none":
        return  # a window key is then left over and refused
    absent = not keys.has("sliding_window") and not keys.is_null("sliding_window")
    window = None if not keys.has("sliding_window") else keys.whole("sliding_window", 1, POSITION_LIMIT)
    in_use = window is not None and window < max_positions
    if family.window == "always":
        if absent:
            keys.invalid("sliding_window", "is absent, which means 4096; write null for no window")
    else:
        first = keys.whole("max_window_layers", 0, _LAYER_LIMIT, 28)
        switched = keys.flag("use_sliding_window")
        if switched and absent:
            keys.invalid("sliding_window", "is needed with use_sliding_window")
        in_use = in_use and switched and layer_types is None and first < num_layers
    if in_use:
        keys.unsupported(
            "sliding_window",
            f"a window of {window} below max_position_embeddings = {max_positions} is not supported",
        )


def _rope(keys: Keys, head_dim: int, max_positions: int) -> RopeSpec:
    name, rotary = _rotary_dict(keys)
    paths = {field: f"{name}.{key}" for key, field in _ROPE_FIELDS.items()}
    paths["theta"] = f"{name}.rope_theta" if rotary.has("rope_theta") else "rope_theta"
    paths["kind"] = f"{name}.rope_type" if rotary.has("rope_type") else f"{name}.type"
    theta = rotary.agreed("rope_theta", keys.take("rope_theta"))
    kind = rotary.agreed("rope_type", rotary.take("type"))
    if isinstance(kind, str) and kind in _LENGTH_DEPENDENT:
        message = f"{kind!r} is not supported: {_LENGTH_DEPENDENT[kind]}"
        raise ConfigError("unsupported_model", message, paths["kind"])
    fields = {field: rotary.take(key) for key, field in _ROPE_FIELDS.items()}
    if kind in ("llama3", "yarn"):
        if keys.has("original_max_position_embeddings"):
            paths["original_max_positions"] = "original_max_position_embeddings"
            fields["original_max_positions"] = keys.take("original_max_position_embeddings")
        elif fields["original_max_positions"] is None:
            fields["original_max_positions"] = max_positions
    if kind == "yarn" and fields["factor"] is None:
        original, path = fields["original_max_positions"], paths["original_max_positions"]
        fields["factor"] = max_positions / whole(
            ConfigError, "invalid_config", original, path, 1, POSITION_LIMIT
        )
    rotary.fixed("partial_rotary_factor", 1.0)
    rotary.refuse_rest(())
    try:
        return RopeSpec(
            cast(RopeKind, "default" if kind is None else kind),
            cast(float, _DEFAULT_THETA if theta is None else theta),
            head_dim,
            head_dim,
            **cast(Any, fields),
        )
    except ConfigError as error:
        field = paths.get(error.field or "", error.field)
        raise ConfigError(error.code, error.message, field) from None


def _rotary_dict(keys: Keys) -> tuple[str, Keys]:
    v4, v5 = keys.take("rope_scaling"), keys.take("rope_parameters")
    if v4 is not None and v5 is not None and v4 != v5:
        keys.invalid("rope_scaling", "contradicts rope_parameters; keep one of them")
    name = "rope_parameters" if v5 is not None else "rope_scaling"
    value = v5 if v5 is not None else v4
    if value is not None and not isinstance(value, Mapping):
        keys.invalid(name, f"must be an object or null, not {shown(value)}")
    return name, Keys(value or {}, name)


def _hidden_act(keys: Keys) -> str:
    act = keys.take("hidden_act")
    if act not in (None, "silu"):
        keys.unsupported("hidden_act", f"must be 'silu', not {shown(act)}")
    return "silu"


def _dtype(keys: Keys) -> str | None:
    old, new = keys.take("torch_dtype"), keys.take("dtype")
    if old is not None and new is not None and old != new:
        keys.invalid("torch_dtype", f"contradicts dtype = {shown(new)}; keep one of them")
    dtype = old if new is None else new
    if dtype is None:
        return None
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        key = "torch_dtype" if new is None else "dtype"
        keys.unsupported(key, f"must be one of {', '.join(_DTYPES)}, not {shown(dtype)}")
    return dtype


def _eos_token_ids(keys: Keys, vocab_size: int) -> tuple[int, ...]:
    value = keys.take("eos_token_id")
    if value is None:
        return ()
    several = value if isinstance(value, list | tuple) else [value]
    return tuple(keys.checked_whole(item, "eos_token_id", 0, vocab_size - 1) for item in several)
