"""Text to ids and back, and chat messages to text, from a Hugging Face folder's own files.

Reads `tokenizer.json` with the `tokenizers` library and the chat template with a sandboxed jinja2. Ids of states
are never decoded and encoded again; only what a caller sends as text passes through here.
Texts are encoded as batches: only those let other threads run meanwhile, and one of several texts is spread over cores.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer as HFTokenizer

from .errors import DagError

CLOCK = "strftime_now"
_MARK = "\u2063system\u2063"
_BEFORE = ({"role": "system", "content": _MARK},)
_SPECIALS = tuple(f"{name}_token" for name in ("bos", "eos", "unk", "pad", "sep", "cls", "mask"))


class Chat(NamedTuple):
    """Messages to be rendered, and whether a generation prompt follows and a context stands before them."""

    messages: Sequence[Mapping[str, Any]]
    generate: bool
    has_context: bool


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A rendered chat: its ids, and the offset at which the generation prompt begins (None without one)."""

    input_ids: tuple[int, ...]
    turn_start: int | None


class Tokenizer:
    """One model's tokenizer.

    Args:
        folder: holds `tokenizer.json`, and optionally `tokenizer_config.json` and `chat_template.jinja`.
        chat_template: replaces the folder's template.
    """

    def __init__(self, folder: Path, chat_template: str | None = None) -> None:
        path = folder / "tokenizer.json"
        if not path.exists():
            raise DagError("unsupported", f"{folder} has no tokenizer.json", "model")
        self._tokenizer = HFTokenizer.from_file(str(path))
        self._tokenizer.no_padding()  # what the file says of it is for training, and batches would be padded
        self._tokenizer.no_truncation()
        config_path = folder / "tokenizer_config.json"
        config: dict[str, Any] = json.loads(config_path.read_text()) if config_path.exists() else {}
        self._specials = {
            name: text for name in _SPECIALS if (text := _token_text(config.get(name))) is not None
        }
        self.bos_token, self.eos_token = self._specials.get("bos_token"), self._specials.get("eos_token")
        self._vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.template_source = chat_template or _folder_template(folder, config)
        self._template = self._compile(self.template_source) if self.template_source else None
        self._times = _clock_formats(self.template_source) if self.template_source else ()

    @property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included; larger ids of a padded matrix are never sampled."""
        return self._vocab_size

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text` as it stands.

        Raises:
            DagError: `invalid_request` for text that is no Unicode (a lone surrogate).
        """
        require_unicode(text, "input")
        return list(self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_text(self, token_id: int) -> str:
        """One id by itself, special tokens shown; bytes that are no character become U+FFFD."""
        return str(self._tokenizer.decode([token_id], skip_special_tokens=False))

    def token_to_id(self, token: str) -> int | None:
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def chat(self, messages: Sequence[Mapping[str, Any]], *, generate: bool, has_context: bool) -> ChatPrompt:
        """Render messages and encode them.

        With a context there is no second BOS and no default system turn: the messages are rendered after a
        system turn of ours, which is then cut off; where the template has no such turn there is no default to
        avoid. The generation prompt is added iff the node generates.

        Raises:
            DagError: `invalid_request` with the template's own message where it refuses the messages.
        """
        (found,) = self.chats([Chat(messages, generate, has_context)])
        if isinstance(found, DagError):
            raise found
        return found

    def chats(self, chats: Sequence[Chat]) -> list[ChatPrompt | DagError]:
        """What `chat` gives for each, or raises; faster than one after the other."""
        found: list[ChatPrompt | DagError] = []
        texts: list[tuple[int, str]] = []
        turns: list[tuple[int, str, int]] = []
        for index, chat in enumerate(chats):
            try:
                text, turn = self._rendered(chat)
                require_unicode(text, "messages")
            except DagError as error:
                found.append(error)
                continue
            found.append(ChatPrompt((), None))
            if turn is None:
                texts.append((index, text))
            else:
                turns.append((index, text, turn))
        encode, encode_with_offsets = self._tokenizer.encode_batch_fast, self._tokenizer.encode_batch
        encodings = encode([text for _, text in texts], add_special_tokens=False) if texts else []
        for (index, _), encoding in zip(texts, encodings, strict=True):
            found[index] = ChatPrompt(tuple(encoding.ids), None)
        encodings = (
            encode_with_offsets([text for _, text, _ in turns], add_special_tokens=False) if turns else []
        )
        for (index, _, turn), encoding in zip(turns, encodings, strict=True):
            ids = tuple(encoding.ids)
            start = bisect_left(range(len(ids)), turn, key=lambda i, e=encoding: e.token_to_chars(i)[0])
            found[index] = ChatPrompt(ids, start)
        return found

    def read_clock(self) -> tuple[str, ...] | None:
        """What the chat template is told of the time now; None where only rendering shows what it asks.

        Equal messages give equal prompts as long as this is equal.
        """
        if not self._times:
            return self._times
        now = datetime.now()
        return tuple(now.strftime(form) for form in self._times)

    def _rendered(self, chat: Chat) -> tuple[str, int | None]:
        """The text, and the offset at which its generation prompt begins; None where it has none of its own."""

        def render(generate: bool) -> str:
            if chat.has_context:
                return self._render_after_context(chat.messages, generate)
            return self._render(chat.messages, generate)

        text = render(chat.generate)
        if not chat.generate:
            return text, None
        without = render(False)
        return text, len(without) if text.startswith(without) else None

    def _render_after_context(self, messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
        if messages and messages[0].get("role") == "system":
            return self._without_bos(messages, generate)
        try:
            before = self._before if self._times == () else self._render(_BEFORE, False)
            text = self._render([*_BEFORE, *messages], generate)
        except DagError:
            before = text = ""
        if _MARK in before and text.startswith(before):
            return text.removeprefix(before)
        return self._without_bos(messages, generate)

    @cached_property
    def _before(self) -> str:
        """A system turn of ours, where the template does not ask for the time."""
        return self._render(_BEFORE, False)

    def _without_bos(self, messages: Sequence[Mapping[str, Any]], generate: bool) -> str:
        """Render without the BOS that the template writes in front: its variable, or what a post-processor adds."""
        text = self._render(messages, generate)
        if self.bos_token and text.startswith(self.bos_token):
            if not self._render(messages, generate, bos_token="").startswith(self.bos_token):
                return text.removeprefix(self.bos_token)
        added = self.encode("", add_special_tokens=True)
        return text.removeprefix(self.token_text(added[0])) if added else text

    def _render(self, messages: Sequence[Mapping[str, Any]], generate: bool, **replaced: str) -> str:
        if self._template is None:
            raise DagError(
                "unsupported", "this model has no chat template; send text, or set one", "messages"
            )
        try:
            return self._template.render(
                messages=[dict(m) for m in messages],
                add_generation_prompt=generate,
                tools=None,
                documents=None,
                **{"bos_token": "", "eos_token": ""} | self._specials | replaced,
            )
        except jinja2.TemplateError as error:
            raise DagError("invalid_request", f"the chat template refuses: {error}", "messages") from None
        except Exception as error:
            raise DagError("invalid_request", f"the chat template fails: {error}", "messages") from None

    @staticmethod
    def _compile(source: str) -> jinja2.Template:
        def refuse(message: str) -> None:
            raise jinja2.TemplateError(message)

        environment = _environment()
        environment.globals["raise_exception"] = refuse
        environment.globals[CLOCK] = lambda form: datetime.now().strftime(form)
        environment.filters["tojson"] = lambda value, **kw: json.dumps(value, ensure_ascii=False, **kw)
        try:
            template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise DagError(
                "unsupported", f"the chat template does not compile: {error}", "chat_template"
            ) from None
        # Each rendering copies them, which takes its time where they are a chain of maps.
        template.globals = dict(template.globals)
        return template


class _Generation(Extension):
    """`{% generation %}` marks what the assistant says, for training; it renders as its body."""

    tags = frozenset({"generation"})

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment() -> ImmutableSandboxedEnvironment:
    return ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )


def _clock_formats(source: str) -> tuple[str, ...] | None:
    """The formats of a template's `strftime_now` calls; None where it does anything else with it but ask for it."""
    template = _environment().parse(source)
    read = sum(name.name == CLOCK for name in template.find_all(nodes.Name))
    asked = sum(_is_clock(test.node) for test in template.find_all(nodes.Test) if test.name == "defined")
    forms = [
        call.args[0].value
        for call in template.find_all(nodes.Call)
        if _is_clock(call.node) and len(call.args) == 1 and isinstance(call.args[0], nodes.Const)
    ]
    if asked + len(forms) < read or not all(isinstance(form, str) for form in forms):
        return None
    return tuple(dict.fromkeys(forms))


def _is_clock(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == CLOCK


def require_unicode(text: str, field: str) -> None:
    """Raises DagError `invalid_request` for text that is no Unicode (a lone surrogate)."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise DagError(
            "invalid_request", "the text holds a lone surrogate, which is no character", field
        ) from None


def _token_text(value: object) -> str | None:
    if isinstance(value, str):
        return value
    if isinstance(value, Mapping) and isinstance(value.get("content"), str):
        return str(value["content"])
    return None


def _folder_template(folder: Path, config: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text()
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, Mapping)}
        template = named.get("default")
    return template if isinstance(template, str) else None
