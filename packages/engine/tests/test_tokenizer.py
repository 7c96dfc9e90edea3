"""Text and messages to ids: special tokens once, the template's own words, and errors instead of crashes."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from dagengine.errors import DagError
from dagengine.inputs import InputEncoder
from dagengine.tokenizer import Chat, Tokenizer

from .byte_tokenizers import byte_level, save

# Templates in the manner of SmolLM2 and Qwen, Llama 3, Mistral, and Gemma.
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "<|im_start|>system\nBe brief.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
HEADERS = (
    "{% for m in messages %}{% set text = '[' + m.role + ']' + m.content | trim + '<eos>' %}"
    "{% if loop.first %}{% set text = bos_token + text %}{% endif %}{{ text }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FOLDED = (
    "{% if messages[0].role == 'system' %}{% set first = messages[0].content + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set first = '' %}{% set rest = messages %}{% endif %}"
    "{{ bos_token }}{% for m in rest %}{% if m.role == 'user' %}"
    "[INST] {{ (first if loop.last else '') + m.content }} [/INST]"
    "{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
NO_SYSTEM = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
USER = [{"role": "user", "content": "Hi é😀"}]
TALK = [*USER, {"role": "assistant", "content": "Hello."}, {"role": "user", "content": "Why?"}]
SYSTEM = [{"role": "system", "content": "Rules."}, *USER]


def make(folder: Path, template: str | None, *, bos: bool = False, bos_token: str = "<bos>") -> Tokenizer:
    return Tokenizer(save(folder, byte_level(bos), template, bos_token=bos_token, eos_token="<eos>"))


def shown(tokenizer: Tokenizer, ids: tuple[int, ...] | list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("text", ["", "  two  spaces\n", "é😀 한국", "<|im_start|>x", "\x00", "a" * 5000])
def test_text_round_trips(tmp_path: Path, text: str) -> None:
    tokenizer = make(tmp_path, None)
    assert shown(tokenizer, tokenizer.encode(text, add_special_tokens=False)) == text


def test_text_has_special_tokens_exactly_where_it_begins_a_context(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, None, bos=True)
    bos = tokenizer.token_to_id("<bos>")
    encoder = InputEncoder(tokenizer)
    plain = tuple(tokenizer.encode("ab", add_special_tokens=False))

    def ids(**options: Any) -> tuple[int, ...]:
        return encoder.encode("ab", generate=True, **options).input_ids

    assert ids(has_context=False) == (bos, *plain)
    assert ids(has_context=True) == plain
    assert ids(has_context=True, add_special_tokens=True) == (bos, *plain)
    assert ids(has_context=False, add_special_tokens=False) == plain


@pytest.mark.parametrize("template", [CHATML, HEADERS, FOLDED, NO_SYSTEM])
@pytest.mark.parametrize("messages", [USER, TALK, SYSTEM])
@pytest.mark.parametrize("bos", [True, False])
def test_messages_without_context_are_those_of_transformers(
    tmp_path: Path, template: str, messages: list[dict[str, str]], bos: bool
) -> None:
    transformers = pytest.importorskip("transformers")
    if template is NO_SYSTEM and messages is SYSTEM:
        return
    tokenizer = make(tmp_path, template, bos=bos)
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), bos_token="<bos>", eos_token="<eos>"
    )
    for generate in (True, False):
        expected = theirs.apply_chat_template(
            messages,
            chat_template=template,
            add_generation_prompt=generate,
            tokenize=True,
            return_dict=False,
        )
        found = tokenizer.chat(messages, generate=generate, has_context=False)
        assert list(found.input_ids) == list(expected)
        assert found.input_ids.count(tokenizer.token_to_id("<bos>")) <= 1


@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize(
    ("template", "messages", "expected"),
    [
        (CHATML, USER, "<|im_start|>user\nHi é😀<|im_end|>\n<|im_start|>assistant\n"),
        (
            CHATML,
            SYSTEM,
            "<|im_start|>system\nRules.<|im_end|>\n<|im_start|>user\nHi é😀<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        (HEADERS, USER, "[user]Hi é😀<eos>[assistant]"),
        (HEADERS, SYSTEM, "[system]Rules.<eos>[user]Hi é😀<eos>[assistant]"),
        (FOLDED, USER, "[INST] Hi é😀 [/INST]"),
        (FOLDED, SYSTEM, "[INST] Rules.\n\nHi é😀 [/INST]"),
        (FOLDED, TALK, "[INST] Hi é😀 [/INST]Hello.<eos>[INST] Why? [/INST]"),
        (NO_SYSTEM, USER, "<user>Hi é😀<model>"),
    ],
)
def test_messages_after_a_context_have_no_second_bos_and_no_default_system_turn(
    tmp_path: Path, template: str, messages: list[dict[str, str]], expected: str, bos: bool
) -> None:
    tokenizer = make(tmp_path, template, bos=bos)
    found = tokenizer.chat(messages, generate=True, has_context=True)
    assert shown(tokenizer, found.input_ids) == expected


def test_a_turn_mark_that_is_also_the_bos_token_stays(tmp_path: Path) -> None:
    tokenizer = make(tmp_path, CHATML, bos_token="<|im_start|>")
    for messages, begin in ((USER, "<|im_start|>user"), (SYSTEM, "<|im_start|>system\nRules.")):
        found = tokenizer.chat(messages, generate=True, has_context=True)
        assert shown(tokenizer, found.input_ids).startswith(begin)


@pytest.mark.parametrize("has_context", [True, False])
@pytest.mark.parametrize(
    ("template", "prompt"), [(CHATML, "<|im_start|>assistant\n"), (HEADERS, "[assistant]"), (FOLDED, "")]
)
def test_the_turn_begins_where_the_generation_prompt_does(
    tmp_path: Path, template: str, prompt: str, has_context: bool
) -> None:
    tokenizer = make(tmp_path, template)
    found = tokenizer.chat(TALK, generate=True, has_context=has_context)
    assert found.turn_start is not None
    assert shown(tokenizer, found.input_ids[found.turn_start :]) == prompt
    silent = tokenizer.chat(TALK, generate=False, has_context=has_context)
    assert silent.turn_start is None
    assert silent.input_ids == found.input_ids[: found.turn_start]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].__init__.__globals__ }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ self.__init__.__globals__ }}",
        "{{ 1 / 0 }}",
        "{% for i in range(10 ** 9) %}{% endfor %}",
        "{{ messages[7].content + 1 }}",
        "{{ messages[0].content | nonsense_of_state.x }}",
        "{{ messages[0].content + 1 }}",
        "{{ nothing.attribute }}",
        "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    ],
)
@pytest.mark.parametrize("has_context", [True, False])
def test_a_template_that_fails_or_reaches_out_is_a_typed_error(
    tmp_path: Path, template: str, has_context: bool
) -> None:
    with pytest.raises(DagError) as caught:
        make(tmp_path, template).chat(USER, generate=True, has_context=has_context)
    assert caught.value.code in ("invalid_request", "unsupported")


def test_a_templates_own_refusal_reaches_the_caller(tmp_path: Path) -> None:
    with pytest.raises(DagError) as caught:
        make(tmp_path, NO_SYSTEM).chat(SYSTEM, generate=True, has_context=False)
    assert (caught.value.code, caught.value.field) == ("invalid_request", "messages")
    assert "System role not supported" in caught.value.message


def test_a_template_that_does_not_compile_is_refused_when_it_is_read(tmp_path: Path) -> None:
    with pytest.raises(DagError) as caught:
        make(tmp_path, "{% if %}")
    assert (caught.value.code, caught.value.field) == ("unsupported", "chat_template")


def test_without_a_template_messages_are_refused_and_text_is_not(tmp_path: Path) -> None:
    encoder = InputEncoder(make(tmp_path, None))
    assert encoder.encode("hi", generate=True, has_context=False).input_ids
    with pytest.raises(DagError) as caught:
        encoder.encode(USER, generate=True, has_context=False)
    assert caught.value.code == "unsupported"


@pytest.mark.parametrize("has_context", [True, False])
def test_lone_surrogates_are_refused_and_name_the_field(tmp_path: Path, has_context: bool) -> None:
    encoder = InputEncoder(make(tmp_path, CHATML))
    for value in ("a\ud800b", [{"role": "user", "content": "\udfff"}]):
        with pytest.raises(DagError) as caught:
            encoder.encode(value, generate=True, has_context=has_context)
        assert caught.value.code == "invalid_request"
        assert caught.value.field in ("input", "messages")


@pytest.mark.parametrize("template", [CHATML, HEADERS, FOLDED, NO_SYSTEM, None])
def test_chats_that_are_encoded_together_are_what_each_is_alone(tmp_path: Path, template: str | None) -> None:
    tokenizer = make(tmp_path, template)
    broken = [{"role": "user", "content": "\ud800"}]
    chats = [
        Chat(messages, generate, has_context)
        for messages in (USER, TALK, broken, SYSTEM)
        for generate in (False, True)
        for has_context in (False, True)
    ]
    for one, found in zip(chats, tokenizer.chats(chats), strict=True):
        try:
            alone: object = tokenizer.chat(one.messages, generate=one.generate, has_context=one.has_context)
        except DagError as error:
            assert isinstance(found, DagError) and found.message == error.message
        else:
            assert found == alone
    assert tokenizer.chats([]) == []


@pytest.mark.parametrize("generate", [False, True])
def test_what_the_file_says_of_padding_and_truncation_changes_no_prompt(
    tmp_path: Path, generate: bool
) -> None:
    plain, padded = byte_level(False), byte_level(False)
    padded.enable_padding(pad_id=0, pad_token="<bos>")
    padded.enable_truncation(8)
    chats = [Chat(messages, generate, False) for messages in (USER, TALK, SYSTEM)]
    expected, found = (
        Tokenizer(save(tmp_path / name, tokenizer, CHATML)).chats(chats)
        for name, tokenizer in (("plain", plain), ("padded", padded))
    )
    assert found == expected and len({len(prompt.input_ids) for prompt in found}) == 3  # type: ignore[union-attr]


def test_templates_are_found_in_their_own_file_then_in_the_configuration(tmp_path: Path) -> None:
    config = {"chat_template": [{"name": "tools", "template": "T"}, {"name": "default", "template": "D"}]}
    folder = save(tmp_path, byte_level(), None, **config)
    assert Tokenizer(folder).template_source == "D"
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "C"}))
    assert Tokenizer(folder).template_source == "C"
    (folder / "chat_template.jinja").write_text("F")
    assert Tokenizer(folder).template_source == "F"
    assert Tokenizer(folder, "given").template_source == "given"


def test_what_templates_of_transformers_may_use_is_there(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"
        "{{ {'a': 'é'} | tojson }}{{ strftime_now('%Y') | length }}{{ tools is none }}"
    )
    found = make(tmp_path, template).chat(TALK, generate=False, has_context=False)
    assert shown(make(tmp_path, template), found.input_ids) == 'Hi é😀{"a": "é"}4True'


@pytest.mark.parametrize(
    ("template", "formats"),
    [
        ("{{ messages }}", ()),
        ("{{ strftime_now('%Y') }}{{ strftime_now('%m') }}{{ strftime_now('%Y') }}", ("%Y", "%m")),
        ("{% if strftime_now is defined %}{{ strftime_now('%Y') }}{% endif %}", ("%Y",)),
        ("{% set form = '%Y' %}{{ strftime_now(form) }}", None),
        ("{{ '%Y' | map(strftime_now) | list }}", None),
        ("{% set now = strftime_now %}{{ now('%H') }}{{ strftime_now('%Y') }}", None),
    ],
)
def test_what_a_template_reads_from_the_clock_is_known(
    tmp_path: Path, template: str, formats: tuple[str, ...] | None
) -> None:
    now = datetime.now()
    wanted = None if formats is None else tuple(now.strftime(form) for form in formats)
    assert make(tmp_path, template).read_clock() == wanted


def test_special_tokens_may_be_written_as_objects(tmp_path: Path) -> None:
    bos = {"content": "<bos>", "lstrip": False, "special": True}
    tokenizer = Tokenizer(save(tmp_path, byte_level(), HEADERS, bos_token=bos, eos_token=None))
    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<bos>", None)


def test_ids_beyond_a_gap_in_the_vocabulary_count(tmp_path: Path) -> None:
    folder = save(tmp_path, byte_level())
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"]["END"] = 999
    (folder / "tokenizer.json").write_text(json.dumps(content))
    tokenizer = Tokenizer(folder)
    assert tokenizer.decode([999]) == "END"
    assert tokenizer.vocab_size == 1000
