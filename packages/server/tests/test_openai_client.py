"""The official client works unchanged: chat, completions, streams, log-probabilities, n, seed, usage."""

from __future__ import annotations

from collections.abc import Iterator

import openai
import pytest
from conftest import MODEL, Server

CHAT = [{"role": "user", "content": "the thing"}]


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_chat_answers(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_completion_tokens=5, temperature=0
    )
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason in ("stop", "length")
    assert answer.usage is not None and answer.usage.completion_tokens <= 5
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == answer.dag["tokens"]["reused"]
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_chat_stream_joins_to_the_whole_answer(client: openai.OpenAI) -> None:
    def create(**options: object) -> object:
        return client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=12, seed=3, temperature=0.9, **options
        )

    whole = create()
    chunks = list(create(stream=True, stream_options={"include_usage": True}))
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content
    finished = [c.choices[0].finish_reason for c in chunks if c.choices and c.choices[0].finish_reason]
    assert finished == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None
    streamed, plain = chunks[-1].usage, whole.usage
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (
        plain.prompt_tokens,
        plain.completion_tokens,
    )
    assert streamed.prompt_tokens_details.cached_tokens is not None


def test_chat_logprobs(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model=MODEL, messages=CHAT, max_tokens=4, temperature=0, logprobs=True, top_logprobs=3
    )
    entries = answer.choices[0].logprobs.content
    assert entries and len(entries) <= 4
    for entry in entries:
        assert len(entry.top_logprobs) == 3
        assert entry.logprob == max(top.logprob for top in entry.top_logprobs) <= 0


def test_several_answers_differ_and_repeat_under_a_seed(client: openai.OpenAI) -> None:
    def texts(seed: int) -> list[str | None]:
        answer = client.chat.completions.create(
            model=MODEL, messages=CHAT, max_tokens=8, n=3, seed=seed, temperature=1.5
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage.completion_tokens == sum(
            choice.dag["spans"]["output"][1]
            - choice.dag["spans"]["output"][0]
            + (choice.finish_reason == "stop")
            for choice in answer.choices
        )
        return [choice.message.content for choice in answer.choices]

    first = texts(11)
    assert len(set(first)) == 3
    assert texts(11) == first
    assert texts(12) != first


def test_several_answers_stream(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "messages": CHAT, "max_tokens": 8, "n": 2, "seed": 5, "temperature": 1.5}
    whole = client.chat.completions.create(**options)
    texts = ["", ""]
    for chunk in client.chat.completions.create(**options, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                assert choice.dag["tokens"]["input"] > 0
    assert texts == [choice.message.content for choice in whole.choices]


@pytest.mark.parametrize("prompt", ["the", [10, 11, 12], ["the", "a thing"], [[1, 2], [3], [4, 5, 6]]])
def test_completions_take_text_and_ids(client: openai.OpenAI, prompt: object) -> None:
    answer = client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0)
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [choice.index for choice in answer.choices] == list(range(len(prompt) if several else 1))
    assert answer.usage.completion_tokens <= 3 * len(answer.choices)
    chunks = list(
        client.completions.create(model=MODEL, prompt=prompt, max_tokens=3, temperature=0, stream=True)
    )
    texts = [""] * len(answer.choices)
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in answer.choices]


def test_completions_logprobs_stream_as_whole(client: openai.OpenAI) -> None:
    options = {"model": MODEL, "prompt": "the", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**options).choices[0].logprobs
    assert len(whole.tokens) == len(whole.token_logprobs) == len(whole.top_logprobs) == len(whole.text_offset)
    tokens, offsets = [], []
    for chunk in client.completions.create(**options, stream=True):
        if chunk.choices and chunk.choices[0].logprobs:
            tokens += chunk.choices[0].logprobs.tokens
            offsets += chunk.choices[0].logprobs.text_offset
    assert (tokens, offsets) == (whole.tokens, whole.text_offset)


def test_sampling_extras_act(client: openai.OpenAI) -> None:
    def text(**extra: object) -> object:
        answer = client.completions.create(
            model=MODEL, prompt="the", seed=1, extra_body={"return_token_ids": True, "max_tokens": 6, **extra}
        )
        return answer.choices[0]

    greedy = text(temperature=0).token_ids
    assert text(temperature=2.0, top_k=1).token_ids == greedy
    assert text(temperature=2.0, min_p=1.0).token_ids == greedy
    again = {"temperature": 0, "min_tokens": 60, "max_tokens": 60}
    repeats = text(**again).token_ids
    assert len(set(text(**again, repetition_penalty=50.0).token_ids)) > len(set(repeats))
    assert len(set(text(**again, frequency_penalty=2.0).token_ids)) > len(set(repeats))
    banned = text(temperature=0, logit_bias={str(greedy[0]): -100}).token_ids
    assert banned[0] != greedy[0]
    stopped = text(temperature=0, stop_token_ids=[greedy[2]])
    assert stopped.token_ids == greedy[: greedy.index(greedy[2])] and stopped.finish_reason == "stop"
    assert stopped.stop_reason == greedy[2]
    assert len(text(temperature=0, min_tokens=6, ignore_eos=True).token_ids) == 6


def test_models(client: openai.OpenAI) -> None:
    listed = client.models.list().data
    assert [model.id for model in listed] == [MODEL]
    model = client.models.retrieve(MODEL)
    assert model.max_model_len == 512
    assert {"linear", "native", "explicit"} <= set(model.dag["position_policies"])
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_errors_are_the_client_s_own(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=CHAT, temperature=-1)
    assert (refused.value.code, refused.value.param) == ("invalid_request", "temperature")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="the")
    assert missing.value.code == "model_not_found" and missing.value.param == "model"


def test_assistant_messages_of_the_client_can_be_sent_back(client: openai.OpenAI) -> None:
    first = client.chat.completions.create(model=MODEL, messages=CHAT, max_tokens=3, temperature=0)
    said = first.choices[0].message.model_dump()
    messages = [*CHAT, said, {"role": "user", "content": [{"type": "text", "text": "more"}]}]
    assert client.chat.completions.create(model=MODEL, messages=messages, max_tokens=3).choices
