"""Who gets how much of a step's tokens. See `scheduler`."""

from __future__ import annotations

import pytest
from simulator import Settings, World

from dagengine import SamplingParams
from dagengine.request import Request

BUDGET = 32
LONG = 9 * BUDGET
ONE = SamplingParams(max_tokens=1, temperature=0.0)

pytestmark = pytest.mark.usefixtures("step_mode")


def world(seqs: int = 8) -> World:
    return World(0, Settings(page_size=16, pages=80, max_num_batched_tokens=BUDGET, max_num_seqs=seqs))


def asks(name: str, count: int, sampling: SamplingParams = ONE) -> Request:
    """Inputs that share no first token, so that none is found to be computed already."""
    first = 1000 * (1 + sum(map(ord, name)) % 3)
    return Request(name, tuple(range(first, first + count)), sampling)


def steps_until(run: World, name: str) -> int:
    steps = 0
    while name not in run.ends:
        run.step()
        steps += 1
    return steps


@pytest.mark.parametrize("num_long", [0, 1, 2])
def test_a_short_input_does_not_wait_for_long_ones(num_long: int) -> None:
    """Behind m long inputs it gets at least 4^-m of the tokens in every step; a step may be in flight at either end."""
    run = world()
    for index in range(num_long):
        run.submit(asks(f"long {index}", LONG))
    run.step()
    run.submit(asks("short", 6))
    share = BUDGET // 4**num_long
    assert steps_until(run, "short") <= -(-6 // share) + 2
    assert len(run.ends) == 1
    run.run()
    run.clean_up()


def test_short_inputs_that_keep_coming_do_not_stop_a_long_one() -> None:
    run = world(seqs=4)
    run.submit(asks("long", LONG))
    steps = 0
    while "long" not in run.ends:
        run.submit(asks(f"short {steps}", 30))
        run.step()
        steps += 1
    least = BUDGET - BUDGET // 4
    assert steps <= -(-LONG // (least - 3)) + 2, (
        "all but a quarter, and a token for each of the others that decode"
    )
    run.run()
    run.clean_up()


def test_what_nobody_else_can_use_goes_to_the_long_input() -> None:
    run = world(seqs=1)
    run.submit(asks("long", LONG))
    run.submit(asks("short", 6))
    assert steps_until(run, "long") <= LONG // BUDGET + 1
    assert run.core.stats.batched_tokens >= LONG
    run.run()
    run.clean_up()


def test_who_decodes_gets_a_token_in_every_step() -> None:
    run = world()
    run.submit(asks("decodes", 3, SamplingParams(max_tokens=8, temperature=0.0)))
    run.step()
    for index in range(3):
        run.submit(asks(f"long {index}", LONG))
    assert steps_until(run, "decodes") <= 8 + 1
    run.run()
    run.clean_up()
