"""What is counted as a device's waiting for the host, on a device whose clock the test moves."""

from __future__ import annotations

import pytest

from dagengine.build import build_core
from dagengine.config import EngineConfig
from dagengine.errors import DagError
from dagengine.host_time import HostTime


class Machine:
    """A host with a clock, and a device that runs what is queued in order. Milliseconds."""

    def __init__(self):
        self.now = 0.0
        self.free = 0.0
        self.times = HostTime(lambda: Recorded(self), lambda: self.now * 1e-3)

    def step(self, host, device, decode=True):
        """The host queues all of it at the end of `host`; the device then takes `device`."""
        self.times.begin(decode=decode)
        self.now += host
        self.free = max(self.free, self.now) + device
        self.times.end()

    def collect(self, done):
        """The host waits until the device was done at a time of its own clock."""
        self.now = max(self.now, done)


class Recorded:
    def __init__(self, machine):
        self.machine = machine

    def record(self):
        self.at = max(self.machine.now, self.machine.free)

    def query(self):
        return self.machine.now >= self.at

    def elapsed_time(self, end):
        assert self.machine.now >= self.at and self.machine.now >= end.at, "it has not happened yet"
        return end.at - self.at


def test_a_host_that_is_ahead_is_not_waited_for():
    machine, ends = Machine(), [0.0]
    for _ in range(10):
        machine.step(host=1, device=5)
        machine.collect(ends[-1])
        ends.append(machine.free)
    machine.collect(machine.free)
    machine.times.finish()
    assert machine.times.steps == 9
    assert machine.times.waited_s == 0 and machine.times.share == 0
    assert machine.times.total_s == pytest.approx(9 * 5e-3)


def test_a_host_that_is_behind_is_waited_for():
    """Steps one after the other: the device waits for all that the host does."""
    machine = Machine()
    for _ in range(10):
        machine.step(host=2, device=6)
        machine.collect(machine.free)
        machine.now += 1
    machine.times.finish()
    assert machine.times.waited_s == pytest.approx(9 * 3e-3)
    assert machine.times.share == pytest.approx(3 / 9)


def test_a_host_that_fell_behind_once_counts_once():
    machine, ends = Machine(), [0.0]
    for number in range(10):
        machine.step(host=9 if number == 5 else 1, device=5)
        machine.collect(ends[-1])
        ends.append(machine.free)
    machine.collect(machine.free)
    machine.times.finish()
    idle = machine.free - 1 - 10 * 5
    assert idle > 0
    assert idle <= machine.times.waited_s * 1e3 <= 9


def test_only_decode_steps_behind_decode_steps_count():
    machine = Machine()
    for decode in (False, True, True, False, True, False, True, True, True):
        machine.step(host=1, device=4, decode=decode)
        machine.collect(machine.free)
    machine.times.finish()
    assert machine.times.steps == 3


def test_a_step_that_is_not_done_is_not_counted_at_the_end():
    machine = Machine()
    for _ in range(3):
        machine.step(host=1, device=5)
    machine.times.finish()
    assert machine.times.steps == 0
    machine.collect(machine.free)
    machine.times.finish()
    assert machine.times.steps == 2


def test_nothing_counted_has_no_share():
    assert HostTime(lambda: Recorded(Machine())).share is None


def test_a_cpu_is_not_watched(model_folder):
    config = EngineConfig(device="cpu", load_format="dummy", kv_pages=8, page_size=4)
    core = build_core(model_folder, config)
    with pytest.raises(DagError, match="cpu"):
        core.watch_host()


def test_an_engine_counts_its_decode_steps(model_folder, monkeypatch):
    """The device is the CPU, which is always done: all the host's time is counted."""
    from dagengine import SamplingParams
    from dagengine.request import Request

    config = EngineConfig(device="cpu", load_format="dummy", kv_pages=16, page_size=4)
    core = build_core(model_folder, config)
    machine = Machine()
    core._pipeline.host_time = machine.times
    core.submit(Request("a", (1, 2, 3), SamplingParams(max_tokens=7, ignore_eos=True)))
    while core.has_work:
        core.step()
        machine.now += 1
    machine.times.finish()
    assert machine.times.steps == 5, "the first token came of a prefill, and the second step is behind it"
    assert machine.times.share == 1
