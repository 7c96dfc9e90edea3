"""Streamed text: joined it is the whole text, and never shows half a character or part of a stop string."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from dagengine.detokenizer import REPLACEMENT, IncrementalDetokenizer

from .byte_tokenizers import PIECES, SPECIALS, byte_fallback, byte_level

BYTE_LEVEL = byte_level()
BYTE_FALLBACK = byte_fallback()
VOCAB = BYTE_LEVEL.get_vocab_size(with_added_tokens=True)
PIECE_ID = {piece: 256 + i for i, piece in enumerate(p for p in PIECES if len(p) > 1)}


def decode(ids: Sequence[int]) -> str:
    return BYTE_LEVEL.decode(list(ids), skip_special_tokens=True)


def decode_fallback(ids: Sequence[int]) -> str:
    return BYTE_FALLBACK.decode(list(ids), skip_special_tokens=True)


@dataclass(frozen=True)
class Streamed:
    """What a reader of the stream gets, event by event, and what the finished answer says."""

    deltas: list[str]
    ids: list[list[int]]
    text: str
    num_kept: int
    num_pushed: int
    stopped_by: str | None


def stream(
    ids: Sequence[int],
    stop: Sequence[str] = (),
    *,
    min_tokens: int = 0,
    decoder: Callable[[Sequence[int]], str] = decode,
) -> Streamed:
    """Push ids as the engine does, until a stop string or the end."""
    text = IncrementalDetokenizer(decoder, stop)
    deltas, emitted, seen, pushed = [], [], 0, 0
    for index, token in enumerate(ids):
        last = index == len(ids) - 1
        text.push(token, check_stop=index + 1 >= min_tokens)
        pushed += 1
        if last:
            text.flush(check_stop=index + 1 >= min_tokens)
        finished = last or text.stopped_by is not None
        deltas.append(text.take(finished=finished))
        settled = text.num_kept() if finished else min(text.num_kept(), text.num_settled())
        emitted.append(list(ids[seen:settled]))
        seen = max(seen, settled)
        if finished:
            break
    return Streamed(deltas, emitted, text.text, text.num_kept(), pushed, text.stopped_by)


def split(data: bytes, rng: random.Random) -> list[int]:
    """Ids whose bytes are `data`, cut at random among the tokens there are."""
    ids, at = [], 0
    while at < len(data):
        fitting = [piece for piece in PIECE_ID if data.startswith(piece, at)]
        piece = rng.choice([*fitting, data[at : at + 1]])
        ids.append(PIECE_ID.get(piece, piece[0]))
        at += len(piece)
    return ids


any_ids = st.lists(st.integers(0, VOCAB - 1), max_size=40)
texts = st.text(st.sampled_from("aéSTOPEND the\n😀€\ufffd한"), max_size=30) | st.text(max_size=20)


def test_the_fixture_cuts_characters_and_knows_every_id() -> None:
    assert VOCAB == 256 + len(PIECE_ID) + len(SPECIALS)
    assert decode([PIECE_ID[b"\xf0\x9f"], PIECE_ID[b"\x98\x80"]]) == "😀"
    assert decode([PIECE_ID[b"\xf0\x9f"]]) == REPLACEMENT
    assert all(decode([PIECE_ID[p]]).encode() == p for p in (b" the", b"END"))


@settings(max_examples=500, deadline=None)
@given(any_ids)
@example([0xF0, 0x9F, 0x98, 0x80])
@example([0xF0, 0x9F, 0x41, 0x9F, 0x98])
@example([0xC3, 0xC3, 0xA9, 0xFF])
@example([0x41, 0xE2, 0x82])
def test_joined_deltas_are_the_whole_text_whatever_the_bytes(ids: list[int]) -> None:
    found = stream(ids)
    assert "".join(found.deltas) == found.text == decode(ids)
    assert list(chain.from_iterable(found.ids)) == ids


@settings(max_examples=300, deadline=None)
@given(texts, st.randoms(use_true_random=False))
def test_no_delta_holds_half_a_character(text: str, rng: random.Random) -> None:
    found = stream(split(text.encode(), rng))
    assert "".join(found.deltas) == text
    for delta in found.deltas:
        assert delta.count(REPLACEMENT) <= text.count(REPLACEMENT)
    if REPLACEMENT not in text:
        assert not any(REPLACEMENT in delta for delta in found.deltas)


@settings(max_examples=200, deadline=None)
@given(texts, st.integers(0, 30), st.randoms(use_true_random=False))
def test_an_answer_cut_inside_a_character_ends_as_it_decodes(
    text: str, keep: int, rng: random.Random
) -> None:
    ids = split(text.encode(), rng)[:keep]
    assert "".join(stream(ids).deltas) == decode(ids)


def test_text_is_shown_as_soon_as_it_is_whole() -> None:
    assert stream([0x61, 0xF0, 0x9F, 0x98, 0x80, 0x62]).deltas == ["a", "", "", "", "😀", "b"]
    assert stream([*b"abc"], ["xyz"]).deltas == ["a", "b", "c"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.one_of(st.integers(256, 261), st.sampled_from("é€😀x")), max_size=15))
def test_byte_fallback_and_space_marks(parts: list[int | str]) -> None:
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else list(part.encode())
    found = stream(ids, decoder=decode_fallback)
    assert "".join(found.deltas) == decode_fallback(ids)
    assert not any(REPLACEMENT in delta for delta in found.deltas)


def expected(ids: Sequence[int], stop: Sequence[str], min_tokens: int) -> tuple[str, str | None, int]:
    """Text, stop string and number of tokens, found by looking at the whole text after every token."""
    before = 0
    for count in range(1, len(ids) + 1):
        text = decode(ids[:count])
        if count < len(ids):
            text = text.rstrip(REPLACEMENT)
        found = [
            (at, -len(s), s)
            for s in stop
            for at in range(len(text))
            if text.startswith(s, at) and at + len(s) > before
        ]
        if count >= min_tokens and found:
            at, _, name = min(found)
            return text[:at], name, count
        before = len(text)
    return decode(ids), None, len(ids)


stops = st.lists(
    st.sampled_from(["STOP", "S", "END", "é", "😀", "aé", "OPS", "STOPS", "TO", "\n\n", " the"]),
    min_size=1,
    max_size=3,
)


@settings(max_examples=800, deadline=None)
@given(
    st.text(st.sampled_from("aéSTOPEND the\n😀€"), max_size=24),
    stops,
    st.integers(0, 8),
    st.randoms(use_true_random=False),
)
def test_stop_strings_end_the_stream_and_the_answer_alike(
    text: str, stop: list[str], min_tokens: int, rng: random.Random
) -> None:
    ids = split(text.encode(), rng)
    found = stream(ids, stop, min_tokens=min_tokens)
    whole, stopped_by, count = expected(ids, stop, min_tokens)
    assert (found.text, found.stopped_by) == (whole, stopped_by)
    assert found.num_pushed == count
    assert "".join(found.deltas) == found.text
    assert list(chain.from_iterable(found.ids)) == ids[: found.num_kept]


@settings(max_examples=400, deadline=None)
@given(st.text(st.sampled_from("aéSTOPEND\n😀€"), max_size=24), stops, st.randoms(use_true_random=False))
def test_tokens_wholly_inside_the_stop_string_are_dropped_and_no_others(
    text: str, stop: list[str], rng: random.Random
) -> None:
    ids = split(text.encode(), rng)
    found = stream(ids, stop)
    size = len(found.text.encode())
    starts = [sum(len(BYTES[i]) for i in ids[:n]) for n in range(len(ids))]
    assert found.num_kept == sum(start < size for start in starts[: found.num_pushed])


BYTES = {b: bytes([b]) for b in range(256)} | {i: piece for piece, i in PIECE_ID.items()}


@pytest.mark.parametrize(
    ("pieces", "stop", "deltas", "kept"),
    [
        ([b"h", b"i", b"ST", b"OP"], ["STOP"], ["h", "i", "", ""], 2),
        ([b"h", b"ST", b"x", b"y"], ["STOP"], ["h", "", "STx", "y"], 4),
        ([b"\xe2\x82", b"\xacSTOP"], ["STOP"], ["", "€"], 2),
        ([b"ST", b"OP"], ["STOP"], ["", ""], 0),
        ([b"S", b"S", b"ST", b"OP"], ["STOP"], ["", "S", "S", ""], 2),
        ([b"a", b"ST"], ["STOP"], ["a", "ST"], 2),
        ([b"a", b"\xf0\x9f\x98\x80\xf0"], ["\U0001f600"], ["a", ""], 1),
    ],
)
def test_examples_of_stop_strings(pieces: list[bytes], stop: list[str], deltas: list[str], kept: int) -> None:
    found = stream([PIECE_ID.get(p, p[0]) for p in pieces], stop)
    assert (found.deltas, found.num_kept) == (deltas, kept)


def test_special_tokens_have_no_text() -> None:
    eos = BYTE_LEVEL.token_to_id("<eos>")
    assert stream([0x61, eos, 0x62]).deltas == ["a", "", "b"]
    assert stream([eos, eos]).deltas == ["", ""]
