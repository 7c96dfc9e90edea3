"""A folder's weights: the index is the authority, every tensor is accounted for, nothing is executed."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from dagengine.errors import DagError
from dagengine.model_files import read_model
from dagengine.models.linear import DenseLinear, Linear
from dagengine.models.llama import LlamaForCausalLM
from dagengine.weights import INDEX, Closing, DummySource, SafetensorsSource, Staging, stored_dtype

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "vocab_size": 11,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
}
HEAD = "lm_head.weight"
EMBEDDING = "model.embed_tokens.weight"
SOME = "model.layers.1.mlp.down_proj.weight"


def all_tensors() -> dict[str, Tensor]:
    shapes = {EMBEDDING: (11, 16), "model.norm.weight": (16,), HEAD: (11, 16)}
    for index in range(2):
        layer = f"model.layers.{index}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (16,),
            f"{layer}.post_attention_layernorm.weight": (16,),
            f"{layer}.self_attn.q_proj.weight": (24, 16),
            f"{layer}.self_attn.k_proj.weight": (12, 16),
            f"{layer}.self_attn.v_proj.weight": (12, 16),
            f"{layer}.self_attn.o_proj.weight": (16, 24),
            f"{layer}.mlp.gate_proj.weight": (20, 16),
            f"{layer}.mlp.up_proj.weight": (20, 16),
            f"{layer}.mlp.down_proj.weight": (16, 20),
        }
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


def write(
    folder: Path, *files: dict[str, Tensor], index: dict[str, str] | None = None, **config: object
) -> Path:
    """One `model.safetensors`, or shards `s0...`, `s1...` with an index of what they hold."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    if len(files) == 1 and index is None:
        save_file(files[0], folder / "model.safetensors")
        return folder
    found = {}
    for number, tensors in enumerate(files):
        save_file(tensors, folder / f"s{number}.safetensors")
        found |= dict.fromkeys(tensors, f"s{number}.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": found if index is None else index}))
    return folder


def halves() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    tensors = list(all_tensors().items())
    return dict(tensors[:9]), dict(tensors[9:])


