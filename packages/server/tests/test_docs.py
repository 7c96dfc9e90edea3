"""The Python of the page on span queries runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[3] / "docs/queries.md"


@pytest.mark.skipif(not PAGE.exists(), reason="the page is not part of the package; the repository has it")
def test_the_example_runs(model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "cows.txt").write_text("Cows give milk.")
    (tmp_path / "bees.txt").write_text("Bees make honey.")
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) == 1
    small = blocks[0].replace("LLM(MODEL)", 'LLM(MODEL, device="cpu", kv_pages=200)')
    exec(compile(small, str(PAGE), "exec"), {"MODEL": model_folder, "SHELF": tmp_path})
