"""The devices that a test's body runs on: the CPU always, and a GPU where there is one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

GPU = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"))


def on_gpu(*values: Any, id: str | None = None) -> Any:
    """Parameters of a test that needs a GPU."""
    return pytest.param(*values, marks=GPU, id=id)


DEVICES = ("cpu", on_gpu("cuda"))


def check_float32() -> None:
    """Products of float32 keep float32's 24 bits: in TF32 they would keep 11, and no bound here would mean anything."""
    assert torch.get_float32_matmul_precision() == "highest", "products of float32 may be rounded to TF32"
    assert not torch.backends.cuda.matmul.allow_tf32
