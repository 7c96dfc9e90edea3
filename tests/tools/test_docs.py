"""The pages under docs/ point at things that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [*sorted(ROOT.glob("docs/**/*.md")), *sorted(ROOT.glob("*.md")), ROOT / "tools/demo_data/README.md"]
TEST_NAME = re.compile(r"`([\w./-]+\.py)::([\w:]+)`")
LINK = re.compile(r"\]\((?!https?://|#)([^)#]+)")
PATH = re.compile(r"`((?:docs|packages|tests|tools|\.ci)/[\w./-]*\w)`")


def test_every_promise_names_a_test_that_exists() -> None:
    named = TEST_NAME.findall((ROOT / "docs/guarantees.md").read_text(encoding="utf-8"))
    assert named
    for file, name in named:
        source = (ROOT / file).read_text(encoding="utf-8")
        for part in name.split("::"):
            assert re.search(rf"^\s*(?:async )?(?:def|class) {part}\b", source, re.MULTILINE), (
                f"{file}::{name}"
            )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_path_and_link_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert [path for path in PATH.findall(text) if not (ROOT / path).exists()] == []
    assert [link for link in LINK.findall(text) if not (page.parent / link).exists()] == []
