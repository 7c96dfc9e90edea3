"""bench.offload: streams decode while states move; what it reports is what happened. Its rates need a GPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import offload

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 256,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


def test_streams_decode_while_states_move(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    sizes = ["--streams", "2", "--states", "3", "--state-tokens", "130"]
    times = ["--seconds", "0.1", "--windows", "2", "--cpu-kv-gib", "0.01"]
    assert offload.main([str(tmp_path), *sizes, *times]) == 0
    found = json.loads(capsys.readouterr().out)
    rates, moved = found["tokens_per_s"], found["moved"]
    assert rates["still"] > 0 and found["steps"] > 0
    assert found["ratio"] == {kind: pytest.approx(rates[kind] / rates["still"]) for kind in moved}
    for kind, ways in (("store", ["store"]), ("load", ["load"]), ("both", ["store", "load"])):
        assert all(moved[kind][f"{way}_gb_per_s"] > 0 for way in ways)
        assert moved[kind]["steps_with_copies"] > 0.9
    assert moved["store"]["load_gb_per_s"] < moved["store"]["store_gb_per_s"] / 4
    assert moved["load"]["store_gb_per_s"] < moved["load"]["load_gb_per_s"] / 4
    assert found["state_bytes"] == 3 * 2 * 2 * 2 * 8 * 64 * 4
