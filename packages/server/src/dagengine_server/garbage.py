"""Python's garbage collector in a process that serves."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

THRESHOLDS = (100_000, 50, 100)


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect seldom until the block ends.

    What lives now, the model and all libraries, lives as long: full collections would walk it, for 100 ms each. A step
    makes thousands of objects that are gone by its end, without cycles, which is no reason to look for any. What a
    process has frozen itself stays so.
    """
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*THRESHOLDS)
    try:
        yield
    finally:
        gc.set_threshold(*before)
        if not frozen:
            gc.unfreeze()
