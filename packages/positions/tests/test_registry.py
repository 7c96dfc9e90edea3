"""Extensions are found by name, loaded when asked for, and harm nobody when broken."""

from importlib.metadata import EntryPoint

import pytest

from dagengine_positions import PositionError, Registry, model_adapters, position_policies

GROUP = "dagengine.position_policies"


class Fine:
    name = "fine"

    def lay_out(self, context, stored_start, options):
        raise NotImplementedError


class Misnamed(Fine):
    name = "other"


class Incomplete:
    name = "incomplete"


class Exploding:
    def __init__(self):
        raise RuntimeError("no licence")


def registry(**values):
    points = tuple(EntryPoint(name, value, GROUP) for name, value in values.items())
    return Registry(GROUP, methods=("lay_out",), code="policy_unsupported", find=lambda group: points)


@pytest.fixture
def here(monkeypatch):
    """This module under an importable name."""
    import sys
    import types

    module = types.ModuleType("registry_extensions")
    for extension in (Fine, Misnamed, Incomplete, Exploding):
        setattr(module, extension.__name__, extension)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.__name__


def test_built_ins_are_registered_by_the_package_itself():
    assert {"explicit", "linear", "native"} <= set(position_policies.names())
    assert "default" in model_adapters.names()
    for known in (position_policies, model_adapters):
        ours = [plugin for plugin in known.plugins() if plugin.distribution == "dagengine-positions"]
        assert ours
        assert all(plugin.error is None for plugin in ours)


def test_an_extension_is_loaded_once_when_asked_for(here):
    found = registry(fine=f"{here}:Fine", gone="no_such_module:Policy")
    assert found.names() == ("fine", "gone")
    assert found.get("fine") is found.get("fine")


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("gone", "no_such_module:Policy", "ModuleNotFoundError"),
        ("absent", "{here}:Absent", "AttributeError"),
        ("exploding", "{here}:Exploding", "RuntimeError: no licence"),
        ("misnamed", "{here}:Misnamed", "its name is 'other'"),
        ("incomplete", "{here}:Incomplete", "no method 'lay_out'"),
    ],
)
def test_a_broken_extension_is_listed_with_its_error_and_breaks_nothing_else(here, name, value, error):
    found = registry(**{"fine": f"{here}:Fine", name: value.format(here=here)})
    listed = {plugin.name: plugin for plugin in found.plugins()}
    assert listed["fine"].error is None
    assert error in listed[name].error
    with pytest.raises(PositionError, match=error) as caught:
        found.get(name)
    assert caught.value.code == "plugin_broken"
    assert found.get("fine").name == "fine"


def test_two_extensions_of_one_name_are_both_listed_as_broken(here):
    points = tuple(EntryPoint("fine", f"{here}:{name}", GROUP) for name in ("Fine", "Misnamed"))
    found = Registry(GROUP, methods=(), code="policy_unsupported", find=lambda group: points)
    assert [plugin.value for plugin in found.plugins()] == [f"{here}:Fine", f"{here}:Misnamed"]
    assert all("more than once" in plugin.error for plugin in found.plugins())


@pytest.mark.parametrize("name", ["fien", None, 3, ["fine"]])
def test_an_unknown_name_is_refused(here, name):
    with pytest.raises(PositionError, match="is not one of fine") as caught:
        registry(fine=f"{here}:Fine").get(name)
    assert caught.value.code == "policy_unsupported"


def test_nothing_registered_is_said():
    with pytest.raises(PositionError, match="not one of none"):
        registry().get("linear")
