"""Real configurations, in the spelling of transformers 4 and 5, and what is refused by which key."""

import math
from dataclasses import replace

import pytest

from dagengine_positions import ConfigError, RopeSpec, geometry_from_config

SMOLLM2_135M = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 576,
    "initializer_range": 0.041666666666666664,
    "intermediate_size": 1536,
    "is_llama_config": True,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 9,
    "num_hidden_layers": 30,
    "num_key_value_heads": 3,
    "pad_token_id": 2,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_interleaved": False,
    "rope_scaling": None,
    "rope_theta": 100000,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}},
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 49152,
}
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.3",
    "use_cache": True,
    "vocab_size": 128256,
}
LLAMA_3_2_1B = LLAMA_3_1_8B | {
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "rope_scaling": {**LLAMA_3_1_8B["rope_scaling"], "factor": 32.0},
    "tie_word_embeddings": True,
    "transformers_version": "4.45.0.dev0",
}
MISTRAL_7B_V0_3 = {
    "architectures": ["MistralForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 32768,
    "model_type": "mistral",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.42.0.dev0",
    "use_cache": True,
    "vocab_size": 32768,
}
MISTRAL_NEMO = MISTRAL_7B_V0_3 | {
    "head_dim": 128,
    "hidden_size": 5120,
    "max_position_embeddings": 131072,
    "num_hidden_layers": 40,
    "vocab_size": 131072,
}
QWEN2_5_0_5B = {
    "architectures": ["Qwen2ForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "hidden_act": "silu",
    "hidden_size": 896,
    "initializer_range": 0.02,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.1",
    "use_cache": True,
    "use_mrope": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN2_5_7B_YARN = QWEN2_5_0_5B | {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "max_window_layers": 28,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "rope_scaling": {"factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn"},
    "sliding_window": 131072,
    "tie_word_embeddings": False,
    "vocab_size": 152064,
}
QWEN3_4B = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "initializer_range": 0.02,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "max_window_layers": 36,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
}

LLAMA3_ROPE = RopeSpec(
    "llama3",
    500000.0,
    128,
    128,
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
)
REAL = {
    # name: (config, head_dim, rope, (attention_bias, attention_out_bias, qk_norm), eos_token_ids)
    "SmolLM2-135M": (SMOLLM2_135M, 64, RopeSpec("default", 1e5, 64, 64), (False, False, False), (2,)),
    "Llama-3.1-8B": (LLAMA_3_1_8B, 128, LLAMA3_ROPE, (False, False, False), (128001, 128008, 128009)),
    "Llama-3.2-1B": (
        LLAMA_3_2_1B,
        64,
        replace(LLAMA3_ROPE, factor=32.0, head_dim=64, rotary_dim=64),
        (False, False, False),
        (128001, 128008, 128009),
    ),
    "Mistral-7B-v0.3": (
        MISTRAL_7B_V0_3,
        128,
        RopeSpec("default", 1e6, 128, 128),
        (False, False, False),
        (2,),
    ),
    "Mistral-Nemo": (MISTRAL_NEMO, 128, RopeSpec("default", 1e6, 128, 128), (False, False, False), (2,)),
    "Qwen2.5-0.5B": (
        QWEN2_5_0_5B,
        64,
        RopeSpec("default", 1e6, 64, 64),
        (True, False, False),
        (151645,),
    ),
    "Qwen2.5-7B with yarn": (
        QWEN2_5_7B_YARN,
        128,
        RopeSpec("yarn", 1e6, 128, 128, factor=4.0, original_max_positions=32768),
        (True, False, False),
        (151645,),
    ),
    "Qwen3-4B": (QWEN3_4B, 128, RopeSpec("default", 1e6, 128, 128), (False, False, True), (151645,)),
}


def as_v5(config):
    """The same configuration as transformers 5 writes it."""
    new = {k: v for k, v in config.items() if k not in ("rope_theta", "rope_scaling", "torch_dtype")}
    scaling = dict(config.get("rope_scaling") or {"rope_type": "default"})
    scaling["rope_type"] = scaling.pop("type", None) or scaling["rope_type"]
    new["rope_parameters"] = {"rope_theta": config["rope_theta"], **scaling}
    new["dtype"] = config["torch_dtype"]
    new["transformers_version"] = "5.0.0"
    if "use_sliding_window" in config:
        new["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
        new["sliding_window"] = None
    return new


def without(config, *keys):
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("spelling", [dict, as_v5], ids=["v4", "v5"])
@pytest.mark.parametrize("name", REAL)
def test_real_configurations(name, spelling):
    config, head_dim, rope, (bias, out_bias, qk_norm), eos = REAL[name]
    geometry = geometry_from_config(spelling(config))
    assert geometry.architecture == config["architectures"][0]
    assert geometry.model_type == config["model_type"]
    assert geometry.num_layers == config["num_hidden_layers"]
    assert geometry.hidden_size == config["hidden_size"]
    assert geometry.num_heads == config["num_attention_heads"]
    assert geometry.num_kv_heads == config["num_key_value_heads"]
    assert geometry.head_dim == head_dim
    assert geometry.intermediate_size == config["intermediate_size"]
    assert geometry.vocab_size == config["vocab_size"]
    assert geometry.max_positions == config["max_position_embeddings"]
    assert geometry.rms_norm_eps == config["rms_norm_eps"]
    assert geometry.tie_word_embeddings is config["tie_word_embeddings"]
    assert (geometry.attention_bias, geometry.attention_out_bias) == (bias, out_bias)
    assert geometry.mlp_bias is False
    assert geometry.qk_norm is qk_norm
    assert geometry.hidden_act == "silu"
    assert geometry.dtype == "bfloat16"
    assert geometry.bos_token_id == config["bos_token_id"]
    assert geometry.eos_token_ids == eos
    (group,) = geometry.groups
    assert group.layers == tuple(range(geometry.num_layers))
    assert (group.kv_kind, group.num_kv_heads, group.head_dim) == ("full", geometry.num_kv_heads, head_dim)
    assert group.rope == rope
    assert (group.window, group.softcap, group.sinks, group.chunk) == (None, None, False, None)
    assert group.scale == head_dim**-0.5


@pytest.mark.parametrize("name", REAL)
def test_both_spellings_give_one_geometry(name):
    config = REAL[name][0]
    assert geometry_from_config(as_v5(config)) == geometry_from_config(config)


@pytest.mark.parametrize("name", REAL)
def test_what_transformers_writes_gives_the_same_geometry(name):
    pytest.importorskip("torch")
    auto = pytest.importorskip("transformers", minversion="5.0").AutoConfig
    config = REAL[name][0]
    given = without(config, "model_type", "is_llama_config", "rope_interleaved", "use_mrope")
    written = auto.for_model(config["model_type"], **given).to_dict()
    assert geometry_from_config(written | {"dtype": "bfloat16"}) == geometry_from_config(config)


@pytest.mark.parametrize(
    "change",
    [
        {"rope_scaling": {}},
        {"rope_scaling": {"type": "default"}},
        {"rope_scaling": {"rope_type": "default", "type": "default"}},
        {"rope_scaling": {"rope_type": None, "type": "default", "factor": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 100000.0}},
        {"rope_parameters": {"rope_theta": 100000, "partial_rotary_factor": 1.0}, "rope_theta": None},
        {"partial_rotary_factor": 1},
        {"head_dim": None},
        {"head_dim": 64},
        {"attn_logit_softcapping": None},
        {"layer_types": ["full_attention"] * 30},
        {"architectures": None},
        {"model_type": None},
        {"attention_bias": None, "mlp_bias": None, "hidden_act": None},
    ],
    ids=repr,
)
def test_other_spellings_of_one_model(change):
    assert geometry_from_config(SMOLLM2_135M | change) == geometry_from_config(SMOLLM2_135M)


def test_absent_values_default_as_in_the_models_own_configuration_class():
    sparse = without(
        SMOLLM2_135M,
        *("rope_theta", "num_key_value_heads", "tie_word_embeddings", "torch_dtype", "hidden_act"),
        *("attention_bias", "mlp_bias", "bos_token_id", "eos_token_id"),
    )
    geometry = geometry_from_config(sparse)
    assert geometry.groups[0].rope.theta == 10000.0
    assert geometry.num_kv_heads == geometry.num_heads == 9
    assert geometry.tie_word_embeddings is False
    assert (geometry.dtype, geometry.bos_token_id, geometry.eos_token_ids) == (None, None, ())


def test_llama_biases_are_configured():
    geometry = geometry_from_config(SMOLLM2_135M | {"attention_bias": True, "mlp_bias": True})
    assert (geometry.attention_bias, geometry.attention_out_bias, geometry.mlp_bias) == (True, True, True)
    geometry = geometry_from_config(QWEN3_4B | {"attention_bias": True})
    assert (geometry.attention_bias, geometry.attention_out_bias) == (True, True)


def test_a_top_level_original_length_wins():
    config = QWEN2_5_7B_YARN | {"original_max_position_embeddings": 16384}
    assert geometry_from_config(config).groups[0].rope.original_max_positions == 16384


@pytest.mark.parametrize(
    "config",
    [
        MISTRAL_7B_V0_3 | {"sliding_window": 32768},
        QWEN2_5_0_5B | {"use_sliding_window": True},
        QWEN2_5_0_5B | {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 24},
        QWEN2_5_0_5B | {"sliding_window": 8, "max_window_layers": 0},
    ],
    ids=["as long as every context", "also", "on layers that there are not", "switched off"],
)
def test_a_window_that_hides_nothing_is_none(config):
    assert geometry_from_config(config).groups[0].window is None


HUGE = 10**400
LINEAR = {"rope_type": "linear", "factor": 2.0}
YARN = QWEN2_5_7B_YARN["rope_scaling"]
LLAMA3 = LLAMA_3_1_8B["rope_scaling"]
UNSUPPORTED = [
    (SMOLLM2_135M, {"architectures": ["GPT2LMHeadModel"]}, "architectures"),
    (SMOLLM2_135M, {"architectures": ["LlamaForCausalLm"]}, "architectures"),
    (SMOLLM2_135M, {"model_type": "smollm3"}, "model_type"),
    (SMOLLM2_135M, {"architectures": None, "model_type": "gpt2"}, "model_type"),
    (SMOLLM2_135M, {"architectures": None, "model_type": ["llama"]}, "model_type"),
    (SMOLLM2_135M, {"architectures": None, "model_type": None}, "model_type"),
    (SMOLLM2_135M, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.type"),
    (SMOLLM2_135M, {"rope_scaling": {"rope_type": "longrope"}}, "rope_scaling.rope_type"),
    (SMOLLM2_135M, {"rope_scaling": {"rope_type": "mrope"}}, "rope_scaling.rope_type"),
    (SMOLLM2_135M, {"rope_scaling": {"rope_type": True}}, "rope_scaling.rope_type"),
    (SMOLLM2_135M, {"rope_scaling": {"rope_type": ["yarn"]}}, "rope_scaling.rope_type"),
    (SMOLLM2_135M, {"rope_parameters": {"rope_type": "proportional"}}, "rope_parameters.rope_type"),
    (SMOLLM2_135M, {"rope_parameters": {"full_attention": {}}}, "rope_parameters.full_attention"),
    (SMOLLM2_135M, {"rope_scaling": LINEAR | {"mrope_section": [1]}}, "rope_scaling.mrope_section"),
    (SMOLLM2_135M, {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    (
        SMOLLM2_135M,
        {"rope_scaling": LINEAR | {"partial_rotary_factor": 0.5}},
        "rope_scaling.partial_rotary_factor",
    ),
    (SMOLLM2_135M, {"rope_interleaved": True}, "rope_interleaved"),
    (SMOLLM2_135M, {"hidden_act": "gelu"}, "hidden_act"),
    (SMOLLM2_135M, {"sliding_window": 4096}, "sliding_window"),
    (SMOLLM2_135M, {"layer_types": ["full_attention"] * 29 + ["chunked_attention"]}, "layer_types[29]"),
    (SMOLLM2_135M, {"torch_dtype": "float8_e4m3fn"}, "torch_dtype"),
    (SMOLLM2_135M, {"torch_dtype": None, "dtype": 16}, "dtype"),
    (SMOLLM2_135M, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (SMOLLM2_135M, {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    (SMOLLM2_135M, {"attention_multiplier": 0.1}, "attention_multiplier"),
    (SMOLLM2_135M, {"rope_thetta": 1.0}, "rope_thetta"),
    (SMOLLM2_135M, {"is_decoder": True}, "is_decoder"),
    (SMOLLM2_135M, {"pruned_heads": {"0": [1]}}, "pruned_heads"),
    (MISTRAL_7B_V0_3, {"sliding_window": 4096}, "sliding_window"),
    (MISTRAL_7B_V0_3, {"attention_bias": True}, "attention_bias"),
    (MISTRAL_7B_V0_3, {"mlp_bias": True}, "mlp_bias"),
    (QWEN2_5_0_5B, {"use_sliding_window": True, "sliding_window": 4096}, "sliding_window"),
    (QWEN2_5_0_5B, {"layer_types": ["sliding_attention"] * 24}, "layer_types[0]"),
    (QWEN2_5_0_5B, {"attention_bias": False}, "attention_bias"),
    (QWEN2_5_0_5B, {"use_mrope": True}, "use_mrope"),
    (QWEN3_4B, {"num_experts": 128}, "num_experts"),
]
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
)
BAD_SIZES = (math.nan, math.inf, HUGE, 2**40, -1, 0, True, "8", 8.0, [8])
BAD_REALS = (math.nan, math.inf, HUGE, -1.0, True, "8", [8], 0)
INVALID = [
    *((SMOLLM2_135M, {name: value}, name) for name in SIZES for value in (*BAD_SIZES, None)),
    *((SMOLLM2_135M, {"num_key_value_heads": value}, "num_key_value_heads") for value in (*BAD_SIZES, 2)),
    *((SMOLLM2_135M, {"head_dim": value}, "head_dim") for value in (*BAD_SIZES, 63, 1)),
    *((SMOLLM2_135M, {"rms_norm_eps": value}, "rms_norm_eps") for value in (*BAD_REALS, None)),
    *((SMOLLM2_135M, {"rope_theta": value}, "rope_theta") for value in BAD_REALS),
    *(
        (
            QWEN3_4B | {"rope_theta": None},
            {"rope_parameters": {"rope_theta": value}},
            "rope_parameters.rope_theta",
        )
        for value in BAD_REALS
    ),
    *((SMOLLM2_135M, {"tie_word_embeddings": value}, "tie_word_embeddings") for value in (0, "no", 1.0)),
    *((SMOLLM2_135M, {"attention_bias": value}, "attention_bias") for value in (1, "yes")),
    *((SMOLLM2_135M, {"bos_token_id": value}, "bos_token_id") for value in (-1, 49152, True, 1.0, HUGE)),
    *((SMOLLM2_135M, {"eos_token_id": value}, "eos_token_id") for value in (-1, 49152, [1, True], [[1]])),
    *(
        (SMOLLM2_135M, {"rope_scaling": {"type": "linear", "factor": value}}, "rope_scaling.factor")
        for value in (*BAD_REALS, 0.5, None)
    ),
    *(
        (SMOLLM2_135M, {"rope_scaling": YARN | {key: value}}, f"rope_scaling.{key}")
        for key in ("beta_fast", "beta_slow", "attention_factor", "original_max_position_embeddings")
        for value in BAD_REALS
    ),
    *(
        (SMOLLM2_135M, {"rope_scaling": YARN | {"factor": None, key: value}}, f"rope_scaling.{key}")
        for key in ("original_max_position_embeddings",)
        for value in BAD_REALS
    ),
    *(
        (SMOLLM2_135M, {"rope_scaling": LLAMA3 | {key: value}}, f"rope_scaling.{key}")
        for key in ("factor", "low_freq_factor", "high_freq_factor")
        for value in (*BAD_REALS, None)
    ),
    (SMOLLM2_135M, {"rope_scaling": YARN | {"truncate": 1}}, "rope_scaling.truncate"),
    *(
        (QWEN2_5_7B_YARN, {"original_max_position_embeddings": value}, "original_max_position_embeddings")
        for value in BAD_REALS
    ),
    (SMOLLM2_135M, {"num_attention_heads": 1, "num_key_value_heads": 1, "hidden_size": 2**24}, "head_dim"),
    (SMOLLM2_135M, {"rope_scaling": YARN | {"factor": None}}, "rope_scaling.factor"),
    (SMOLLM2_135M, {"rope_scaling": {"factor": 2.0}}, "rope_scaling.factor"),
    (SMOLLM2_135M, {"rope_scaling": LINEAR | {"type": "yarn"}}, "rope_scaling.rope_type"),
    (SMOLLM2_135M, {"rope_scaling": LINEAR | {"beta_fast": 32}}, "rope_scaling.beta_fast"),
    (SMOLLM2_135M, {"rope_scaling": "linear"}, "rope_scaling"),
    (SMOLLM2_135M, {"rope_parameters": [1]}, "rope_parameters"),
    (SMOLLM2_135M, {"rope_parameters": {"rope_theta": 2.0}}, "rope_parameters.rope_theta"),
    (SMOLLM2_135M, {"rope_parameters": LINEAR, "rope_scaling": YARN}, "rope_scaling"),
    (SMOLLM2_135M, {"dtype": "float16"}, "torch_dtype"),
    (SMOLLM2_135M, {"architectures": "LlamaForCausalLM"}, "architectures"),
    (SMOLLM2_135M, {"architectures": ["LlamaForCausalLM", "LlamaModel"]}, "architectures"),
    (SMOLLM2_135M, {"architectures": [True]}, "architectures"),
    (SMOLLM2_135M, {"layer_types": ["full_attention"]}, "layer_types"),
    (SMOLLM2_135M, {"hidden_size": 577}, "hidden_size"),
    (QWEN2_5_0_5B, {"use_sliding_window": 1}, "use_sliding_window"),
    (QWEN2_5_0_5B, {"max_window_layers": True}, "max_window_layers"),
    (MISTRAL_7B_V0_3, {"sliding_window": True}, "sliding_window"),
    (MISTRAL_7B_V0_3, {"sliding_window": math.nan}, "sliding_window"),
    (QWEN3_4B, {"head_dim": None}, "head_dim"),
]


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        geometry_from_config(config)
    assert caught.value.message
    assert len(str(caught.value)) < 300
    return caught.value.code, caught.value.field


@pytest.mark.parametrize(("config", "change", "field"), UNSUPPORTED)
def test_unknown_mathematics_is_refused_by_key(config, change, field):
    assert refusal(config | change) == ("unsupported_model", field)


@pytest.mark.parametrize(("config", "change", "field"), INVALID)
def test_impossible_values_are_refused_by_key(config, change, field):
    assert refusal(config | change) == ("invalid_config", field)


@pytest.mark.parametrize(
    ("config", "key"),
    [(SMOLLM2_135M, name) for name in SIZES]
    + [
        (SMOLLM2_135M, "rms_norm_eps"),
        (MISTRAL_7B_V0_3, "sliding_window"),
        (MISTRAL_7B_V0_3, "num_key_value_heads"),
        (QWEN3_4B, "head_dim"),
        (QWEN3_4B | {"use_sliding_window": True}, "sliding_window"),
    ],
)
def test_missing_keys_are_named(config, key):
    assert refusal(without(config, key)) == ("invalid_config", key)


@pytest.mark.parametrize("config", [None, [], "config.json", 3])
def test_what_is_no_object_is_refused(config):
    assert refusal(config) == ("invalid_config", None)


def test_a_misspelt_key_suggests_the_right_one():
    with pytest.raises(ConfigError, match="did you mean 'rope_theta'"):
        geometry_from_config(SMOLLM2_135M | {"rope_thetta": 1.0})


def test_length_dependent_kinds_say_why():
    with pytest.raises(ConfigError, match="stored keys cannot be moved"):
        geometry_from_config(SMOLLM2_135M | {"rope_scaling": {"type": "dynamic", "factor": 2.0}})
