"""SmolLM2 in float32: transformers, a plain prompt and a chain of inherits give one answer.

Compared over 64 greedy tokens: the tokens, and the logits that each was chosen by. The reference is chosen
without near ties, since those would compare rounding and nothing of the engine. On a GPU, where the demo model may not
be had, a small random model of its proportions stands for it too.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from devices import on_gpu
from torch import Tensor

import demo_model
from dagengine.request import ContextRef, Request
from dagengine.sampling import SamplingParams

from .driver import Driver, LoadedModel, request

BAR = 1e-3
NUM_TOKENS = 64
LEAST_MARGIN = 0.01
TEXTS = (
    "A lighthouse is a tower that carries a lamp. Its keeper lights the lamp at dusk, trims it through "
    "the night and writes down every ship that passes. In the year of the great storm the keeper of the "
    "northern light was a woman called Ada, who had come to the island with two goats and a box of books. "
    "She wrote in the log that on the first evening",
    "Bread is made from flour, water, salt and yeast. The flour is mixed with the water and left to rest. "
    "Then the salt and the yeast are added and the dough is folded, four times in two hours, until it is "
    "smooth. It rises overnight in a cold room. In the morning the oven is heated and the baker",
    "The first computers filled whole rooms. They were built from thousands of valves, which were hot and "
    "often failed, and their programs were wired by hand. When the transistor came, machines became "
    "smaller, then cheaper, and at last so common that nobody noticed them any more. Today",
)
CUTS = (1, 17, 33, 34, 50)


@dataclass(frozen=True)
class Expected:
    """A prompt, the 64 tokens that transformers continues it with, and the logits of each [64, vocab]."""

    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    logits: Tensor


@pytest.fixture(
    scope="module",
    params=[
        ("demo", "cpu", "auto"),
        ("random", "cpu", "auto"),
        on_gpu(("demo", "cuda", "segmented")),
        *(on_gpu(("random", "cuda", backend)) for backend in ("reference", "packed", "segmented")),
    ],
    ids="-".join,
)
def source(request: pytest.FixtureRequest) -> tuple[str, str, str]:
    """Which model, and the engine's device and attention backend."""
    which, device, backend = request.param
    return which, device, backend


