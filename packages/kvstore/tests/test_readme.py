from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import dagengine_kvstore

README = Path(__file__).parents[1] / "README.md"


def test_the_readme_examples_run() -> None:
    """One after the other; those with torch only where it is installed."""
    text = README.read_text(encoding="utf-8")
    blocks = re.findall(r"```python( torch)?\n(.*?)```", text, flags=re.DOTALL)
    assert len(blocks) == text.count("```python") > 1
    names: dict[str, object] = {}
    for with_torch, block in blocks:
        if not with_torch or importlib.util.find_spec("torch"):
            exec(compile(block, str(README), "exec"), names)


def test_the_readme_names_every_error_code() -> None:
    package = Path(dagengine_kvstore.__file__).parent
    source = "\n".join(path.read_text(encoding="utf-8") for path in sorted(package.glob("*.py")))
    codes = set(re.findall(r'KVStoreError\(\s*"(\w+)"', source)) | set(
        re.findall(r'__init__\(\s*"(\w+)"', source)
    )
    assert {"capacity", "leak", "double_free"} <= codes
    text = README.read_text(encoding="utf-8")
    assert [code for code in sorted(codes) if f"`{code}`" not in text] == []
