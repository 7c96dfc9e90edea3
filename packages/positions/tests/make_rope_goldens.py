"""Writes data/rope_goldens.json: frequencies and cos/sin multipliers as transformers computes them.

Run it with transformers and torch installed: ``python tests/make_rope_goldens.py``.
"""

import json
from pathlib import Path

GOLDENS = Path(__file__).parent / "data" / "rope_goldens.json"

LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn"}

# name -> (head_dim, max_position_embeddings, rope_parameters)
CASES = {
    "default": (64, 2048, {"rope_type": "default", "rope_theta": 10000.0}),
    "default theta 5e5": (128, 8192, {"rope_type": "default", "rope_theta": 500000.0}),
    "default head of 80": (80, 4096, {"rope_type": "default", "rope_theta": 1000000.0}),
    "linear 2": (128, 8192, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
    "linear 4 head of 96": (96, 16384, {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4}),
    "llama3 8": (
        128,
        131072,
        LLAMA3 | {"rope_theta": 500000.0, "factor": 8.0, "original_max_position_embeddings": 8192},
    ),
    "llama3 32": (
        64,
        131072,
        LLAMA3 | {"rope_theta": 500000.0, "factor": 32.0, "original_max_position_embeddings": 8192},
    ),
    "llama3 without original": (64, 4096, LLAMA3 | {"rope_theta": 10000.0, "factor": 4.0}),
    "yarn 4": (
        128,
        131072,
        YARN | {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 32768},
    ),
    "yarn 32 not truncated": (
        64,
        131072,
        YARN
        | {
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
    ),
    "yarn mscale quotient": (
        64,
        163840,
        YARN
        | {
            "rope_theta": 10000.0,
            "factor": 40,
            "original_max_position_embeddings": 4096,
            "mscale": 1.0,
            "mscale_all_dim": 0.707,
        },
    ),
    "yarn mscale alone": (
        64,
        16384,
        YARN
        | {"rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4096, "mscale": 2.0},
    ),
    "yarn attention factor": (
        64,
        16384,
        YARN
        | {
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.25,
        },
    ),
    "yarn betas": (
        96,
        16384,
        YARN
        | {
            "rope_theta": 10000.0,
            "factor": 8.0,
            "original_max_position_embeddings": 2048,
            "beta_fast": 64,
            "beta_slow": 2,
        },
    ),
    "yarn factor from the ratio": (
        64,
        32768,
        YARN | {"rope_theta": 10000.0, "factor": None, "original_max_position_embeddings": 4096},
    ),
    "yarn factor 1": (
        64,
        4096,
        YARN | {"rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 4096},
    ),
    "yarn ramp of no width": (
        8,
        64,
        YARN | {"rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 16},
    ),
}


def config(name: str) -> dict[str, object]:
    """A small Llama configuration with the rotary part of the case."""
    head_dim, max_positions, rope_parameters = CASES[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4 * head_dim,
        "intermediate_size": 8 * head_dim,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": head_dim,
        "vocab_size": 100,
        "max_position_embeddings": max_positions,
        "rms_norm_eps": 1e-5,
        "rope_parameters": dict(rope_parameters),
    }


def computed(case: dict[str, object]) -> tuple[list[float], float]:
    """Frequencies (float32, as floats) and cos/sin multiplier of a configuration, from transformers."""
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    values = dict(case, rope_parameters=dict(case["rope_parameters"]))
    values.pop("architectures")
    values.pop("model_type")
    config = LlamaConfig(**values, bos_token_id=None, eos_token_id=None)
    kind = config.rope_parameters["rope_type"]
    init = ROPE_INIT_FUNCTIONS.get(kind, LlamaRotaryEmbedding.compute_default_rope_parameters)
    inv_freq, scaling = init(config, device=None)
    return [float(freq) for freq in inv_freq], float(scaling)


def main() -> None:
    goldens = []
    for name in CASES:
        inv_freq, scaling = computed(config(name))
        goldens.append(
            {"name": name, "config": config(name), "inv_freq": inv_freq, "attention_scaling": scaling}
        )
    GOLDENS.write_text(json.dumps(goldens, indent=1) + "\n")


if __name__ == "__main__":
    main()
