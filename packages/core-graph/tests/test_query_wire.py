"""spnl's form and ours: what is read and written, and that every mistake names its subtree."""

import json
import math
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_queries import meaning, random_query

from dagengine_core_graph import QueryError, SchemaError
from dagengine_core_graph.query import (
    FORMAT,
    Chat,
    Cross,
    Fragment,
    Generate,
    GenerateParams,
    Map,
    Monad,
    Plus,
    Print,
    Query,
    Repeat,
    Retrieve,
    Seq,
    Zip,
    chat,
    cross,
    dump_query,
    dump_spnl,
    fragment,
    g,
    load_query,
    load_spnl,
    map_inputs,
    monad,
    plus,
    prepare,
    pretty,
    repeat,
    retrieve,
    seq,
    system,
    user,
    zipped,
)

REPEAT = {
    "repeat": {
        "n": 1,
        "g": {
            "model": "m",
            "max_tokens": 100,
            "temperature": 0.5,
            "input": {
                "cross": [{"system": "S"}, {"plus": [{"user": "A"}, {"user": "B"}]}, {"user": "Q"}],
            },
        },
    }
}
MAP = {"map": {"metadata": {"model": "m", "max_tokens": 8, "temperature": 0.5}, "inputs": ["a", "b"]}}


def test_what_spnl_sends_is_read_as_it_stands_and_written_as_it_came() -> None:
    params = GenerateParams("m", 100, 0.5)
    asked = cross(system("S"), plus("A", "B"), "Q")
    assert load_query(REPEAT) == Repeat(1, Generate(params, asked))
    assert load_query({"g": REPEAT["repeat"]["g"]}) == Generate(params, asked)
    assert load_query(MAP) == Map(GenerateParams("m", 8, 0.5), ("a", "b"))
    for sent in (REPEAT, {"g": REPEAT["repeat"]["g"]}, MAP):
        assert dump_spnl(load_query(sent)) == sent


def test_nested_calls_and_every_tag_of_spnl_are_read() -> None:
    call = {"model": "m", "input": {"user": "x"}}
    sent = {
        "seq": [
            {"par": [{"assistant": "a"}, {"print": "working"}]},
            {"monad": {"plus": [{"g": {**call, "max_tokens": 1, "temperature": 0}}]}},
            {"zip": {"first": {"system": "s"}, "second": {"repeat": {"n": 0, "g": call}}}},
            {"g": {"model": "m", "input": {"plus": [{"g": call}, {"g": call}]}}},
            {"augment": {"embedding_model": "e", "body": {"user": "?"}, "doc": ["d.txt", {"text": "words"}]}},
        ]
    }
    found = load_spnl(sent)
    inner = g("x", model="m")
    assert isinstance(found, Seq)
    assert found.children[1:] == (
        monad(plus(prepare("x", model="m"))),
        zipped(system("s"), Repeat(0, inner)),
        g(plus(inner, inner), model="m"),
        Retrieve("d.txt", user("?"), None, "words", "e"),
    )
    assert load_spnl(dump_spnl(found)) == found


def test_what_spnl_leaves_out_has_its_defaults_and_null_is_absent() -> None:
    assert load_spnl({"g": {"model": "m", "input": {"user": "x"}}}) == Generate(
        GenerateParams("m", 0, 0.6), user("x")
    )
    assert load_spnl(
        {"g": {"model": "m", "max_tokens": None, "temperature": None, "input": {"user": "x"}}}
    ) == (load_spnl({"g": {"model": "m", "input": {"user": "x"}}}))


def test_random_queries_go_through_our_form_and_back() -> None:
    seen: set[type[Query]] = set()
    for seed in range(600):
        query = random_query(random.Random(seed))
        if holds_an_empty_join(query):
            with pytest.raises(SchemaError) as caught:
                load_query(dump_query(query))
            assert caught.value.code == "invalid_request"
            continue
        sent = json.loads(json.dumps(dump_query(query)))
        assert sent["format"] == FORMAT
        assert load_query(sent) == query
        waiting = [query]
        while waiting:
            found = waiting.pop()
            seen.add(type(found))
            waiting += found.subqueries
    assert len(seen) == 14


def test_what_spnl_can_say_keeps_its_meaning_in_spnl_and_the_rest_is_refused() -> None:
    said = 0
    for seed in range(600):
        query = random_query(random.Random(seed))
        if holds_an_empty_join(query):
            continue
        try:
            sent = json.loads(json.dumps(dump_spnl(query)))
        except QueryError as error:
            assert error.code == "invalid_request" and error.field
            continue
        said += 1
        assert meaning(load_spnl(sent)) == meaning(query)
    assert said > 200


