"""A model folder without weights: two layers and a byte-level tokenizer, for engines with seeded random weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dagengine import LLM, devices

from .byte_tokenizers import byte_level

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(autouse=True)
def no_gpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only tests marked `gpu` see one."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(devices, "why_no_cuda", lambda: "CUDA is not for this test")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = byte_level()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": tokenizer.get_vocab_size(with_added_tokens=True),
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "eos_token_id": tokenizer.token_to_id("<eos>"),
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return folder


@pytest.fixture
def llm(model_folder: Path) -> Iterator[LLM]:
    with LLM(model_folder, load_format="dummy", seed=1, page_size=4, kv_pages=256) as found:
        yield found


@pytest.fixture
def llm_with_tiers(model_folder: Path) -> Iterator[LLM]:
    """A pool of 160 pages, and 256 on the host, from which everything is loaded that was there."""
    host = 256 * 2 * 2 * 2 * 8 * 4 * 4 / 2**30
    with LLM(model_folder, load_format="dummy", seed=1, page_size=4, kv_pages=160, cpu_kv_gib=host) as found:
        found.engine.ask(lambda core: setattr(core.store._pressure, "_costs", None))
        yield found
