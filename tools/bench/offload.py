"""Decode throughput while states are offloaded and loaded in the background, beside the same without.

    PYTHONPATH=tools python -m bench.offload FOLDER --cpu-kv-gib 16

One engine decodes some streams all the while. Windows in which states go back and forth between the tiers alternate
with windows in which nothing moves; each starts when no copy is under way. Printed as JSON: medians over the windows.
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
from dagengine_kvstore import Tier

MOST_SAMPLED = 1024


@dataclass
class Window:
    """Tokens and bytes of some seconds."""

    moving: bool
    tokens: int = 0
    steps: int = 0
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

    def window(self, seconds: float, *, moving: bool) -> Window:
        """Decode for so long; with `moving`, some states are on their way all the time."""
        while self.core.store.num_in_flight:
            self._step()
        found, before = Window(moving), self.core.store.stats()
        begin = time.perf_counter()
        while (elapsed := time.perf_counter() - begin) < seconds:
            if moving and self.core.store.num_in_flight < 2:
                self._move()
            found.tokens += self._step()
            found.steps += 1
        after = self.core.store.stats()
        found.seconds = elapsed
        size = self.core.host_tier.page_bytes if self.core.host_tier else 0
        found.bytes = {
            "store": (after.pages_stored - before.pages_stored) * size,
            "load": (after.pages_loaded - before.pages_loaded) * size,
        }
        return found

    def _step(self) -> int:
        """Keep the streams running, step, and count what was sampled."""
        while self.core.num_running + self.core.num_waiting < self._streams:
            self._asked += 1
            params = SamplingParams(max_tokens=MOST_SAMPLED, temperature=0.0, ignore_eos=True)
            self.core.submit(Request(f"stream {self._asked}", (self._asked % 50 + 1,) * 8, params))
        return sum(len(event.token_ids) for event in self.core.step() if isinstance(event, TokenEvent))

    def _move(self) -> None:
        """Begin to move the state that was moved longest ago; what the host had of one that came back is dropped."""
        state = self.states.pop(0)
        self.states.append(state)
        node, _ = self.core.store.resolve(state)
        tier = self.core.store.tier(node)
        if tier is Tier.HOST:
            self._overwrite_cached()
            self.core.prefetch_state(state)
        elif tier is Tier.DEVICE:
            self.core.store.evict_host(node)
            self.core.offload_state(state)

    def _overwrite_cached(self) -> None:
        """Nothing of an offloaded state is found on the device any more: loading it copies."""
        store = self.core.store
        writer = store.begin([], [], 0, signature={})
        writer.reserve(store.num_unused * store.page_size, evict=False)
        writer.abort()


def measure(core: EngineCore, options: argparse.Namespace) -> dict[str, Any]:
    """Tokens per second with and without, their ratio, and what was moved."""
    background = Background(core, options.states, options.state_tokens, options.streams)
    background.window(options.seconds, moving=True)
    windows = [
        background.window(options.seconds, moving=moving)
        for _ in range(options.windows)
        for moving in (False, True)
    ]
    core.abort_all(DagError("cancelled", "measured"))

    def rate(moving: bool) -> float:
        return statistics.median(w.tokens / w.seconds for w in windows if w.moving is moving)

    moved = [w for w in windows if w.moving]
    return {
        "tokens_per_s": {"still": rate(False), "moving": rate(True)},
        "ratio": rate(True) / rate(False),
        "gb_per_s": {
            way: sum(w.bytes[way] for w in moved) / sum(w.seconds for w in moved) / 1e9
            for way in ("store", "load")
        },
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
    p.add_argument("--seconds", type=float, default=2.0, help="of one window (2)")
    p.add_argument("--windows", type=int, default=6, help="of either kind (6)")
    return p


def main(arguments: Sequence[str] | None = None) -> int:
    options = parser().parse_args(arguments)
    size = EngineConfig.page_size
    pages = options.states * -(-options.state_tokens // size) + options.streams * (2 + MOST_SAMPLED // size)
    config = EngineConfig(
        load_format=options.load_format, seed=0, kv_pages=pages, cpu_kv_gib=options.cpu_kv_gib
    )
    core = build_core(options.folder, config, text=False)
    try:
        print(json.dumps(measure(core, options), indent=1))
    finally:
        core.close()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
