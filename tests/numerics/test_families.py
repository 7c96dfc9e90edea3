"""Tiny random models of each family, saved by transformers: the engine's logits are transformers' logits.

Configurations in the form of transformers 4 and 5, several rope types, odd head dimensions, grouped heads,
tied and untied heads, biases, and folders with two shards and a file that belongs to neither.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from devices import DEVICES, on_gpu

from dagengine.errors import DagError
from dagengine.request import ContextRef

from .driver import Driver, request

transformers = pytest.importorskip("transformers")

BAR = 1e-4
NUM_TOKENS = 32
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
LINEAR = {"rope_type": "linear", "factor": 3.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}


@dataclass(frozen=True)
class Case:
    """A model to build.

    Attributes:
        family: prefix of transformers' classes.
        config: beside `SMALL`.
        rope: rotary parameters without theta; None is the default type.
        form: of config.json: transformers' major version.
        shards: split into two files, with stray ones beside them.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    rope: dict[str, Any] | None = None
    form: int = 5
    shards: bool = False


SMALL = {
    "vocab_size": 97,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "initializer_range": 0.25,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CASES = {
    "llama": Case("Llama"),
    "llama, version 4": Case("Llama", form=4),
    "llama, head_dim 26, one KV head": Case("Llama", {"head_dim": 26, "num_key_value_heads": 1}),
    "llama, no sharing of heads": Case("Llama", {"num_key_value_heads": 4}),
    "llama, tied, two shards": Case("Llama", {"tie_word_embeddings": True}, shards=True),
    "llama, biases": Case("Llama", {"attention_bias": True, "mlp_bias": True}, form=4),
    "llama, llama3 rope": Case("Llama", {"head_dim": 16}, LLAMA3),
    "llama, llama3 rope, version 4": Case("Llama", {"head_dim": 16}, LLAMA3, form=4),
    "llama, linear rope": Case("Llama", rope=LINEAR),
    "llama, linear rope, version 4": Case("Llama", rope=LINEAR, form=4),
    "llama, yarn rope": Case("Llama", rope=YARN),
    "llama, yarn rope with its own factor": Case(
        "Llama", rope=YARN | {"attention_factor": 0.7, "beta_fast": 16}
    ),
    "mistral": Case("Mistral", {"sliding_window": None, "head_dim": 10}, shards=True),
    "mistral, tied, version 4": Case(
        "Mistral", {"sliding_window": None, "tie_word_embeddings": True}, form=4
    ),
    "qwen2": Case("Qwen2"),
    "qwen2, tied, version 4": Case("Qwen2", {"tie_word_embeddings": True, "num_key_value_heads": 1}, form=4),
    "qwen2, yarn rope, version 4": Case("Qwen2", rope=YARN, form=4, shards=True),
    "qwen3, head_dim 22": Case("Qwen3", {"head_dim": 22}),
    "qwen3, tied, version 4": Case("Qwen3", {"head_dim": 32, "tie_word_embeddings": True}, form=4),
    "qwen3, biases, yarn rope, two shards": Case(
        "Qwen3", {"head_dim": 8, "attention_bias": True}, YARN, shards=True
    ),
}


def build(folder: Path, case: Case) -> Any:
    """Save the model to `folder` and return it."""
    theta = 5000.0
    rope = {"rope_theta": theta, "rope_type": "default"} | (case.rope or {})
    config = getattr(transformers, f"{case.family}Config")(**SMALL | case.config, rope_parameters=rope)
    torch.manual_seed(11)
    model = getattr(transformers, f"{case.family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    num_bytes = sum(p.numel() * 4 for p in model.parameters())
    model.save_pretrained(folder, max_shard_size=num_bytes // 2 + 30_000 if case.shards else "1GB")
    assert len(list(folder.glob("*.safetensors"))) == (2 if case.shards else 1)
    if case.shards:
        name = next(folder.glob("*.safetensors")).name
        (folder / "consolidated.safetensors").write_bytes((folder / name).read_bytes())
        (folder / "pytorch_model.bin").write_bytes(b"never read")
    written = json.loads((folder / "config.json").read_text())
    if case.form == 4:
        rotary = written.pop("rope_parameters")
        written["rope_theta"] = rotary.pop("rope_theta")
        written["rope_scaling"] = None if rotary == {"rope_type": "default"} else rotary
        if written["rope_scaling"]:
            rotary["type"] = rotary.pop("rope_type")
        written["torch_dtype"] = written.pop("dtype")
        (folder / "config.json").write_text(json.dumps(written))
    else:
        assert written["rope_parameters"]["rope_theta"] == theta
    return model


@torch.inference_mode()
def greedy(model: Any, prompt: list[int]) -> tuple[tuple[int, ...], torch.Tensor]:
    """The 32 tokens after the prompt, and the logits [32, vocab] that chose them, each from scratch."""
    tokens, logits = list(prompt), []
    for _ in range(NUM_TOKENS):
        logits.append(model(torch.tensor([tokens]), use_cache=False).logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
    return tuple(tokens[len(prompt) :]), torch.stack(logits)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_logits_and_greedy_tokens_are_those_of_transformers(tmp_path: Path, case: Case, device: str) -> None:
    model = build(tmp_path, case)
    prompt = [int(i) for i in torch.randint(0, 97, (70,), generator=torch.Generator().manual_seed(1))]
    tokens, logits = greedy(model, prompt)
    first, second = logits.topk(2, dim=-1).values.unbind(-1)
    assert float((first - second).min()) > 10 * BAR, "a near tie would compare rounding; change the prompt"
    driver = Driver(tmp_path, device=device, page_size=16, kv_pages=64, max_num_batched_tokens=40)
    assert driver.choice(request("r", prompt, NUM_TOKENS, keep=False)).token_ids == tokens
    found = torch.stack([driver.logits["r"][len(prompt) - 1 + i] for i in range(NUM_TOKENS)])
    worst = float((found - logits).abs().max())
    print(f"max |delta logit| = {worst:.2e}")
    assert worst <= BAR


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        *(("cpu", backend) for backend in ("reference", "packed", "segmented", "naive", "fused")),
        *(on_gpu("cuda", backend) for backend in ("reference", "packed", "segmented")),
    ],
)
@pytest.mark.parametrize("rope", [None, LLAMA3, LINEAR, YARN], ids=["default", "llama3", "linear", "yarn"])
@pytest.mark.parametrize("family", ["Llama", "Qwen3"])
def test_a_fragment_computed_elsewhere_reads_as_the_prompt_of_transformers(
    tmp_path: Path, family: str, rope: dict[str, Any] | None, device: str, backend: str
) -> None:
    """Keys are turned by a delta on reading; for yarn without the factor that they hold already."""
    model = build(tmp_path, Case(family, {"head_dim": 16}, rope))
    fragment, question = [int(i) for i in torch.arange(5, 60)], [3, 1, 4]
    driver = Driver(tmp_path, device=device, page_size=16, kv_pages=32, attention_backend=backend)
    far = request("fragment", fragment, position="explicit", options={"own_start": 150})
    state = ContextRef(state=driver.choice(far).dag.state)
    choice = driver.choice(request("q", question, 1, context=[state]))
    assert choice.dag.own_start == len(fragment)
    with torch.inference_mode():
        expected = model(torch.tensor([fragment + question])).logits[0, -1]
    assert float((driver.logits["q"][2] - expected).abs().max()) <= BAR


@pytest.mark.parametrize(
    ("family", "config", "key"),
    [
        ("Mistral", {"sliding_window": 16}, "sliding_window"),
        ("Qwen2", {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 0}, "layer_types"),
        ("Llama", {"hidden_act": "gelu"}, "hidden_act"),
        ("Gemma2", {}, "architectures"),
    ],
)
def test_what_is_not_computed_exactly_is_refused_by_its_key(
    tmp_path: Path, family: str, config: dict[str, Any], key: str
) -> None:
    build(tmp_path, Case(family, config))
    with pytest.raises(DagError) as caught:
        Driver(tmp_path)
    assert key in f"{caught.value.field} {caught.value.message}"
