"""The README's examples run."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", README.read_text(), re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_example_runs(block):
    exec(compile(block, str(README), "exec"), {"__name__": "readme"})


def test_there_are_examples():
    assert len(BLOCKS) == 4
