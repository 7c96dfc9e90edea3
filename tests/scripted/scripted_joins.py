"""Short ways to requests that join a step, for the tests of them."""

from __future__ import annotations

from scripted_requests import document
from simulator import Settings, World

from dagengine import ContextRef, SamplingParams
from dagengine.request import Request
from dagengine.sequence import Sequence
from dagengine.work import Work

ONE = SamplingParams(max_tokens=1, temperature=0.0)


def world(pages: int = 64, *, page_size: int = 4, batch: int = 64, seqs: int = 8) -> World:
    return World(0, Settings(page_size, pages, batch, seqs))


def reads(*names: str) -> tuple[ContextRef, ...]:
    return tuple(ContextRef(request=name) for name in names)


def judged(*, own: int = 3, **options: object) -> list[Request]:
    """Two fragments, and who reads both."""
    judge = Request("judge", tuple(range(7, 7 + own)), ONE, reads("a", "b"), **options)  # type: ignore[arg-type]
    return [document("a", 6), document("b", 5, 300), judge]


def name_of(work: Work) -> str:
    return work.request.id if isinstance(work, Sequence) else "restored"


def finish(run: World) -> None:
    run.run()
    run.clean_up()
    run.forget_everything()


Steps = list[dict[str, tuple[int, bool]]]
