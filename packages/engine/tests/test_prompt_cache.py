"""What was encoded before is not encoded again, for the same tenant only, and within bounds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from dagengine import DagError
from dagengine.prompt_cache import Ids, PromptCache
from dagengine.tokenizer import ChatPrompt


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool, has_context: bool) -> ChatPrompt:
        self.asked += 1
        text = "".join(message["role"] + message["content"] for message in messages)
        return ChatPrompt((*text.encode(), has_context), 0 if generate else None)


def chat(
    cache: PromptCache, text: str, *, generate: bool = False, has_context: bool = False, salt: str = ""
) -> Any:
    messages = [{"role": "user", "content": text}]
    return cache.chat(messages, generate=generate, has_context=has_context, salt=salt)


def test_equal_messages_are_encoded_once_and_are_one_object() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    first, again = chat(cache, "a"), chat(cache, "a")
    assert first.input_ids is again.input_ids and tokenizer.asked == 1
    assert chat(cache, "a", has_context=True).input_ids != first.input_ids
    assert chat(cache, "b").input_ids != first.input_ids
    assert chat(cache, "a", generate=True).turn_start == 0 == chat(cache, "a", generate=True).turn_start
    assert tokenizer.asked == 5, "a generation prompt is encoded each time"


def test_another_tenants_text_is_encoded_again() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    one, two = chat(cache, "a", salt="one"), chat(cache, "a", salt="two")
    assert one == two and tokenizer.asked == 2


def test_what_was_used_longest_ago_is_forgotten() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer, most_characters=6)  # type: ignore[arg-type]
    for text in ("aaa", "bbb", "aaa", "ccc", "aaa"):
        chat(cache, text)
    assert (len(cache), tokenizer.asked) == (2, 3)
    chat(cache, "bbb")
    assert tokenizer.asked == 4
    chat(cache, "d" * 100)
    assert len(cache) == 0, "what is larger than all is not kept"


def test_ids_are_the_tuple_that_they_are() -> None:
    ids = Ids((1, 2, 3))
    assert ids == (1, 2, 3) and hash(ids) == hash((1, 2, 3))
    assert ids.digest == Ids([1, 2, 3]).digest != Ids([1, 2]).digest


def test_a_model_without_a_tokenizer_takes_no_messages() -> None:
    with pytest.raises(DagError, match="no tokenizer"):
        chat(PromptCache(None), "a")