def holds_an_empty_join(query: Query) -> bool:
    if isinstance(query, Plus | Cross | Seq) or query.tag == "par":
        return not query.subqueries or any(map(holds_an_empty_join, query.subqueries))
    return any(map(holds_an_empty_join, query.subqueries))


def test_a_fragment_is_a_users_message_in_spnl_and_a_chat_a_call() -> None:
    assert dump_spnl(fragment("a", "d")) == {"user": "a"}
    assert dump_spnl(chat(system("s"), "u", model="m", max_tokens=3)) == {
        "g": {
            "model": "m",
            "max_tokens": 3,
            "temperature": 0.6,
            "input": {"cross": [{"system": "s"}, {"user": "u"}]},
        }
    }


@pytest.mark.parametrize(
    ("query", "field"),
    [
        (cross("a", g("b")), "cross[1]"),
        (g(g("b"), model="m"), "g.input"),
        (g("b", model="m", options={"seed": 1}), "g"),
        (plus(map_inputs(["a"])), "plus[0]"),
        (g(retrieve("c", "?"), model="m"), "g.input"),
        (retrieve("c", "?", document="d", embedding_model="e", limit=3), "retrieve"),
    ],
)
def test_what_spnl_cannot_say_names_its_subtree(query: Query, field: str) -> None:
    with pytest.raises(QueryError) as caught:
        dump_spnl(query)
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)


G = {"model": "m", "input": {"user": "x"}}
DEEP: Any = {"user": "x"}
for _ in range(64):
    DEEP = {"cross": [DEEP]}

BAD_SPNL: list[tuple[Any, str | None]] = [
    (None, None),
    ("text", None),
    ([], None),
    ({}, None),
    ({"user": "a", "system": "b"}, None),
    ({"use": "a"}, None),
    ({1: "a"}, None),
    ({"ask": "a"}, None),
    ({"fragment": "a"}, None),
    ({"cross": []}, "cross"),
    ({"plus": []}, "plus"),
    ({"seq": None}, "seq"),
    ({"par": {}}, "par"),
    ({"user": 1}, "user"),
    ({"user": "\ud800"}, "user"),
    ({"cross": [{"user": "a"}, {"plus": [{"user": None}]}]}, "cross[1].plus[0].user"),
    ({"cross": [{"user": "a"}, {"plus": ["a"]}]}, "cross[1].plus[0]"),
    ({"g": {**G, "input": {"cross": [{"user": "a"}, {"plus": []}]}}}, "g.input.cross[1].plus"),
    ({"g": {"model": "m"}}, "g.input"),
    ({"g": {"input": {"user": "x"}}}, "g.model"),
    ({"g": {**G, "model": ""}}, "g.model"),
    ({"g": {**G, "closed": True}}, "g.closed"),
    ({"g": {**G, "top_k": 3}}, "g.top_k"),
    ({"g": {**G, "max_tokens": 2**31}}, "g.max_tokens"),
    ({"g": {**G, "max_tokens": -1}}, "g.max_tokens"),
    ({"g": {**G, "max_tokens": 1.0}}, "g.max_tokens"),
    ({"g": {**G, "max_tokens": "8"}}, "g.max_tokens"),
    ({"g": {**G, "temperature": "hot"}}, "g.temperature"),
    ({"g": {**G, "temperature": True}}, "g.temperature"),
    ({"g": {**G, "temperature": math.inf}}, "g.temperature"),
    ({"g": {**G, "temperature": math.nan}}, "g.temperature"),
    ({"g": {**G, "temperature": 10**400}}, "g.temperature"),
    ({"g": {**G, "temperature": -0.1}}, "g.temperature"),
    ({"g": [1]}, "g"),
    ({"repeat": {"g": G}}, "repeat.n"),
    ({"repeat": {"n": 2}}, "repeat.g"),
    ({"repeat": {"n": 256, "g": G}}, "repeat.n"),
    ({"repeat": {"n": -1, "g": G}}, "repeat.n"),
    ({"repeat": {"n": "{n}", "g": G}}, "repeat.n"),
    ({"repeat": {"n": 2, "query": {"g": G}}}, "repeat.query"),
    ({"repeat": {"n": 2, "g": {**G, "input": {"plus": []}}}}, "repeat.g.input.plus"),
    ({"map": {"metadata": {"model": "m"}, "inputs": []}}, "map.inputs"),
    ({"map": {"metadata": {"model": "m"}, "inputs": ["a", 1]}}, "map.inputs[1]"),
    ({"map": {"metadata": {"model": "m"}, "inputs": ["a", ""]}}, "map.inputs[1]"),
    ({"map": {"metadata": {}, "inputs": ["a"]}}, "map.metadata.model"),
    ({"map": {"metadata": {"model": "m", "input": "x"}, "inputs": ["a"]}}, "map.metadata.input"),
    ({"map": {"inputs": ["a"]}}, "map.metadata"),
    ({"zip": {"first": {"user": "a"}}}, "zip.second"),
    ({"zip": {"first": {"user": "a"}, "second": {"user": 1}}}, "zip.second.user"),
    ({"monad": {"use": "a"}}, "monad"),
    ({"augment": {"embedding_model": "e", "body": {"user": "?"}}}, "augment.doc"),
    ({"augment": {"body": {"user": "?"}, "doc": ["d", {"text": "w"}]}}, "augment.embedding_model"),
    (
        {"augment": {"embedding_model": "e", "body": {"user": "?"}, "doc": ["d", {"binary": [1]}]}},
        "augment.doc[1].binary",
    ),
    ({"augment": {"embedding_model": "e", "body": {"g": G}, "doc": ["d", {"text": "w"}]}}, "augment.body"),
    (DEEP, ".".join(["cross[0]"] * 64)),
]