@pytest.fixture(scope="module")
def folder(
    request: pytest.FixtureRequest, source: tuple[str, str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    which, device, _ = source
    if which == "demo" and device == "cuda":
        made = demo_model.model_folder(demo_model.cache_folder())
        if not demo_model.is_complete(made):
            pytest.skip(f"the demo model is not in {made}; the random one is compared")
        return made
    if which == "demo":
        return Path(request.getfixturevalue("demo_model_folder"))
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=1000,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=2048,
        initializer_range=0.1,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(3)
    made = tmp_path_factory.mktemp("random") / "llama"
    transformers.LlamaForCausalLM(config).save_pretrained(made)
    return made


@pytest.fixture(scope="module")
def loaded(folder: Path, source: tuple[str, str, str]) -> LoadedModel:
    return LoadedModel(folder, source[1])


@pytest.fixture(scope="module")
def expected(folder: Path, loaded: LoadedModel) -> Expected:
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for prompt in _prompts(loaded):
        found = _continue(model, prompt)
        first, second = found.logits.topk(2, dim=-1).values.unbind(-1)
        if float((first - second).min()) >= LEAST_MARGIN:
            return found
    raise AssertionError("every prompt has a near tie in its greedy continuation; choose others")


def _prompts(loaded: LoadedModel) -> Iterator[tuple[int, ...]]:
    """Texts, or, where there is no tokenizer, random tokens."""
    if loaded.tokenizer is not None:
        for text in TEXTS:
            yield tuple(loaded.tokenizer.encode(text, add_special_tokens=False))
        return
    rng = random.Random(1)
    for _ in range(20):
        yield tuple(rng.randrange(loaded.geometry.vocab_size) for _ in range(70))


@torch.inference_mode()
def _continue(model: torch.nn.Module, prompt: tuple[int, ...]) -> Expected:
    tokens: list[int] = []
    logits = []
    step, cache = torch.tensor([prompt]), None
    while len(tokens) < NUM_TOKENS:
        out = model(step, past_key_values=cache, use_cache=True)
        logits.append(out.logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
        step, cache = torch.tensor([tokens[-1:]]), out.past_key_values
    return Expected(prompt, tuple(tokens), torch.stack(logits))


def chain(prompt: tuple[int, ...]) -> list[Request]:
    """The prompt as nodes that each inherit the one before; the last, called `chain`, continues it."""
    bounds = [0, *CUTS, len(prompt)]
    pieces = [prompt[a:b] for a, b in pairwise(bounds)]
    names = [*(f"link{i}" for i in range(len(pieces) - 1)), "chain"]
    return [
        request(
            name,
            piece,
            NUM_TOKENS if name == "chain" else 0,
            context=[ContextRef(request=names[i - 1])] if i else (),
            keep=False,
        )
        for i, (name, piece) in enumerate(zip(names, pieces, strict=True))
    ]


def others(count: int, vocab: int) -> list[Request]:
    """Requests of different lengths that are in the batch for as long as the compared ones, some sampled."""
    rng = random.Random(7)
    found = []
    for i in range(count):
        prompt = tuple(rng.randrange(3, vocab) for _ in range(rng.randint(1, 40)))
        warm = SamplingParams(max_tokens=NUM_TOKENS + 8, temperature=0.8 * (i < 2), seed=i, ignore_eos=True)
        found.append(Request(id=f"other{i}", input_ids=prompt, sampling=warm))
    return found


def assert_agrees(driver: Driver, name: str, tokens: tuple[int, ...], expected: Expected) -> float:
    first = min(driver.logits[name])
    found = torch.stack([driver.logits[name][first + i] for i in range(len(tokens))])
    assert tokens == expected.tokens[: len(tokens)]
    worst = float((found - expected.logits[: len(tokens)]).abs().max())
    assert worst <= BAR
    return worst


@pytest.mark.parametrize(
    ("page_size", "chunked"),
    [
        (16, False),
        *(
            pytest.param(page_size, chunked, marks=pytest.mark.slow)
            for page_size in (1, 3, 16, 64)
            for chunked in (False, True)
            if (page_size, chunked) != (16, False)
        ),
    ],
)
def test_transformers_a_plain_prompt_and_a_chain_agree_alone(
    loaded: LoadedModel,
    expected: Expected,
    source: tuple[str, str, str],
    page_size: int,
    chunked: bool,
) -> None:
    driver = _driver(loaded, source[2], page_size, 11 if chunked else 512)
    # Chunks end with the prompt, and the chain goes on for all 64 tokens: the plain prompt needs only some.
    num_tokens = 8 if chunked else NUM_TOKENS
    plain = driver.choice(request("plain", expected.prompt, num_tokens, keep=False))
    linked = driver.run(*chain(expected.prompt))[-1].choices[0]
    worst = max(
        assert_agrees(driver, "plain", plain.token_ids, expected),
        assert_agrees(driver, "chain", linked.token_ids, expected),
    )
    print(f"max |delta logit| = {worst:.2e}")
    assert driver.core.stats.last_batch == 1
    driver.release_all()


@pytest.mark.slow
@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_transformers_a_plain_prompt_and_a_chain_agree_in_a_batch_of_16(
    loaded: LoadedModel,
    expected: Expected,
    source: tuple[str, str, str],
    page_size: int,
    chunked: bool,
) -> None:
    driver = _driver(loaded, source[2], page_size, 24 if chunked else 512)
    batch = others(14, loaded.geometry.vocab_size)
    plain = request("plain", expected.prompt, NUM_TOKENS, keep=False)
    events = driver.run(*batch[:7], plain, *chain(expected.prompt), *batch[7:])
    tokens = {event.request_id: event.choices[0].token_ids for event in events}
    worst = max(assert_agrees(driver, name, tokens[name], expected) for name in ("plain", "chain"))
    print(f"max |delta logit| = {worst:.2e}")
    driver.release_all()


def _driver(loaded: LoadedModel, backend: str, page_size: int, max_num_batched_tokens: int) -> Driver:
    return Driver(
        loaded,
        attention_backend=backend,
        page_size=page_size,
        kv_pages=-(-2560 // page_size) + 32,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=1024,
    )
