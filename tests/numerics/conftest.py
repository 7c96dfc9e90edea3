"""The small random model that numerical tests share, and its tensors."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from devices import check_float32
from torch import Tensor

from .dense_walk import DenseLlama
from .driver import TINY, save_tiny_llama


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Small models are slower with more threads, and sums are the same on every machine."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def float32_is_float32() -> None:
    check_float32()


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny") / "llama"
    save_tiny_llama(folder, seed=20)
    return folder


@pytest.fixture(scope="session")
def tiny_dense(tiny_folder: Path) -> DenseLlama:
    tensors: dict[str, Tensor] = save_tiny_llama(tiny_folder, seed=20)
    return DenseLlama(TINY, tensors)