def load(folder: Path, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    geometry = read_model(folder).geometry
    with Closing(SafetensorsSource(folder, dtype=dtype, device=torch.device("cpu"))) as source:
        return LlamaForCausalLM.load(geometry, source)


def matrix(linear: Linear) -> Tensor:
    """The matrix [out, in] that a linear part multiplies by."""
    assert isinstance(linear, DenseLinear)
    return linear.weight.T


def refusal(folder: Path) -> DagError:
    with pytest.raises(DagError) as caught:
        load(folder)
    assert caught.value.code == "invalid_weights"
    return caught.value


def test_one_file_is_read_and_fused_in_order(tmp_path: Path) -> None:
    tensors = all_tensors()
    model = load(write(tmp_path, tensors))
    attention = model.layers[1].attention
    parts = [tensors[f"model.layers.1.self_attn.{p}_proj.weight"] for p in "qkv"]
    assert torch.equal(matrix(attention.qkv), torch.cat(parts))
    gate, up = matrix(model.layers[0].mlp.gate_up).chunk(2)
    assert torch.equal(gate, tensors["model.layers.0.mlp.gate_proj.weight"])
    assert torch.equal(up, tensors["model.layers.0.mlp.up_proj.weight"])
    assert torch.equal(matrix(model.head), tensors[HEAD])


def test_shards_give_the_same_model_and_a_stray_file_is_never_opened(tmp_path: Path) -> None:
    whole, parts = load(write(tmp_path / "whole", all_tensors())), write(tmp_path / "parts", *halves())
    save_file({EMBEDDING: torch.zeros(11, 16)}, parts / "model-00003-of-00003.safetensors")
    save_file({name: torch.zeros_like(t) for name, t in all_tensors().items()}, parts / "model.safetensors")
    (parts / "consolidated.safetensors").write_bytes(b"not even a file of tensors")
    sharded = load(parts)
    assert torch.equal(sharded.embedding, whole.embedding)
    assert torch.equal(matrix(sharded.layers[1].mlp.down), matrix(whole.layers[1].mlp.down))


def test_a_tensor_that_nothing_holds_is_named(tmp_path: Path) -> None:
    tensors = all_tensors()
    del tensors[SOME]
    assert refusal(write(tmp_path, tensors)).field == SOME


def test_a_tensor_that_nothing_asks_for_is_named(tmp_path: Path) -> None:
    tensors = all_tensors() | {"model.layers.2.mlp.down_proj.weight": torch.zeros(16, 20)}
    assert refusal(write(tmp_path, tensors)).field == "model.layers.2.mlp.down_proj.weight"


def test_what_models_compute_themselves_may_be_in_the_file(tmp_path: Path) -> None:
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    load(write(tmp_path, all_tensors() | {name: torch.zeros(3)}))


def test_a_tensor_that_the_index_puts_into_a_file_without_it_is_named(tmp_path: Path) -> None:
    first, second = halves()
    index = dict.fromkeys(first, "s0.safetensors") | dict.fromkeys(second, "s1.safetensors")
    index[SOME] = "s0.safetensors"
    assert refusal(write(tmp_path, first, second, index=index)).field == SOME


def test_a_tensor_that_two_shards_hold_is_named(tmp_path: Path) -> None:
    first, second = halves()
    index = dict.fromkeys(first, "s0.safetensors") | dict.fromkeys(second, "s1.safetensors")
    assert SOME in second
    again = first | {SOME: torch.zeros(16, 20)}
    assert refusal(write(tmp_path, again, second, index=index)).field == SOME


def test_a_tensor_that_the_index_does_not_list_is_named(tmp_path: Path) -> None:
    first, second = halves()
    index = dict.fromkeys(first, "s0.safetensors") | dict.fromkeys(second, "s1.safetensors")
    del index[SOME]
    assert refusal(write(tmp_path, first, second, index=index)).field == SOME


def test_a_missing_shard_is_named(tmp_path: Path) -> None:
    folder = write(tmp_path, *halves())
    (folder / "s1.safetensors").unlink()
    assert refusal(folder).field == "s1.safetensors"


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"weight_map": []}',
        '{"weight_map": {}}',
        '{"weight_map": null}',
        '{"weight_map": {"a": 3}}',
    ],
)
def test_an_index_that_maps_nothing_is_refused(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path, all_tensors())
    (folder / INDEX).write_text(text)
    assert refusal(folder).field == INDEX


@pytest.mark.parametrize(
    "name", ["../s0.safetensors", "/etc/passwd", "a/s0.safetensors", "pytorch_model.bin"]
)
def test_an_index_never_leads_out_of_the_folder_or_to_another_format(tmp_path: Path, name: str) -> None:
    first, second = halves()
    folder = write(tmp_path / "model", first, second, index=dict.fromkeys([*first, *second], name))
    save_file(first | second, tmp_path / "s0.safetensors")
    assert refusal(folder).field == INDEX


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    class Bomb:
        def __reduce__(self) -> tuple[object, ...]:
            return (tmp_path.joinpath("executed").write_text, ("x",))

    folder = write(tmp_path, all_tensors())
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert "neither" in refusal(folder).message
    (folder / "model.safetensors").write_bytes(pickle.dumps(Bomb()))
    assert refusal(folder).field == "model.safetensors"
    assert not (tmp_path / "executed").exists()


def test_a_wrong_shape_is_named_with_both_shapes(tmp_path: Path) -> None:
    error = refusal(write(tmp_path, all_tensors() | {SOME: torch.zeros(20, 16)}))
    assert error.field == SOME
    assert "(20, 16)" in error.message and "(16, 20)" in error.message


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int32, torch.bool, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    error = refusal(write(tmp_path, all_tensors() | {SOME: torch.zeros(16, 20).to(dtype)}))
    assert error.field == SOME
    assert "quantised" in error.message


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_weights_are_cast_once_to_the_asked_dtype(tmp_path: Path, stored: torch.dtype) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in all_tensors().items()}
    model = load(write(tmp_path, tensors), torch.float32)
    found = matrix(model.layers[1].mlp.down)
    assert found.dtype == torch.float32
    assert torch.equal(found, tensors[SOME].float())