def refused(document: object) -> SchemaError:
    with pytest.raises(SchemaError) as caught:
        load_query(document)
    return caught.value


@pytest.mark.parametrize(("document", "field"), BAD_SPNL, ids=lambda value: repr(value)[:60])
def test_a_malformed_query_names_its_subtree(document: object, field: str | None) -> None:
    error = refused(document)
    assert (error.code, error.field or None) == ("capacity" if document is DEEP else "invalid_request", field)


@pytest.mark.parametrize(
    ("query", "field"),
    [
        ({"chat": {"messages": [{"fragment": "a"}]}}, "query.chat.messages[0]"),
        ({"chat": {"messages": []}}, "query.chat.messages"),
        ({"fragment": {"source": "a"}}, "query.fragment.text"),
        (
            {"retrieve": {"corpus": "c", "question": {"g": {"input": {"user": "x"}}}}},
            "query.retrieve.question",
        ),
        ({"retrieve": {"corpus": "c", "question": {"user": "x"}, "limit": 0}}, "query.retrieve.limit"),
        ({"retrieve": {"question": {"user": "x"}}}, "query.retrieve.corpus"),
        ({"retrieve": {"corpus": "c"}}, "query.retrieve.question"),
        ({"g": {"input": {"user": "x"}, "options": {"max_tokens": 3}}}, "query.g.options.max_tokens"),
        ({"g": {"input": {"user": "x"}, "options": 3}}, "query.g.options"),
        ({"g": {"input": {"user": "x"}, "closed": 1}}, "query.g.closed"),
        ({"augment": {}}, "query"),
        (None, "query"),
    ],
)
def test_a_malformed_document_names_its_subtree(query: object, field: str) -> None:
    error = refused({"format": FORMAT, "query": query})
    assert (error.code, error.field) == ("invalid_request", field)


def test_another_format_is_refused() -> None:
    assert refused({"format": "dagengine.query/v2", "query": {"user": "x"}}).field == "format"
    assert refused({"query": {"user": "x"}}).field == "format"
    assert refused({"format": FORMAT, "query": {"user": "x"}, "more": 1}).field == "more"


def test_a_close_name_is_suggested() -> None:
    assert "did you mean 'plus'" in str(refused({"pluss": []}))


@pytest.mark.parametrize(
    ("document", "field"),
    [
        ({"g": {"max_tokens": 8, "input": {"user": "x"}}}, "g.model"),
        ({"cross": [{"g": {"input": {"user": "x"}}}]}, "cross[0].g.model"),
        ({"map": {"metadata": {"max_tokens": 8}, "inputs": ["x"]}}, "map.metadata.model"),
        ({"g": {**G, "options": {"top_p": 0.5}}}, "g.options"),
        ({"g": {**G, "closed": True}}, "g.closed"),
        ({"map": {"metadata": {"model": "m", "options": {}}, "inputs": ["x"]}}, "map.metadata.options"),
        ({"fragment": "a"}, ""),
    ],
)
def test_what_only_our_form_can_say_tells_a_bare_query_of_it(document: object, field: str) -> None:
    error = refused(document)
    assert (error.code, error.field or "") == ("invalid_request", field)
    assert "read in spnl's form" in error.message and f"{{'format': {FORMAT!r}, 'query': …}}" in error.message


NAMES = (
    "g model input cross plus seq user monad zip first second repeat n map metadata inputs format query fragment chat "
    "messages augment doc"
).split()
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=5)
    | st.sampled_from(["m", "x"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(NAMES) | st.text(max_size=3),
            inner,
            max_size=3,
        )
    ),
    max_leaves=12,
)


