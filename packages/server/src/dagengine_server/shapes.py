"""How answers look on OpenAI's two endpoints, whole and in chunks. One shape serves one HTTP request."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dagengine.request import Choice, TokenEvent, TokenLogprob
from dagengine.tokenizer import Tokenizer

from .answers import chat_logprobs, dag_object, text_logprobs, usage


@dataclass
class Shape(ABC):
    """Common to both.

    Attributes:
        num_prompts, n: answer i of prompt p is choice p * n + i.
        token_ids: whether choices carry their token ids.
    """

    id: str
    model: str
    created: int
    tokenizer: Tokenizer | None
    num_prompts: int
    n: int
    token_ids: bool
    kind: ClassVar[str] = ""
    chunk_kind: ClassVar[str] = ""

    @property
    def single(self) -> bool:
        """Whether there is one choice, whose `dag` then stands beside it instead of in it."""
        return self.num_prompts * self.n == 1

    def answer(self, answered: Sequence[Sequence[Choice]]) -> dict[str, Any]:
        """The whole answer: for each prompt its choices."""
        choices = []
        for prompt, found in enumerate(answered):
            for choice in found:
                choices.append(self._marked(self._whole(choice), prompt, choice))
        result = {**self._head(self.kind), "choices": choices, "usage": usage(answered)}
        if self.single:
            result["dag"] = dag_object(answered[0][0].dag)
        return result

    def first(self) -> list[dict[str, Any]]:
        """Chunks before anything was sampled."""
        return []

    def delta(self, prompt: int, event: TokenEvent) -> dict[str, Any] | None:
        """The chunk of new text, if it says anything."""
        if not event.text and not (event.token_ids and (event.logprobs is not None or self.token_ids)):
            return None
        choice = self._piece(prompt * self.n + event.index, event)
        if self.token_ids:
            choice["token_ids"] = list(event.token_ids)
        return self._chunk([{"index": prompt * self.n + event.index, **choice}])

    def finish(self, prompt: int, choice: Choice) -> dict[str, Any]:
        """The last chunk of one choice."""
        end = {**self._end(), "finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        piece = {"index": prompt * self.n + choice.index, **end}
        if not self.single:
            piece["dag"] = dag_object(choice.dag)
        chunk = self._chunk([piece])
        if self.single:
            chunk["dag"] = dag_object(choice.dag)
        return chunk

    def usage(self, answered: Sequence[Sequence[Choice]]) -> dict[str, Any]:
        """The chunk with the counts."""
        return {**self._chunk([]), "usage": usage(answered)}

    def _marked(self, piece: dict[str, Any], prompt: int, choice: Choice) -> dict[str, Any]:
        reasons = {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_reason}
        marked = {"index": prompt * self.n + choice.index, **piece, **reasons}
        if self.token_ids:
            marked["token_ids"] = list(choice.token_ids)
        if not self.single:
            marked["dag"] = dag_object(choice.dag)
        return marked

    def _head(self, kind: str) -> dict[str, Any]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self.chunk_kind), "choices": choices}

    @abstractmethod
    def _whole(self, choice: Choice) -> dict[str, Any]: ...

    @abstractmethod
    def _piece(self, index: int, event: TokenEvent) -> dict[str, Any]: ...

    @abstractmethod
    def _end(self) -> dict[str, Any]: ...


class ChatShape(Shape):
    """`chat.completion` and its chunks."""

    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def first(self) -> list[dict[str, Any]]:
        start = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        return [self._chunk([{"index": index, **start}]) for index in range(self.n)]

    def _whole(self, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.text, "refusal": None}
        return {"message": message, "logprobs": self._logprobs(choice.logprobs)}

    def _piece(self, index: int, event: TokenEvent) -> dict[str, Any]:
        logprobs = self._logprobs(event.logprobs)
        return {"delta": {"content": event.text}, "logprobs": logprobs, "finish_reason": None}

    def _end(self) -> dict[str, Any]:
        return {"delta": {}, "logprobs": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None) -> dict[str, Any] | None:
        return None if logprobs is None else chat_logprobs(logprobs, self.tokenizer)


@dataclass
class TextShape(Shape):
    """`text_completion`, whole and in chunks."""

    kind: ClassVar[str] = "text_completion"
    chunk_kind: ClassVar[str] = "text_completion"
    _offsets: Counter[int] = field(default_factory=Counter)

    def _whole(self, choice: Choice) -> dict[str, Any]:
        return {"text": choice.text, "logprobs": self._logprobs(choice.logprobs, 0)}

    def _piece(self, index: int, event: TokenEvent) -> dict[str, Any]:
        logprobs = self._logprobs(event.logprobs, self._offsets[index])
        if logprobs is not None:
            self._offsets[index] += sum(len(token) for token in logprobs["tokens"])
        return {"text": event.text, "logprobs": logprobs, "finish_reason": None}

    def _end(self) -> dict[str, Any]:
        return {"text": "", "logprobs": None}

    def _logprobs(self, logprobs: Sequence[TokenLogprob] | None, offset: int) -> dict[str, Any] | None:
        return None if logprobs is None else text_logprobs(logprobs, self.tokenizer, offset)
