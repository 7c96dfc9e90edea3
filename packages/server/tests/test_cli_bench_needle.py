"""`dagengine bench needle` and `quality`: the hay, what a right answer is, intervals, and small runs of a tiny model,
which cannot answer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from fractions import Fraction
from math import comb
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dagengine_core_graph.query import Generate, Message, Query, lower, plan
from dagengine_core_graph.query.expressions import walk
from dagengine_server.cli import main
from dagengine_server.cli.bench.haystack import (
    CHANCE,
    NAMES,
    NEEDLE,
    QUESTION,
    Haystack,
    is_right,
    make_haystack,
    names_in,
)
from dagengine_server.cli.bench.intervals import wilson
from dagengine_server.cli.bench.judging import Way, _sightings
from dagengine_server.cli.bench.quality import other_orders

SIZES = ["--sentences", "1", "--runs", "2", "--page-size", "16", "--at-once", "6"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import tiny_model

    return tiny_model.build(tmp_path_factory.mktemp("hay") / "tiny", max_positions=1024)


def measure(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[tuple[str, str], dict[str, Any]]:
    """Figures by (case, metric)."""
    assert main(["bench", *arguments, "--device", "cpu", "--threads", "1", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = {(row["case"].removeprefix("tiny, "), row["metric"]): row for row in rows}
    assert len(found) == len(rows)
    return found


def test_a_haystack_has_its_needle_once_and_no_other_name() -> None:
    for seed in range(300):
        rng = Random(seed)
        fragments, sentences = rng.randint(1, 9), rng.randint(1, 5)
        stack = make_haystack(fragments, sentences, rng)
        whole = " ".join(stack.fragments)
        assert len(stack.fragments) == fragments
        assert whole.count(".") == fragments * sentences + 1
        assert whole.count(NEEDLE.format(stack.name)) == 1 and names_in(whole) == {stack.name}


def test_needles_are_at_every_place_and_equal_seeds_give_equal_haystacks() -> None:
    stacks = [make_haystack(3, 2, Random(f"0 3 {run}")) for run in range(400)]
    assert stacks == [make_haystack(3, 2, Random(f"0 3 {run}")) for run in range(400)]
    places = set()
    for stack in stacks:
        for index, text in enumerate(stack.fragments):
            said = text.split(". ")
            places |= {(index, at) for at, one in enumerate(said) if names_in(one)}
    assert places == {(fragment, at) for fragment in range(3) for at in range(3)}
    assert {stack.name for stack in stacks} == set(NAMES)


def test_right_is_who_names_the_one_as_a_word_and_nobody_else() -> None:
    assert is_right("The winner of the race is Rosa.", "Rosa") and is_right('"Rosa", Rosa!', "Rosa")
    wrong = ("", "rosa", "Rosario", "Rosa or Vera", "Vera", "The winner is the person who")
    assert not any(is_right(answer, "Rosa") for answer in wrong)
    guesses = [is_right(guess, name) for guess in NAMES for name in NAMES]
    assert sum(guesses) / len(guesses) == pytest.approx(CHANCE)


def test_intervals_hold_the_fraction_and_are_where_the_score_test_says() -> None:
    z = 1.959963984540054
    for n in (1, 7, 48, 200):
        for hits in range(n + 1):
            low, high = wilson(hits, n)
            assert 0 <= low <= hits / n <= high <= 1
            mirrored = wilson(n - hits, n)
            assert (low, high) == pytest.approx((1 - mirrored[1], 1 - mirrored[0]))
            for end in {low, high} - {0.0, 1.0}:
                assert (hits / n - end) ** 2 == pytest.approx(z * z * end * (1 - end) / n)


def test_intervals_cover_as_often_as_they_say() -> None:
    for n in (48, 200):
        ends = [wilson(hits, n) for hits in range(n + 1)]
        for p in (0.1, 0.3, 0.5, 0.8):
            covered = sum(
                comb(n, hits) * p**hits * (1 - p) ** (n - hits)
                for hits in range(n + 1)
                if ends[hits][0] <= p <= ends[hits][1]
            )
            assert 0.92 < covered < 0.98, (n, p)


def tokens_of(query: Query) -> list[str]:
    return [found.text for _, found in walk(query) if isinstance(found, Message)]


@pytest.mark.parametrize(("fragments", "arity", "rounds"), [(2, 2, 1), (4, 2, 2), (5, 2, 3), (9, 3, 2)])
def test_ways_ask_the_same_and_plain_prompts_differ_in_what_fragments_see(
    fragments: int, arity: int, rounds: int
) -> None:
    texts = [f"text {i}" for i in range(fragments)]
    for way in (Way("k", arity=arity), Way("k, plain", arity=arity, plain=True)):
        query, found = way.query(texts)
        calls = [call for _, call in walk(query) if isinstance(call, Generate)]
        assert found == rounds and [text for text in tokens_of(query) if text in texts] == texts
        assert len(calls) == -(-(fragments - 1) // (arity - 1))
        for node in lower(plan(query)).nodes:
            if not way.plain and any(part.text in texts for part in node.parts):
                assert not node.context and len(node.parts) == 1, "a fragment sees no other"
    flat, rounds_flat = Way("flat", plain=True).query(texts)
    assert rounds_flat == 1
    first, call = lower(plan(flat)).nodes
    assert [part.text for part in (*first.parts, *call.parts)] == [*texts, QUESTION]
    assert first.continues, "no default system turn, as in front of fragments that see no others"
    assert [ref.node for ref in call.context] == [first.id]


def test_who_saw_the_needle_and_who_kept_it_is_followed_through_the_rounds() -> None:
    query, _ = Way("k", arity=2).query([NEEDLE.format("Vera"), "Hay.", "Hay.", "Straw."])
    planned = plan(query).query
    paths = [node.path for node in lower(planned).nodes if node.generate is not None]

    def found(*answers: str) -> list[tuple[bool, frozenset[str]]]:
        given: Mapping[str, str] = dict(zip(paths, answers, strict=True))
        return list(_sightings(planned, "", dict(given), "Vera"))

    vera, zoe, nobody = frozenset({"Vera"}), frozenset({"Zoe"}), frozenset()
    assert found("Vera.", "Nobody.", "Vera.") == [(True, vera), (False, nobody), (True, vera)]
    assert found("Nobody.", "Zoe.", "Zoe.") == [(True, nobody), (False, zoe), (False, zoe)]
    assert found("Vera.", "Zoe.", "Zoe.") == [(True, vera), (False, zoe), (True, zoe)]


def test_other_orders_differ_from_the_given_one_and_from_each_other() -> None:
    stack = Haystack("Vera", ("a", "b", "c"))
    for seed in range(50):
        orders = [other.fragments for other in other_orders(stack, 9, Random(seed))]
        assert len({stack.fragments, *orders}) == len(orders) + 1 == 6
    assert other_orders(Haystack("Vera", ("a",)), 3, Random(0)) == []
    assert len(other_orders(Haystack("Vera", ("a", "b", "c", "d")), 3, Random(0))) == 3


def test_needle_counts_calls_rounds_and_tokens_and_says_whether_the_flat_judge_beats_chance(
    tiny: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "needle.md"
    sizes = ["--fragments", "4", "--fragments", "1", "--markdown", str(page), *SIZES]
    found = measure(capsys, "needle", "--model", str(tiny), *sizes)
    for size, calls, rounds in ((1, 1, 1), (4, 3, 2)):
        case = f"{size} fragments x 1 sentences"
        for way, base in (("flat", "k=2"), ("flat, plain prompt", "k=2, plain prompt")):
            flat, reduced = ({m: found[case, f"{m}, {name}"] for m in METRICS} for name in (way, base))
            assert (flat["calls"]["value"], flat["rounds"]["value"]) == (1, 1)
            assert (reduced["calls"]["value"], reduced["rounds"]["value"]) == (calls, rounds)
            assert flat["tokens seen"]["value"] == flat["tokens computed"]["value"]
            assert reduced["tokens seen"]["baseline_value"] == flat["tokens seen"]["value"]
            assert (reduced["tokens seen"]["value"] > flat["tokens seen"]["value"]) == (size > 2)
            assert flat["right answers"]["baseline"] == "chance"
            assert reduced["right answers"]["baseline"] == way
        assert (
            found[case, "tokens seen, flat"]["value"]
            == found[case, "tokens seen, flat, plain prompt"]["value"]
        )
    judged = found["1 fragments x 1 sentences, shortest hay", "right answers, from"]
    assert (judged["value"], judged["baseline_value"]) == (0.0, CHANCE)
    text = page.read_text()
    assert "| FAIL |" in text and "| 4 | k=2 | 0.00 (0.00-0.66) | no | 3 | 2 |" in text


METRICS = ("right answers", "calls", "rounds", "tokens seen", "tokens computed")


def test_quality_compares_what_is_the_same_and_shuffling_under_native_changes_nothing(
    tiny: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = ["--fragments", "1", "--fragments", "3", "--orders", "2", *SIZES]
    found = measure(capsys, "quality", "--model", str(tiny), *sizes)
    one, three = "1 fragments x 1 sentences", "3 fragments x 1 sentences"
    for way in ("linear", "native"):
        same = found[one, f"same answer as the plain prompt, {way}"]
        assert (same["value"], same["n"]) == (1.0, 2), "a fragment alone is a plain prompt"
    assert (one, "right answers, shuffled, linear") not in found, "one fragment has one order"
    shuffled = found[three, "same answer when shuffled, native"]
    assert (shuffled["value"], shuffled["n"]) == (1.0, 4)
    assert found[three, "same answer when shuffled, plain prompt"]["value"] < 1.0
    assert found[three, "right answers, given order, linear"]["baseline"] == "plain prompt"


@pytest.mark.parametrize("name", ["needle", "quality"])
def test_a_model_without_words_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", name, "--shape", "tiny"]) == 1
    assert "the hay is text" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_the_chance_level_is_exact() -> None:
    assert Fraction(CHANCE).limit_denominator(1000) == Fraction(1, len(set(NAMES)))
