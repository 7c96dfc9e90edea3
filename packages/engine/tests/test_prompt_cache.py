"""What was encoded before is not encoded again, for the same tenant only, and within bounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from dagengine import DagError
from dagengine.encoded_queries import EncodedQuery, draft_query, encode_drafts, encode_query
from dagengine.prompt_cache import ENTRY_CHARACTERS, Ids, PromptCache
from dagengine.tokenizer import Chat, ChatPrompt, Tokenizer
from dagengine_core_graph.query import Query, cross, g, plus, repeat, system, user

from .byte_tokenizers import byte_level, save

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe brief.<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
BY_PLACE = (
    "{{ bos_token }}{% for m in messages %}{{ loop.index }}{% if loop.last %}!{% endif %}[{{ m.role }}]{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}{{ messages | length }}>{% endif %}"
)
DATED = (
    "{% if strftime_now is defined %}{{ strftime_now('%d %b') }}{{ strftime_now('%Y') }}{% endif %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


class Counting:
    """A tokenizer that counts what it is asked."""

    def __init__(self) -> None:
        self.asked = 0
        self.clock: tuple[str, ...] | None = ()

    def read_clock(self) -> tuple[str, ...] | None:
        return self.clock

    def chats(self, chats: Sequence[Chat]) -> list[ChatPrompt | DagError]:
        self.asked += len(chats)
        return [self.one(chat) for chat in chats]

    def one(self, chat: Chat) -> ChatPrompt | DagError:
        text = "".join(message["role"] + message["content"] for message in chat.messages)
        if "refused" in text:
            return DagError("invalid_request", text, "messages")
        return ChatPrompt((*text.encode(), chat.has_context), 0 if chat.generate else None)


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
    called = chat(cache, "a", generate=True)
    assert called.turn_start == 0 and called is chat(cache, "a", generate=True)
    assert tokenizer.asked == 4


def test_messages_that_are_asked_for_together_are_each_what_they_are_alone() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    known = chat(cache, "a")
    asked = [Chat([{"role": "user", "content": text}], text == "c", False) for text in "abcb"]
    refused = Chat([{"role": "user", "content": "refused"}], False, False)
    first, second, third, again, error = cache.chats([*asked, refused], salt="")
    assert first is known and second is again and tokenizer.asked == 4
    assert [second, third] == [chat(cache, "b"), chat(cache, "c", generate=True)] and tokenizer.asked == 4
    assert isinstance(error, DagError) and error.message == "userrefused"
    with pytest.raises(DagError, match="userrefused"):
        chat(cache, "refused")
    assert tokenizer.asked == 5, "a refusal is not remembered"


def test_equal_calls_of_a_query_are_encoded_once() -> None:
    tokenizer = Counting()
    candidate = g(cross(system("s"), user("task")), temperature=0.5)
    query = g(cross(system("s"), repeat(24, candidate), user("question")))
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    encoded = encode_query(query, cache)
    assert (len(encoded.lowered.nodes), tokenizer.asked) == (27, 4)
    encode_query(query, cache)
    assert tokenizer.asked == 4, "nor is a query that comes again"


def test_queries_that_are_encoded_together_are_each_what_they_are_alone() -> None:
    """Equal messages of theirs are encoded once, and of one that is refused the others go on."""
    tokenizer = Counting()
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    texts = ["a b", "b c", "refused a", "c d", "a b"]
    queries = [g(cross(system("s"), plus(*map(user, text.split())), user("q"))) for text in texts]
    drafts = [draft_query(query, cache) for query in queries]
    together = encode_drafts(drafts, cache)
    listed = [key for draft in drafts for key in draft.lookup.new]
    assert tokenizer.asked == len(set(listed)) < len(listed)
    for query, found in zip(queries, together, strict=True):
        try:
            alone = encode_query(query, PromptCache(Counting()))  # type: ignore[arg-type]
        except DagError as error:
            assert isinstance(found, DagError)
            assert (found.code, found.message, found.field) == (error.code, error.message, error.field)
        else:
            assert isinstance(found, EncodedQuery) and found.prompts == alone.prompts
            assert found.fragments == alone.fragments and found.timing.tokenize > 0
    assert isinstance(together[2], DagError)
    assert encode_drafts([], cache) == []
    known = tokenizer.asked
    assert isinstance(encode_drafts([draft_query(queries[0], cache)], cache)[0], EncodedQuery)
    assert tokenizer.asked == known


@pytest.mark.parametrize("template", [CHATML, BY_PLACE, DATED])
def test_a_cache_changes_no_token(tmp_path: Path, template: str) -> None:
    tokenizer = Tokenizer(save(tmp_path, byte_level(), template, bos_token="<bos>", eos_token="<eos>"))
    cache, draw = PromptCache(tokenizer), random.Random(7)
    for _ in range(60):
        query = random_query(draw, 3)
        found = encode_query(g(cross(user("x"), query)), cache)
        assert found.prompts == encoded_alone(found, tokenizer)


def encoded_alone(query: EncodedQuery, tokenizer: Tokenizer) -> dict[str, ChatPrompt]:
    """What the tokenizer makes of every node by itself."""
    return {
        node.id: tokenizer.chat(node.messages, generate=node.generate is not None, has_context=node.continues)
        for node in query.lowered.nodes
    }


def random_query(draw: random.Random, depth: int) -> Query:
    """Few different texts, so that equal messages come in several places and roles."""
    if depth == 0 or draw.random() < 0.2:
        return draw.choice((system, user))(draw.choice("abc"))
    parts = [random_query(draw, depth - 1) for _ in range(draw.randint(1, 3))]
    called = g(cross(user(draw.choice("ab")), *parts))
    return draw.choice((cross(*parts), plus(*parts), called, repeat(2, called)))


def test_a_look_up_tells_what_is_yet_to_be_encoded() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    chats = [Chat([{"role": "user", "content": text}], False, False) for text in ("aa", "bbb", "aa", "bbb")]
    chat(cache, "aa")
    found = cache.look_up(chats, salt="")
    assert (found.characters, tokenizer.asked) == (3, 1)
    first, second, third, fourth = cache.encode(found)
    assert first is third and second is fourth and tokenizer.asked == 2
    assert cache.look_up(chats, salt="").characters == 0
    assert cache.look_up(chats, salt="other").characters == 5
    tokenizer.clock = None
    assert cache.look_up(chats, salt="").characters == 10, (
        "where only rendering shows what is asked, all is new"
    )


def test_what_a_template_says_of_the_time_is_not_remembered_beyond_it() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    for clock, asked in ((("Mon",), 1), (("Mon",), 1), (("Tue",), 2), (None, 3), (None, 4), (("Tue",), 4)):
        tokenizer.clock = clock
        chat(cache, "a")
        assert tokenizer.asked == asked


def test_a_prompt_is_not_remembered_when_the_time_changed_meanwhile() -> None:
    class Midnight(Counting):
        def chats(self, chats: Sequence[Chat]) -> list[ChatPrompt | DagError]:
            self.clock = ("Tue",)
            return super().chats(chats)

    tokenizer = Midnight()
    tokenizer.clock = ("Mon",)
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    chat(cache, "a")
    assert len(cache) == 0
    chat(cache, "a")
    assert len(cache) == 1


def test_another_tenants_text_is_encoded_again() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer)  # type: ignore[arg-type]
    one, two = chat(cache, "a", salt="one"), chat(cache, "a", salt="two")
    assert one == two and tokenizer.asked == 2


def test_what_was_used_longest_ago_is_forgotten() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer, most_characters=2 * (ENTRY_CHARACTERS + 3))  # type: ignore[arg-type]
    for text in ("aaa", "bbb", "aaa", "ccc", "aaa"):
        chat(cache, text)
    assert (len(cache), tokenizer.asked) == (2, 3)
    chat(cache, "bbb")
    assert tokenizer.asked == 4
    chat(cache, "d" * 1000)
    assert len(cache) == 0, "what is larger than all is not kept"


@pytest.mark.parametrize("salt", ["", "s" * 200])
def test_short_texts_of_many_tenants_are_forgotten_too(salt: str) -> None:
    most = 10 * (ENTRY_CHARACTERS + len(salt) + 1)
    cache = PromptCache(Counting(), most_characters=most)  # type: ignore[arg-type]
    for number in range(100):
        chat(cache, str(number % 10), salt=salt + "ab"[number // 50])
    assert 0 < len(cache) <= 10


def test_threads_that_look_up_what_others_forget_get_what_the_tokenizer_gives() -> None:
    tokenizer = Counting()
    cache = PromptCache(tokenizer, most_characters=8 * (ENTRY_CHARACTERS + 2))  # type: ignore[arg-type]

    def ask(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(300):
            texts = [draw.choice("abcdefghijklmnop") for _ in range(draw.randint(1, 5))]
            asked = [Chat([{"role": "user", "content": text}], False, False) for text in texts]
            found = cache.chats(asked, salt=draw.choice(("", "s")))
            assert found == [tokenizer.one(chat) for chat in asked]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(ask, range(8)))
    assert len(cache) <= 8
    for text in "abcdefghijklmnop":
        chat(cache, text)
    assert 0 < len(cache) <= 8, "what is remembered is still counted right"


def test_ids_are_the_tuple_that_they_are() -> None:
    ids = Ids((1, 2, 3))
    assert ids == (1, 2, 3) and hash(ids) == hash((1, 2, 3))
    assert ids.digest == Ids([1, 2, 3]).digest != Ids([1, 2]).digest


def test_a_model_without_a_tokenizer_takes_no_messages() -> None:
    with pytest.raises(DagError, match="no tokenizer"):
        chat(PromptCache(None), "a")
