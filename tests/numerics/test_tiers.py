"""Offloaded, loaded, prefetched, computed again: the bits of tokens and logits are those of never having moved.

`batch_invariant` keeps everything else that a schedule changes, such as who runs beside whom, from changing bits.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from dagengine.errors import DagError
from dagengine.request import ContextRef, FinishedEvent, Request

from .driver import Driver, request
from .test_batch_invariance import PAGE_SIZE, PLACES, engine, folder, ids

__all__ = ["folder"]

DOCUMENTS = [ids(100 + number, 17 + 13 * number) for number in range(6)]
QUESTIONS = [
    (chosen, ids(200 + number, 3 + number))
    for number, chosen in enumerate([(0,), (5,), (1, 2), (4, 3), (0, 5), (2, 0, 4), (3, 1), (5, 4)])
]
SAMPLED = 6
SCHEDULES = {"cpu": 25, "cuda": 1000}
POOL = 22  # the documents take 30 pages
HOST_PAGES = 60


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    logits: dict[int, Tensor]

    def same_bits(self, other: Answer) -> bool:
        return self.tokens == other.tokens and all(
            torch.equal(found, other.logits[offset]) for offset, found in self.logits.items()
        )


class Moved:
    """An engine that holds the documents as states."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.core = driver, driver.core
        self.asked = 0
        self.states: list[str] = []
        for number, tokens in enumerate(DOCUMENTS):
            state = driver.choice(request(f"document-{number}", tokens)).dag.state
            assert state is not None
            self.states.append(state)

    def question(self, number: int) -> Request:
        chosen, prompt = QUESTIONS[number]
        self.asked += 1
        context = [ContextRef(state=self.states[document]) for document in chosen]
        return request(f"{number}.{self.asked}", prompt, SAMPLED, context=context, keep=False)

    def take(self, ended: list[FinishedEvent]) -> list[tuple[int, Answer]]:
        found = []
        for event in ended:
            assert event.error is None, event.error
            number = int(event.request_id.partition(".")[0])
            logits = self.driver.logits.pop(event.request_id)
            found.append((number, Answer(event.choices[0].token_ids, logits)))
        return found

    def delay(self, rng: random.Random) -> None:
        """Keep a GPU from what is queued next, for up to about 10 ms: as if others used it too."""
        if self.core._runner.device.type == "cuda" and rng.random() < 0.3:
            torch.cuda._sleep(rng.randrange(20_000_000))

    def move(self, rng: random.Random) -> None:
        for state in rng.sample(self.states, rng.randint(0, 3)):
            try:
                self.core.offload_state(state)
            except DagError as error:
                assert error.code == "capacity"
        if rng.random() < 0.3:
            self.core.prefetch_state(rng.choice(self.states))
        if rng.random() < 0.05:
            self.driver.evict_all()

    def schedule(self, rng: random.Random) -> list[tuple[int, Answer]]:
        """Some questions at once, others later, and states that are moved before and between the steps."""
        open_ids: set[str] = set()
        ended: list[FinishedEvent] = []
        todo = rng.randint(1, 4)
        while todo or open_ids:
            if todo and rng.random() < 0.5:
                asked = self.question(rng.randrange(len(QUESTIONS)))
                self.core.submit(asked)
                open_ids.add(asked.id)
                todo -= 1
            if rng.random() < 0.4:
                self.delay(rng)
                self.move(rng)
            for event in self.core.step():
                if isinstance(event, FinishedEvent):
                    ended.append(event)
                    open_ids.discard(event.request_id)
        return self.take(ended)


@pytest.mark.parametrize("device", PLACES)
def test_random_schedules_have_the_bits_of_never_having_moved(folder: Path, device: str) -> None:
    still = Moved(engine(folder, device, batch_invariant=True))
    expected = {
        number: still.take(still.driver.run(still.question(number)))[0][1] for number in range(len(QUESTIONS))
    }
    page_bytes = 2 * 2 * 2 * 64 * PAGE_SIZE * 2
    moved = Moved(
        engine(
            folder, device, batch_invariant=True, kv_pages=POOL, cpu_kv_gib=HOST_PAGES * page_bytes / 2**30
        )
    )
    moved.core.store._pressure._costs = None
    rng = random.Random(7)
    for schedule in range(SCHEDULES[device]):
        for number, answer in moved.schedule(rng):
            assert answer.same_bits(expected[number]), f"question {number} in schedule {schedule}"
        moved.core.store.check()
    stats = moved.core.store.stats()
    assert stats.host_total == HOST_PAGES and stats.stores and stats.loads > SCHEDULES[device] / 4
    moved.core.close()
