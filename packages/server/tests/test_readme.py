"""The README's Python runs against a server as it stands."""

from __future__ import annotations

import re
from pathlib import Path

from conftest import Server

README = Path(__file__).parent.parent / "README.md"


def test_the_example_runs(server: Server) -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block.replace("http://127.0.0.1:8000", server.url), str(README), "exec"), {})
