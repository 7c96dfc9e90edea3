"""Pages that are reserved before they are needed, so that a plan lasts: for whom, how many, and when they go back."""

from __future__ import annotations

import pytest
from simulator import Settings, World

from dagengine import Keep, SamplingParams
from dagengine.request import Request
from dagengine.sequence import Sequence

SIZE = 4
pytestmark = pytest.mark.usefixtures("step_mode")


def world(pages: int) -> World:
    return World(0, Settings(SIZE, pages, 64, 8))


def ask(run: World, name: str, prompt: int, answer: int, keep: Keep | None = None) -> None:
    """Submit a request of so many own tokens, no two of them alike."""
    first = 100 * (1 + len(run.ends) + run.core.num_running)
    params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True)
    run.submit(Request(name, tuple(range(first, first + prompt)), params, keep=keep))


def running(run: World, name: str) -> Sequence:
    (found,) = (w for w in run.core._scheduler.running if isinstance(w, Sequence) and w.request.id == name)
    return found


def used(sequence: Sequence) -> int:
    """Pages that its tokens are in."""
    return -(-sequence.writer.num_tokens // SIZE)


def until(run: World, name: str, tokens: int) -> Sequence:
    """Step until a request has been given slots for so many own tokens."""
    while not run.core._scheduler.running or running(run, name).writer.num_tokens < tokens:
        run.step()
    return running(run, name)


def test_where_one_needs_a_page_all_get_the_rows_of_a_page() -> None:
    run = world(32)
    ask(run, "long", 3, 40)
    ask(run, "other", 6, 40)
    until(run, "long", 4)
    writers = [running(run, name).writer for name in ("long", "other")]
    grown, capacities = 0, [0, 0]
    for _ in range(24):
        if capacities != (capacities := [writer.capacity for writer in writers]):
            grown += 1
            assert all(writer.capacity - writer.num_tokens >= SIZE for writer in writers)
        run.step()
    assert 4 <= grown <= 6
    run.run()
    run.clean_up()


@pytest.mark.parametrize("keep", [None, Keep()])
@pytest.mark.parametrize("answer", range(1, 8))
def test_no_more_pages_are_reserved_than_the_answer_can_fill(keep: Keep | None, answer: int) -> None:
    run = world(32)
    ask(run, "short", 3, answer, keep)
    most = -(-(3 + answer - (keep is None)) // SIZE)
    while run.core.has_work:
        run.step()
        assert all(len(work.writer.pages) <= most for work in run.core._scheduler.running)
    run.clean_up()


def test_a_request_that_waits_gets_them_without_a_preemption() -> None:
    """Three pages that are in use and three that the request needs are all there are."""
    run = world(6)
    ask(run, "long", 3, 17)
    work = until(run, "long", 9)
    assert used(work) == 3 < len(work.writer.pages), "nothing was reserved ahead: the test would show nothing"
    ask(run, "short", 12, 1)
    while "short" not in run.ends:
        run.step()
        assert used(work) == 3, "it was not admitted at once"
    assert run.ends["short"].error is None
    assert run.core.num_preemptions == 0
    run.run()
    run.clean_up()


def test_running_work_gets_them_without_a_preemption() -> None:
    """The first has four pages and uses three when the second, which has the other two, needs one."""
    run = world(6)
    ask(run, "first", 8, 16)
    ask(run, "second", 7, 3)
    while "second" not in run.ends:
        run.step()
    assert run.ends["second"].error is None
    assert run.core.num_preemptions == 0
    run.run()
    run.clean_up()


def test_no_state_is_evicted_for_a_page_that_is_not_needed_yet() -> None:
    run = world(4)
    ask(run, "state", 7, 1, Keep())
    run.run()
    ask(run, "long", 3, 12)
    work = until(run, "long", 5)
    assert len(work.writer.pages) == 2
    while work.writer.num_tokens < 8:
        run.step()
        assert run.core.store.stats().evictions == 0
    until(run, "long", 9)
    assert run.core.store.stats().evictions == 1, "the page is needed now"
    run.run()
    run.clean_up()


def test_what_cannot_be_had_even_with_them_leaves_them() -> None:
    """A request that does not fit beside what runs takes nothing from it while it waits."""
    run = world(8)
    ask(run, "long", 3, 20)
    work = until(run, "long", 9)
    ask(run, "large", 28, 1)
    ahead = len(work.writer.pages) - used(work)
    assert ahead > 0
    pages = work.writer.pages
    for _ in range(3):
        run.step()
    assert work.writer.pages is pages, "pages were given back in vain"
    run.run()
    assert run.ends["large"].error is None
    run.clean_up()
