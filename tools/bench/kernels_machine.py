"""What this runs on, for a report: processor, GPU, clocks as found, driver. Knows torch and nvidia-smi."""

from __future__ import annotations

import importlib
import subprocess

import torch

from bench.kernels_record import cpu_hardware

QUERY = "name,driver_version,clocks.sm,clocks.max.sm,clocks.mem,power.limit"


def hardware(device: str) -> tuple[str, dict[str, str]]:
    """A line on the hardware, and versions that distributions do not tell."""
    extra: dict[str, str] = {}
    if device == "cpu" or not torch.cuda.is_available():
        return cpu_hardware(), extra
    p = torch.cuda.get_device_properties(0)
    parts = [
        f"{p.name}, {p.multi_processor_count} SMs, {p.total_memory / 2**30:.0f} GiB, "
        f"L2 {p.L2_cache_size / 2**20:.0f} MiB"
    ]
    extra["cuda"] = str(torch.version.cuda)
    extra["cudnn"] = str(torch.backends.cudnn.version())
    try:
        extra["vfa3"] = str(getattr(importlib.import_module("vfa3"), "__version__", "unknown"))
    except Exception:  # what is not there, or does not load, was not run
        pass
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader,nounits", "-i", "0"],
            capture_output=True,
            text=True,
            check=True,
        )
        _, driver, sm, most, memory, power = (part.strip() for part in done.stdout.strip().split(","))
        extra["driver"] = driver
        parts.append(f"SM clock {sm} MHz after the run (at most {most}), memory {memory} MHz, {power} W")
    except (OSError, subprocess.CalledProcessError, ValueError):
        pass
    return ", ".join([*parts, cpu_hardware()]), extra
