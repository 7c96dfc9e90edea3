from __future__ import annotations

import pytest

from dagengine import LLM, DagError


def test_a_state_is_stored_again_where_it_is_asked_for(llm: LLM) -> None:
    rules, document = llm.prefill(["Be short.", "The sky is blue."])
    want = llm.generate("Why?", context=[rules, document], max_tokens=4, temperature=0.0, keep=False)
    with document.reposition(len(rules), copy=True) as moved:
        assert moved.id != document.id and moved.spans == document.spans
        have = llm.generate("Why?", context=[rules, moved], max_tokens=4, temperature=0.0, keep=False)
        assert have.token_ids == want.token_ids
    parts = document.fork(5), document.fork(3).reposition(100, copy=True)
    assert [len(part) for part in parts] == [5, 3]


def test_in_place_a_state_gives_its_pages_and_stays_readable(llm: LLM) -> None:
    (document,) = llm.prefill(["The sky is blue, and the grass is green."])
    live = llm.engine.ask(lambda core: core.store.stats().pages_live)
    moved = document.reposition(40)
    assert llm.engine.ask(lambda core: core.store.stats().pages_live) == live
    answers = [
        llm.generate("Why?", context=[state], max_tokens=4, temperature=0.0, keep=False)
        for state in (moved, document)
    ]
    assert answers[0].token_ids == answers[1].token_ids
    llm.engine.ask(lambda core: core.store.check())


def test_what_is_prefilled_again_is_computed_where_it_is_and_can_be_repositioned_itself(llm: LLM) -> None:
    text = "The grass is green, and the sky is blue."
    (first,) = llm.prefill([text])
    moved = first.reposition(40)
    first.release()
    (again,) = llm.prefill([text])
    other = again.reposition(90)
    with pytest.raises(DagError) as refused:
        moved.reposition(90)
    assert (refused.value.code, refused.value.field) == ("already_repositioned", "state")
    answers = [
        llm.generate("Why?", context=[state], max_tokens=4, temperature=0.0, keep=False)
        for state in (moved, other)
    ]
    assert answers[0].token_ids == answers[1].token_ids


def test_while_others_hold_a_state_only_a_copy_moves(llm: LLM) -> None:
    (document,) = llm.prefill(["The sky is blue."])
    reader = llm.generate("Why?", context=[document], max_tokens=2)
    with pytest.raises(DagError) as refused:
        document.reposition(40)
    assert (refused.value.code, refused.value.field) == ("state_shared", "state")
    assert len(document.reposition(40, copy=True)) == len(document)
    assert len(reader.state.reposition(100)) == len(reader.state)


@pytest.mark.parametrize("copy", [None, 1, "yes"])
def test_a_copy_is_asked_for_by_true_or_false(llm: LLM, copy: object) -> None:
    document = llm.prefill("The sky is blue.")
    with pytest.raises(DagError) as refused:
        document.reposition(40, copy=copy)  # type: ignore[arg-type]
    assert (refused.value.code, refused.value.field) == ("invalid_request", "copy")
