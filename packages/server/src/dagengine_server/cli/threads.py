"""How many CPU threads to use, and why. Reads what the system allows this process; changes nothing."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

CPUS = Path("/sys/devices/system/cpu")
CGROUP = Path("/sys/fs/cgroup")
ASKED = "as asked"


@dataclass(frozen=True)
class ThreadChoice:
    """A number of threads and the reason for it, in words."""

    count: int
    reason: str

    @property
    def asked(self) -> bool:
        """Whether the user named the number."""
        return self.reason == ASKED

    def __str__(self) -> str:
        return f"{self.count} CPU thread{'s' if self.count != 1 else ''}: {self.reason}"


def choose_threads(asked: int | None) -> ThreadChoice:
    """What was asked for; else OMP_NUM_THREADS; else one thread per physical core, within the CPU quota.

    Two threads on one core share its vector units, so hyper-threads are not counted.
    """
    if asked is not None:
        return ThreadChoice(asked, ASKED)
    from_environment = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if from_environment.isdigit() and int(from_environment) > 0:
        return ThreadChoice(int(from_environment), "OMP_NUM_THREADS")
    cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = _physical(cpus)
    quota = _quota()
    if quota is not None and quota < cores:
        reason = f"the CPU quota of this process is {quota:g} of {cores} cores"
        return ThreadChoice(max(1, int(quota)), reason)
    return ThreadChoice(cores, f"{cores} core{'s' if cores != 1 else ''} for this process")


def _physical(cpus: set[int]) -> int:
    """Cores among the CPUs: those that share a core name the same siblings."""
    cores = set()
    for cpu in cpus:
        try:
            cores.add((CPUS / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip())
        except OSError:
            cores.add(str(cpu))
    return max(1, len(cores))


def _quota() -> float | None:
    """CPUs' worth of time per second that the control group allows; None without a limit."""
    try:
        limit, period = (CGROUP / "cpu.max").read_text().split()
        return None if limit == "max" else int(limit) / int(period)
    except (OSError, ValueError):
        pass
    try:
        limit = (CGROUP / "cpu/cpu.cfs_quota_us").read_text()
        period = (CGROUP / "cpu/cpu.cfs_period_us").read_text()
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError):
        return None
