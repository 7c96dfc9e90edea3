"""The device's read bandwidth as figures, and what a time would be at it."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from .probe import Probe
from .record import Figure

FLOOR = "its bytes at the measured bandwidth"


class Bandwidth:
    """What was measured, in bytes a second."""

    def __init__(self, samples: Sequence[float]) -> None:
        self._samples, self.bytes_per_s = list(samples), median(samples)

    @classmethod
    def measured(cls, probe: Probe) -> Bandwidth:
        """On the probe's device, now."""
        return cls(probe.read_bandwidth())

    @property
    def figure(self) -> Figure:
        return Figure.of("device", "", "read bandwidth", [s / 1e9 for s in self._samples], "GB/s")

    def ms(self, num_bytes: int) -> float:
        """Milliseconds to read so many bytes."""
        return num_bytes / self.bytes_per_s * 1e3

    def beside(self, figure: Figure, num_bytes: int) -> Figure:
        """A time in ms beside the time to read what it reads."""
        assert figure.unit == "ms"
        return figure.against(FLOOR, self.ms(num_bytes))
