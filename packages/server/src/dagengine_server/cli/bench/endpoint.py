"""A dagengine server as a benchmark sees it: span queries and chats, streamed, and when their parts came to the client.

Texts go in and come out; what the server tells of an answer (`dag`, usage, timings) is taken from its last chunk. Times
begin when a request that was made into bytes before is sent.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlencode

import httpx

from dagengine_core_graph.query import Query, dump_query

from ..console import CommandError
from .events import EventStreams, Refused
from .http_load import base_url, headers, served_model
from .latency import Stream

TIMEOUT_S = 600.0
CHATS = "/v1/chat/completions"
JSON = {"Content-Type": "application/json"}
Message = Mapping[str, str]


@dataclass(frozen=True)
class Answer:
    """A whole answer: its text, and how many tokens were sampled."""

    text: str
    tokens: int


@dataclass
class Reply(Stream):
    """One streamed answer.

    Attributes:
        dag: of the answer. record, timing: of the whole query; empty for a chat.
    """

    text: str = ""
    dag: Mapping[str, Any] = field(default_factory=dict)
    record: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, float] = field(default_factory=dict)

    @property
    def seen(self) -> int:
        """Tokens of the prompt: what it reads and its own."""
        return int(self.dag["tokens"]["visible"]) + int(self.dag["tokens"]["input"])

    @property
    def backend(self) -> str:
        """The attention backend of a query."""
        return str(self.record["backend"])

    @property
    def waited(self) -> float:
        """Seconds until what the answer waited for had ended; of one that runs in the step that completes this, until
        that step was chosen and all tokens of it were known.
        """
        return float(self.dag["timing_ms"]["waited"]) / 1e3

    @property
    def submit(self) -> float:
        """Seconds from when the last of a query's body came to the server until the engine was handed its requests."""
        return float(self.timing["submit"]) / 1e3

    @property
    def engine_ttft(self) -> float:
        """Seconds in the engine until the first token, without HTTP, planning and tokenizing."""
        return float(self.dag["timing_ms"]["first_token"]) / 1e3