@pytest.mark.parametrize("shipped", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_tied_and_untied_output_matrix_shipped_and_not(tmp_path: Path, tied: bool, shipped: bool) -> None:
    tensors = all_tensors()
    if tied:
        tensors[HEAD] = tensors[EMBEDDING].clone()
    if not shipped:
        del tensors[HEAD]
    folder = write(tmp_path, tensors, tie_word_embeddings=tied)
    if not tied and not shipped:
        assert refusal(folder).field == HEAD
        return
    model = load(folder)
    assert torch.equal(matrix(model.head), tensors[EMBEDDING] if tied else tensors[HEAD])
    assert (matrix(model.head).data_ptr() == model.embedding.data_ptr()) == tied


def test_a_tied_model_that_ships_another_output_matrix_is_refused(tmp_path: Path) -> None:
    assert refusal(write(tmp_path, all_tensors(), tie_word_embeddings=True)).field == HEAD


def test_dummy_weights_are_the_same_for_a_seed() -> None:
    def weights(seed: int) -> Tensor:
        source = DummySource(seed, dtype=torch.float32, device=torch.device("cpu"), tied=False)
        return source.take(SOME, (16, 20))

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_fused_dummy_weights_are_those_taken_one_by_one(dtype: torch.dtype) -> None:
    def source() -> DummySource:
        return DummySource(5, dtype=dtype, device=torch.device("cpu"), tied=False)

    one, other = source(), source()
    fused = one.take_fused(["a", "b"], [(16, 20), (8, 20)])
    assert torch.equal(fused, torch.cat([other.take("a", (16, 20)), other.take("b", (8, 20))]))
    fused = one.take_fused(["a.norm", "a.bias"], [(4,), (4,)])
    assert torch.equal(fused, torch.cat([other.take("a.norm", (4,)), other.take("a.bias", (4,))]))
    assert torch.equal(fused[:4], torch.ones(4, dtype=dtype))


def test_fused_tensors_are_checked_and_counted_one_by_one(tmp_path: Path) -> None:
    folder = write(tmp_path, all_tensors())
    names = [f"model.layers.0.mlp.{p}_proj.weight" for p in ("gate", "up")]
    source = SafetensorsSource(folder, dtype=torch.float32, device=torch.device("cpu"))
    with pytest.raises(DagError) as refused:
        source.take_fused(names, [(20, 16), (21, 16)])
    assert refused.value.field == names[1]
    with pytest.raises(AssertionError):
        source.take(names[0], (20, 16))


class Unpinned(Staging):
    """The same turns over ordinary memory, with events that are counted."""

    def __init__(self, num_bytes: int) -> None:
        self._buffers = [torch.empty(num_bytes, dtype=torch.uint8) for _ in range(2)]
        self.waits: list[int] = []
        self._events = [Event(self.waits, 0), Event(self.waits, 1)]  # type: ignore[assignment]
        self._device, self._turn = torch.device("cpu"), 0


class Event:
    def __init__(self, waits: list[int], turn: int) -> None:
        self.waits, self.turn = waits, turn

    def synchronize(self) -> None:
        self.waits.append(self.turn)

    def record(self) -> None: ...


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.bfloat16, torch.float32])
def test_staging_copies_in_parts_and_waits_for_the_buffer_of_each(
    stored: torch.dtype, wanted: torch.dtype
) -> None:
    staging, source = Unpinned(64), torch.randn(7, 9).to(stored)
    out = torch.zeros(7, 9, dtype=wanted)
    staging.copy(source, out)
    assert torch.equal(out, source.to(wanted))
    parts = -(-63 * source.element_size() // 64)
    assert staging.waits == [turn % 2 for turn in range(parts)]


@pytest.mark.parametrize(("stored", "name"), [(torch.bfloat16, "bfloat16"), (torch.int8, None)])
def test_the_stored_dtype_is_the_first_tensors(tmp_path: Path, stored: torch.dtype, name: str | None) -> None:
    assert stored_dtype(write(tmp_path, {EMBEDDING: torch.zeros(11, 16).to(stored)})) == name
