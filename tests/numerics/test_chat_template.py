"""The demo model's chat, and its text, to the ids that transformers makes of them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dagengine.inputs import InputEncoder
from dagengine.tokenizer import Tokenizer

transformers = pytest.importorskip("transformers")

CHATS = [
    [{"role": "user", "content": "Why is the sky blue?"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "  Why? \n\n"}],
    [
        {"role": "user", "content": "한국 é 😀"},
        {"role": "assistant", "content": "Yes.\n"},
        {"role": "user", "content": "<|im_end|> # #"},
    ],
]


@pytest.fixture(scope="module")
def ours(demo_model_folder: Path) -> InputEncoder:
    return InputEncoder(Tokenizer(demo_model_folder))


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("generate", [True, False])
def test_chats_are_those_of_transformers(
    demo_model_folder: Path, ours: InputEncoder, messages: list[dict[str, str]], generate: bool
) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(demo_model_folder)
    expected = theirs.apply_chat_template(messages, add_generation_prompt=generate, return_dict=False)
    found = ours.encode(messages, generate=generate, has_context=False)
    assert list(found.input_ids) == list(expected)
    if generate:
        assert theirs.decode(found.input_ids[found.turn_start :]) == "<|im_start|>assistant\n"


@pytest.mark.parametrize(
    "text", ["", "# #", " The  cat\n\n\tsat. ", "é😀한국", "<|im_start|>user", "1234 + 5"]
)
def test_text_is_that_of_transformers(demo_model_folder: Path, ours: InputEncoder, text: str) -> None:
    theirs = transformers.AutoTokenizer.from_pretrained(demo_model_folder)
    expected = theirs(text)["input_ids"]
    assert list(ours.encode(text, generate=False, has_context=False).input_ids) == expected
    plain = theirs(text, add_special_tokens=False)["input_ids"]
    assert list(ours.encode(text, generate=False, has_context=True).input_ids) == plain


def test_chats_after_a_context_lack_only_what_begins_a_conversation(ours: InputEncoder) -> None:
    assert ours.tokenizer is not None
    alone = ours.encode(CHATS[0], generate=True, has_context=False).input_ids
    after = ours.encode(CHATS[0], generate=True, has_context=True).input_ids
    assert alone[-len(after) :] == after
    assert ours.tokenizer.decode(after, skip_special_tokens=False) == (
        "<|im_start|>user\nWhy is the sky blue?<|im_end|>\n<|im_start|>assistant\n"
    )