class Endpoint:
    """A client of one server, with one connection for each request at once.

    Args:
        url: its address, with or without `/v1`.

    Raises:
        CommandError: it does not answer, or is no such server.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        self.model = served_model(url, api_key, "endpoint")
        self._runner = asyncio.Runner()
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._client = httpx.AsyncClient(
            base_url=base_url(url), headers=headers(api_key), timeout=TIMEOUT_S, limits=limits
        )
        self._streams = EventStreams(base_url(url), {**headers(api_key), **JSON}, TIMEOUT_S)
        self._salts = f"bench-{uuid.uuid4().hex}"
        self._used: set[str] = set()

    def salt(self, name: str) -> str:
        """The `cache_salt` of a name: nothing is found under it but what this client sent under the name."""
        self._used.add(name)
        return f"{self._salts}-{name}"

    def count(self, text: str) -> int:
        """Tokens of a text, without special ones."""
        return self._tokens({"prompt": text, "add_special_tokens": False})

    def count_chat(self, messages: Sequence[Message], *, generate: bool = True) -> int:
        """Tokens of a chat as a plain prompt."""
        return self._tokens({"messages": list(messages), "add_generation_prompt": generate})

    def _tokens(self, body: Mapping[str, Any]) -> int:
        try:
            return int(self._whole("POST", "/tokenize", body=body)["count"])
        except (ValueError, KeyError, TypeError):
            raise _strange() from None

    def prepare(self, query: Query, name: str) -> None:
        """Compute the query's fragments ahead."""
        self._whole("POST", "/v1/query/prepare", {"cache_salt": self.salt(name)}, dump_query(query))

    def query(self, query: Query, name: str) -> Reply:
        """The streamed answer of a query with one answer."""
        params = {"stream": "true", "cache_salt": self.salt(name)}
        reply = self._streamed("/v1/query/execute", params, dump_query(query))
        if "submit" not in reply.timing:
            raise _strange()
        return reply

    def chat(self, messages: Sequence[Message], name: str, **options: Any) -> Reply:
        """The streamed answer of a plain prompt: what OpenAI's clients send, with prefix reuse alone."""
        return self._streamed(CHATS, {}, self._chat(messages, name, options))

    def answers(
        self, messages: Sequence[Message], name: str, options: Sequence[Mapping[str, Any]]
    ) -> tuple[list[Answer], float]:
        """Whole answers to one plain prompt, a call for each of `options`, all at once; and when the first was sent."""
        bodies = [
            json.dumps(self._chat(messages, name, {"stream": False, **chosen})).encode() for chosen in options
        ]

        async def together() -> tuple[list[httpx.Response], float]:
            begin = time.perf_counter()
            calls = (self._client.post(CHATS, content=body, headers=JSON) for body in bodies)
            return await asyncio.gather(*calls), begin

        try:
            found, begin = self._runner.run(together())
        except httpx.HTTPError as error:
            raise _silent(error) from None
        return [_answer(response) for response in found], begin

    def release(self, name: str) -> None:
        """Let go of every state that was made under a name; pages that nobody takes may still be found."""
        params = {"cache_salt": self.salt(name)}
        while True:
            listed = self._whole("GET", "/v1/states", params)
            for state in listed["data"]:
                self._whole("DELETE", f"/v1/states/{state['id']}", params)
            if not listed["has_more"]:
                break
        self._used.discard(name)

    def close(self) -> None:
        """Release everything that was made through this client."""
        try:
            for name in sorted(self._used):
                self.release(name)
        finally:
            self._streams.close()
            self._runner.run(self._client.aclose())
            self._runner.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except CommandError:
            if error is None:  # else that says more
                raise

    def _chat(self, messages: Sequence[Message], name: str, options: Mapping[str, Any]) -> dict[str, Any]:
        return {
            "model": self.model,
            "messages": list(messages),
            "ignore_eos": True,
            "stream": True,
            "cache_salt": self.salt(name),
            **options,
        }

    def _whole(
        self,
        method: str,
        path: str,
        params: Mapping[str, str] | None = None,
        body: Mapping[str, Any] | None = None,
    ) -> Any:
        async def ask() -> httpx.Response:
            return await self._client.request(method, path, params=params, json=body)

        try:
            answer = self._runner.run(ask())
        except httpx.HTTPError as error:
            raise _silent(error) from None
        if answer.status_code != 200:
            raise _refusal(answer.status_code, answer.text)
        try:
            return answer.json()
        except ValueError:
            raise _strange() from None

    def _streamed(self, path: str, params: Mapping[str, str], body: Mapping[str, Any]) -> Reply:
        reply, data = Reply(), json.dumps(body).encode()

        def take(at: float, line: bytes) -> None:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                _take(at, json.loads(line[5:]), reply)

        try:
            reply.begin, reply.end = self._streams.post(f"{path}?{urlencode(params)}", data, take)
        except Refused as refused:
            raise _refusal(refused.status, refused.text) from None
        except (OSError, http.client.HTTPException) as error:
            raise _silent(error) from None
        except (ValueError, KeyError, TypeError):
            raise _strange() from None
        if "waited" not in reply.dag.get("timing_ms", ()):
            raise _strange()
        begin, end = reply.dag["spans"]["output"]
        reply.tokens = end - begin
        return reply


def _take(at: float, chunk: Mapping[str, Any], reply: Reply) -> None:
    """One event: new text, how the answer ended, what was done for it."""
    if "error" in chunk:
        raise CommandError(f"the server ended an answer: {str(chunk['error'])[:300]}", "endpoint")
    for choice in chunk.get("choices") or ():
        if choice["index"]:
            raise CommandError("a query of a benchmark has one answer", "endpoint", "internal")
        text = choice["text"] if "text" in choice else choice["delta"].get("content")
        ended = choice.get("finish_reason") is not None
        if text or (ended and not reply.sampled):
            reply.text += text or ""
            reply.tell(at, 1)
        reply.dag = choice.get("dag") or reply.dag
    about = chunk.get("dag") or {}
    if "timing_ms" in about and "tokens" not in about:
        reply.record, reply.timing = about["record"], about["timing_ms"]
    elif about:
        reply.dag = about


def _answer(response: httpx.Response) -> Answer:
    if response.status_code != 200:
        raise _refusal(response.status_code, response.text)
    try:
        found = response.json()
        return Answer(found["choices"][0]["message"]["content"] or "", found["usage"]["completion_tokens"])
    except (ValueError, KeyError, TypeError, IndexError):
        raise _strange() from None


def _strange() -> CommandError:
    return CommandError(
        "an answer lacks what is needed; is it a dagengine server of this version?", "endpoint"
    )


def _silent(error: Exception) -> CommandError:
    return CommandError(
        f"the server does not answer: {type(error).__name__}: {error}", "endpoint", "unavailable"
    )


def _refusal(status: int, text: str) -> CommandError:
    return CommandError(f"the server refuses with status {status}: {text[:300]}", "endpoint")