@settings(max_examples=250, deadline=None)
@given(JSON)
def test_arbitrary_values_raise_nothing_but_schema_errors(document: object) -> None:
    for wrapped in (document, {"format": FORMAT, "query": document}):
        try:
            query = load_query(wrapped)
        except SchemaError:
            continue
        assert load_query(dump_query(query)) == query


def test_what_was_read_does_not_change_with_the_value_it_was_read_from() -> None:
    options = {"stop": ["a"]}
    query = load_query({"format": FORMAT, "query": {"g": {"input": {"user": "x"}, "options": options}}})
    built = g("x", options=options)
    options["stop"].append("b")
    assert query == built == g("x", options={"stop": ["a"]})


def test_a_query_is_printed_as_an_indented_tree() -> None:
    query = g(
        cross(
            system("Answer."),
            plus(*(fragment(f"piece {i}", "book") for i in range(4))),
            Chat(GenerateParams(), (user("hm"),)),
            retrieve("shelf", "what\nnow", limit=2),
            repeat(2, g("x", max_tokens=5, closed=True)),
            Map(GenerateParams("n", 0, 0.0, {"seed": 1}), ("one", "two")),
            Monad(Zip(Print("note"), Fragment("long " * 20))),
        ),
        model="m",
    )
    assert pretty(query, widest=6, longest=12) == (
        "g model=m temperature=0.6\n"
        "  cross\n"
        '    system "Answer."\n'
        "    plus\n"
        '      fragment "piece 0" from "book"\n'
        '      fragment "piece 1" from "book"\n'
        '      fragment "piece 2" from "book"\n'
        '      fragment "piece 3" from "book"\n'
        "    chat temperature=0.6\n"
        '      user "hm"\n'
        '    retrieve "shelf" limit=2\n'
        '      user "what\\nnow"\n'
        "    repeat 2\n"
        "      g max_tokens=5 temperature=0.6 closed\n"
        '        user "x"\n'
        "    map model=n temperature=0 seed=1\n"
        '      "one"\n'
        '      "two"\n'
        "    … 1 more\n"
    )
    assert '"long long l…"' in pretty(query, longest=12)
    assert '"' + "long " * 20 + '"' in pretty(query, longest=None)


@pytest.mark.parametrize(
    ("build", "field"),
    [
        (lambda: plus(), "plus"),
        (lambda: cross("a", 3), "cross[1]"),
        (lambda: user(3), "user"),
        (lambda: system("\ud800"), "system"),
        (lambda: g(None), "g.input"),
        (lambda: g("a", max_tokens=2**31), "g.max_tokens"),
        (lambda: g("a", max_tokens=True), "g.max_tokens"),
        (lambda: g("a", temperature=math.nan), "g.temperature"),
        (lambda: g("a", temperature="hot"), "g.temperature"),
        (lambda: g("a", model=""), "g.model"),
        (lambda: g("a", options={"n": 2}), "g.options.n"),
        (lambda: g("a", options=[1]), "g.options"),
        (lambda: g("a", closed="yes"), "g.closed"),
        (lambda: chat(), "chat.messages"),
        (lambda: chat(fragment("a")), "chat.messages[0]"),
        (lambda: fragment(1), "fragment"),
        (lambda: fragment("a", 1), "fragment.source"),
        (lambda: retrieve("c", g("a")), "retrieve.question"),
        (lambda: retrieve("c", "a", limit=0), "retrieve.limit"),
        (lambda: retrieve(1, "a"), "retrieve.corpus"),
        (lambda: repeat(256, g("a")), "repeat.n"),
        (lambda: repeat(True, g("a")), "repeat.n"),
        (lambda: repeat(2, plus("a")), "repeat.g"),
        (lambda: map_inputs([]), "map.inputs"),
        (lambda: map_inputs("ab"), "map.inputs"),
        (lambda: map_inputs(["a", ""]), "map.inputs[1]"),
        (lambda: map_inputs(["a"], max_tokens=-1), "map.metadata.max_tokens"),
        (lambda: zipped("a", 1), "zip.second"),
        (lambda: monad(1), "monad"),
        (lambda: seq(*[None]), "seq[0]"),
    ],
)
def test_a_builder_names_the_argument_that_is_wrong(build: Any, field: str) -> None:
    with pytest.raises(QueryError) as caught:
        build()
    assert (caught.value.code, caught.value.field) == ("invalid_request", field)


@pytest.mark.parametrize("wrap", [plus, monad, g, lambda q: repeat(2, g(q)), lambda q: zipped(q, "a")])
def test_building_and_reading_stop_at_the_same_depth(wrap: Any) -> None:
    query: Query = user("x")
    with pytest.raises(QueryError) as caught:
        while True:
            query = wrap(query)
    assert caught.value.code == "capacity"
    assert 62 <= query.depth <= 64
    assert load_query(dump_query(query)) == query
