"""A real model and its own template through the server, where one is there: tools/demo_model.py makes it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import openai
import pytest
from conftest import Server, running

from dagengine import EngineConfig
from dagengine.async_engine import EngineThread
from dagengine.build import build_core
from dagengine_server.settings import ServerSettings

CACHE = Path(os.environ.get("DAGENGINE_CACHE") or Path.home() / ".cache" / "dagengine")
FOLDER = Path(os.environ.get("DAGENGINE_TEST_MODEL") or CACHE / "models" / "SmolLM2-135M-Instruct")
QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one word."}]

pytestmark = pytest.mark.skipif(not (FOLDER / "config.json").exists(), reason=f"no model in {FOLDER}")


@pytest.fixture(scope="module")
def demo() -> Iterator[Server]:
    engine = EngineThread(build_core(FOLDER, EngineConfig(device="cpu", kv_pages=64)))
    with running(engine, ServerSettings(served_model_name="demo")) as server:
        yield server


def test_it_answers_streamed_as_whole(demo: Server) -> None:
    client = openai.OpenAI(base_url=f"{demo.url}/v1", api_key="none", max_retries=0)
    options = {"model": "demo", "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**options).choices[0].message.content
    assert whole is not None and "Paris" in whole
    chunks = client.chat.completions.create(**options, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == whole


def test_a_chain_of_states_is_the_plain_prompt(demo: Server) -> None:
    def ids(text: str) -> list[int]:
        tokens: list[int] = demo.post("/tokenize", {"prompt": text, "add_special_tokens": False}).json()[
            "tokens"
        ]
        return tokens

    document, question = ids("Mary has a red car and a blue bicycle."), ids(" The colour of her bicycle is")
    plain = demo.complete(prompt=document + question, max_tokens=8)
    dag = {"context": [{"state": demo.prefill(document)}]}
    chained = demo.complete(prompt=question, max_tokens=8, dag=dag)
    assert chained["choices"][0]["text"] == plain["choices"][0]["text"]
    assert chained["usage"]["prompt_tokens"] == plain["usage"]["prompt_tokens"]
    assert chained["usage"]["prompt_tokens_details"]["cached_tokens"] == len(document)


def test_templates_are_those_of_transformers(demo: Server) -> None:
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER)
    expected = tokenizer.apply_chat_template(
        QUESTION, tokenize=True, add_generation_prompt=True, return_dict=False
    )
    assert demo.post("/tokenize", {"messages": QUESTION}).json()["tokens"] == expected
