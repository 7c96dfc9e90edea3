"""Decode throughput while states are offloaded and loaded in the background, beside the same without.

    PYTHONPATH=tools python -m bench.offload FOLDER --cpu-kv-gib 16

One engine decodes some streams all the while, in windows of four kinds in turns: nothing moves; states are stored over
and over; they are loaded over and over; both. A window starts when no copy is under way. Printed as JSON: medians over
the windows of a kind, what was copied in them, and at how many of their steps copies were under way.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dagengine import EngineConfig, Keep, SamplingParams
from dagengine.build import build_core
from dagengine.core import EngineCore
from dagengine.errors import DagError
from dagengine.request import FinishedEvent, Request, TokenEvent
from dagengine_kvstore import NodeRecord, Tier
from dagengine_kvstore.residency import clean_copy

MOST_SAMPLED = 1024
MOST_MOVING = 4
STILL, STORE, LOAD, BOTH = "still", "store", "load", "both"
MOVING = (STORE, LOAD, BOTH)


@dataclass
class Window:
    """Tokens and bytes of some seconds; `busy` counts steps that began with copies under way."""

    kind: str
    tokens: int = 0
    steps: int = 0
    busy: int = 0
    seconds: float = 0.0
    bytes: dict[str, int] = field(default_factory=dict)


class Background:
    """A core that decodes, and states that can be moved meanwhile."""

    def __init__(self, core: EngineCore, states: int, state_tokens: int, streams: int) -> None:
        self.core, self._streams, self._asked = core, streams, 0
        vocab = core.geometry.vocab_size
        self.states: list[str] = []
        for number in range(states):
            tokens = tuple((number + 7 * index) % vocab for index in range(state_tokens))
            core.submit(Request(f"state {number}", tokens, None, keep=Keep()))
            while core.has_work:
                for event in core.step():
                    if isinstance(event, FinishedEvent):
                        if event.error is not None:
                            raise event.error
                        state = event.choices[0].dag.state
                        assert state is not None
                        self.states.append(state)

    def window(self, kind: str, seconds: float) -> Window:
        """Decode for so long while states move as `kind` says, some of them all the time."""
        store = self.core.store
        while store.num_in_flight:
            self._step()
        found, before = Window(kind), store.stats()
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            if kind != STILL:
                self._move(kind)
            found.busy += store.num_in_flight > 0
            found.tokens += self._step()
            found.steps += 1
        after = store.stats()
        found.seconds = elapsed
        size = self.core.host_tier.page_bytes if self.core.host_tier else 0
        found.bytes = {
            STORE: (after.pages_stored - before.pages_stored) * size,
            LOAD: (after.pages_loaded - before.pages_loaded) * size,
        }
        return found

    def _step(self) -> int:
        """Keep the streams running, step, and count what was sampled."""
        while self.core.num_running + self.core.num_waiting < self._streams:
            self._asked += 1
            params = SamplingParams(max_tokens=MOST_SAMPLED, temperature=0.0, ignore_eos=True)
            self.core.submit(Request(f"stream {self._asked}", (self._asked % 50 + 1,) * 8, params))
        return sum(len(event.token_ids) for event in self.core.step() if isinstance(event, TokenEvent))

    def _move(self, kind: str) -> None:
        """Begin to move the states that were moved longest ago, until enough are on their way."""
        for _ in range(len(self.states)):
            if self.core.store.num_in_flight >= MOST_MOVING:
                return
            state = self.states.pop(0)
            self.states.append(state)
            node, _ = self.core.store.resolve(state)
            self._turn(kind, state, node)

    def _turn(self, kind: str, state: str, node: NodeRecord) -> None:
        """What is the next for one state; nothing while it is on its way."""
        store = self.core.store
        tier = store.tier(node)
        if (
            tier is Tier.DEVICE
            and kind == LOAD
            and all(clean_copy(node, index) is not None for index in range(len(node.pages)))
        ):
            store.evict(node)
            tier = Tier.HOST
        if tier is Tier.HOST:
            if kind != STORE:
                self._forget_on_device(node)
            self.core.prefetch_state(state)
            tier = store.tier(node)
        if tier is Tier.DEVICE:
            store.evict_host(node)
            self.core.offload_state(state)

    def _forget_on_device(self, node: NodeRecord) -> None:
        """Nothing of an offloaded state is found on the device any more, as if others had used its pages: loading it
        copies.
        """
        books = self.core.store._books
        pages = [books.copies.device_page(copy) for copy in node.copies if copy is not None]
        there = [page for page in pages if page is not None and not books.pool.refs[page]]
        books.pool.claim(there)
        for page in there:
            books.pool.drop(page, touched=False)


def measure(core: EngineCore, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second of each kind of window, their ratio to those where nothing moves, and what was moved."""
    background = Background(core, options.states, options.state_tokens, options.streams)
    for kind in MOVING:
        background.window(kind, options.seconds)
    windows = [
        background.window(kind, options.seconds) for _ in range(options.windows) for kind in (STILL, *MOVING)
    ]
    core.abort_all(DagError("cancelled", "measured"))
    rates = {
        kind: statistics.median(w.tokens / w.seconds for w in windows if w.kind == kind)
        for kind in (STILL, *MOVING)
    }

    def moved(kind: str) -> dict[str, float]:
        of_kind = [w for w in windows if w.kind == kind]
        seconds, steps = sum(w.seconds for w in of_kind), sum(w.steps for w in of_kind)
        found = {
            f"{way}_gb_per_s": sum(w.bytes[way] for w in of_kind) / seconds / 1e9 for way in (STORE, LOAD)
        }
        return found | {"steps_with_copies": sum(w.busy for w in of_kind) / steps}

    return {
        "tokens_per_s": rates,
        "ratio": {kind: rates[kind] / rates[STILL] for kind in MOVING},
        "moved": {kind: moved(kind) for kind in MOVING},
        "steps": sum(w.steps for w in windows),
        "streams": options.streams,
        "state_bytes": -(-options.state_tokens // core.store.page_size)
        * (core.host_tier.page_bytes if core.host_tier else 0),
    }


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="python -m bench.offload", description=__doc__.split("\n\n")[0])
    p.add_argument("folder", type=Path, help="a model's folder; its config.json is enough")
    p.add_argument("--load-format", default="dummy", help="auto reads the weights (dummy)")
    p.add_argument("--cpu-kv-gib", type=float, default=8.0, help="host memory for pages (8)")
    p.add_argument("--streams", type=int, default=32, help="that decode at once (32)")
    p.add_argument("--states", type=int, default=8, help="that go back and forth (8)")
    p.add_argument("--state-tokens", type=int, default=4096, help="of each (4096)")
    p.add_argument("--seconds", type=float, default=1.0, help="of one window (1)")
    p.add_argument("--windows", type=int, default=5, help="of each kind (5)")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    size = EngineConfig.page_size
    pages = options.states * -(-options.state_tokens // size) + options.streams * (2 + MOST_SAMPLED // size)
    config = EngineConfig(
        load_format=options.load_format,
        seed=0,
        kv_pages=pages,
        cpu_kv_gib=options.cpu_kv_gib,
        overlap=True,
    )
    core = build_core(options.folder, config, text=False)
    try:
        print(json.dumps(measure(core, options), indent=1))
    finally:
        core.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
