from __future__ import annotations

from pathlib import Path

import pytest
from kvstore_helpers import make_store, refused

from dagengine_kvstore import LeastRecentlyUsed, NoTransfer, plugins
from dagengine_kvstore.registry import EVICTION_POLICIES, TRANSFERS, load


@pytest.fixture
def third_party(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A distribution with one good policy and one that cannot be imported."""
    info = tmp_path / "somebody_else-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: somebody-else\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        f"[{EVICTION_POLICIES}]\nfifo = somebody_else_policies:Fifo\nbroken = somebody_else_missing:Gone\n"
        "constant = somebody_else_policies:CONSTANT\n"
    )
    (tmp_path / "somebody_else_policies.py").write_text(
        "class Fifo:\n    name = 'fifo'\n    def order(self, candidates):\n"
        "        return [candidate.uid for candidate in candidates]\nCONSTANT = 3\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))


def test_built_ins_are_registered_like_any_other() -> None:
    assert load(EVICTION_POLICIES, "lru") is LeastRecentlyUsed
    assert load(TRANSFERS, "none") is NoTransfer


@pytest.mark.usefixtures("third_party")
def test_a_broken_plugin_is_listed_with_its_error_and_breaks_nothing_else() -> None:
    listed = {plugin.name: plugin for plugin in plugins(EVICTION_POLICIES)}
    assert listed["lru"].error is None and listed["fifo"].error is None
    assert listed["broken"].error == "ModuleNotFoundError: No module named 'somebody_else_missing'"
    assert listed["broken"].distribution == "somebody-else"
    make_store(eviction="fifo")
    with refused("plugin_broken", EVICTION_POLICIES):
        make_store(eviction="broken")
    with refused("plugin_broken", "eviction"):
        make_store(eviction="constant")


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(Exception, match="did you mean 'lru'"):
        make_store(eviction="lr")
    with refused("plugin_not_found"):
        make_store(eviction="something else")
