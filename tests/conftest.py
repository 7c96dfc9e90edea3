"""What tests across the packages share: the demo model's folder."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import demo_model


@pytest.fixture(scope="session")
def demo_model_folder() -> Path:
    """SmolLM2-135M-Instruct as a Hugging Face folder. Skips where it cannot be had, except in CI."""
    try:
        return demo_model.ensure(demo_model.cache_folder())
    except demo_model.ModelUnavailable as error:
        if os.environ.get("CI"):
            raise
        pytest.skip(f"the demo model cannot be had here: {error}")
