"""Load on an OpenAI-compatible server: streamed completions, and when their parts came. Knows HTTP, no figures.

Without a rate a request is asked for as soon as one of `streams` places is free, and its time begins when it is sent.
With a rate its time begins when it was due: what it waits for a place counts.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from ..console import CommandError
from .latency import Stream
from .lengths import LOWEST_ID, Lengths

WORDS = "time year people way day man thing woman life child world school state family student group country".split()


@dataclass(frozen=True)
class Load:
    """What to send.

    Attributes:
        model: the name to ask for.
        sizes: input and output tokens of every request.
        streams: most requests at once. rate: requests a second, or None.
        words: prompts of as many random words as input tokens, in place of token ids below `highest_id`.
    """

    url: str
    model: str
    api_key: str | None
    sizes: Sequence[Lengths]
    streams: int
    rate: float | None
    words: bool
    highest_id: int
    timeout_s: float
    seed: int


@dataclass
class Outcome:
    """One request as it went; `error` says what went wrong, if anything did."""

    stream: Stream = field(default_factory=Stream)
    input_tokens: int = 0
    output_tokens: int = 0
    error: str | None = None


def served_model(url: str, api_key: str | None, option: str = "url") -> str:
    """The first model that the server lists. Raises CommandError, for the option that names the server."""
    try:
        answer = httpx.get(f"{base_url(url)}/v1/models", headers=headers(api_key), timeout=30.0)
        answer.raise_for_status()
        return str(answer.json()["data"][0]["id"])
    except httpx.HTTPStatusError as error:
        status = error.response.status_code
        hint = "; name a valid key with --api-key" if status == 401 else ""
        raise CommandError(f"{url} lists no models: status {status}{hint}", "url", "unavailable") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CommandError(f"{url} does not answer: {error}", option, "unavailable") from None
    except (ValueError, KeyError, IndexError, TypeError):
        message = f"{url} lists no models; is it an OpenAI-compatible server?"
        raise CommandError(message, option) from None


def run_load(load: Load) -> tuple[list[Outcome], float]:
    """Send everything; returns every request's outcome, in order, and the seconds from the first to the last event."""
    return asyncio.run(_run(load))


def base_url(url: str) -> str:
    """The server's address without a trailing slash or `/v1`."""
    return url.rstrip("/").removesuffix("/v1")


def arrivals(count: int, rate: float | None, seed: int) -> list[float]:
    """Seconds from the start at which requests are due: a Poisson process, or all at once."""
    if rate is None:
        return [0.0] * count
    source, at, found = random.Random(seed), 0.0, []
    for _ in range(count):
        found.append(at)
        at += source.expovariate(rate)
    return found


def prompts(load: Load) -> list[list[int] | str]:
    """Random prompts of the sizes' lengths; no two calls of one seed differ."""
    source = random.Random(load.seed)
    if load.words:
        return [" ".join(source.choices(WORDS, k=size.input)) for size in load.sizes]
    return [source.choices(range(LOWEST_ID, load.highest_id), k=size.input) for size in load.sizes]


async def _run(load: Load) -> tuple[list[Outcome], float]:
    outcomes = [Outcome() for _ in load.sizes]
    places = asyncio.Semaphore(load.streams)
    limits = httpx.Limits(max_connections=load.streams, max_keepalive_connections=load.streams)
    due = arrivals(len(load.sizes), load.rate, load.seed)
    bodies = [_body(load, prompt, size) for prompt, size in zip(prompts(load), load.sizes, strict=True)]
    async with httpx.AsyncClient(
        base_url=base_url(load.url), headers=headers(load.api_key), limits=limits, timeout=load.timeout_s
    ) as client:
        begin = time.perf_counter()

        async def one(body: bytes, at: float, outcome: Outcome) -> None:
            await asyncio.sleep(max(0.0, begin + at - time.perf_counter()))
            outcome.stream.begin = time.perf_counter()
            async with places:
                if load.rate is None:
                    outcome.stream.begin = time.perf_counter()
                await _stream(client, body, outcome)

        await asyncio.gather(*(one(*each) for each in zip(bodies, due, outcomes, strict=True)))
        return outcomes, max(outcome.stream.end for outcome in outcomes) - begin


def _body(load: Load, prompt: list[int] | str, size: Lengths) -> bytes:
    body = {
        "model": load.model,
        "prompt": prompt,
        "max_tokens": size.output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return json.dumps(body).encode()


async def _stream(client: httpx.AsyncClient, body: bytes, outcome: Outcome) -> None:
    stream = outcome.stream
    try:
        kind = {"Content-Type": "application/json"}
        async with client.stream("POST", "/v1/completions", content=body, headers=kind) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                outcome.error = f"status {response.status_code}: {text[:200]}"
                return
            async for line in response.aiter_lines():
                if line.startswith("data:") and line[5:].strip() != "[DONE]":
                    _take(json.loads(line[5:]), outcome)
        if outcome.error is None and not stream.sampled:
            outcome.error = "the stream ended without a token"
        stream.tokens = outcome.output_tokens or len(stream.sampled)
    except (httpx.HTTPError, ValueError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        stream.end = time.perf_counter()


def _take(chunk: dict[str, Any], outcome: Outcome) -> None:
    """One event: the server's error, usage, or a part of the answer."""
    if "error" in chunk:
        outcome.error = str(chunk["error"])[:200]
        return
    usage = chunk.get("usage")
    if usage:
        outcome.input_tokens, outcome.output_tokens = usage["prompt_tokens"], usage["completion_tokens"]
    choices = chunk.get("choices") or []
    if choices and (choices[0].get("text") or choices[0].get("finish_reason") is None):
        outcome.stream.tell(time.perf_counter(), 1)


def headers(api_key: str | None) -> dict[str, str]:
    """Those that a key takes."""
    return {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
