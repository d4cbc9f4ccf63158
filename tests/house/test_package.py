"""``import jaxtensile``: the names it promises, found on first use."""

import ast
import inspect
import os
import textwrap

import pytest

import jaxtensile


def test_names_are_listed_before_they_are_used():
    assert set(jaxtensile.__all__) <= set(dir(jaxtensile))
    assert {"jit", "targets", "Workload", "Report", "BudgetError"} <= set(jaxtensile.__all__)


def test_every_lazy_name_has_a_home():
    eager = {n for n in jaxtensile.__all__ if n.endswith(("Error", "Warning"))}
    assert set(jaxtensile._HOMES) == set(jaxtensile.__all__) - eager


def test_a_lazy_name_is_the_object_of_its_module():
    from jaxtensile.ir.plan import MemoryUse
    from jaxtensile.program.workload import Workload

    assert jaxtensile.Workload is Workload
    assert jaxtensile.MemoryUse is MemoryUse


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'jaxtensile' has no attribute 'gradient'"):
        jaxtensile.gradient  # noqa: B018


def test_a_submodule_does_not_hide_a_function():
    """``jaxtensile.targets`` is a function: no module of that name may be imported over it."""
    import jaxtensile.devices.profiles
    import jaxtensile.xla.target

    assert jaxtensile.targets() == jaxtensile.devices.profiles.targets()


@pytest.mark.parametrize("name", [n for n in jaxtensile.__all__ if n.islower()])
def test_every_argument_does_something(name):
    """What is taken is read; to be handed on to the function itself, as its decorator form does, is not enough."""
    fun = getattr(jaxtensile, name)
    (node,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(fun)))).body
    recursive = {
        id(keyword.value)
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and any(isinstance(a, ast.Name) and a.id == name for a in (call.func, *call.args))
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Name) and keyword.arg == keyword.value.id
    }
    read = {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and id(n) not in recursive}
    assert inspect.signature(fun).parameters.keys() <= read


@pytest.mark.xdist_group("heeded")
def test_what_is_to_be_made_once_is_made_by_one_worker(request):
    """pytest 9.2 loses the groups of pytest-xdist 3.8 without a word: the suite then takes minutes more."""
    if "PYTEST_XDIST_WORKER" not in os.environ or not request.config.getoption("loadgroup", False):
        pytest.skip("tests are not distributed by groups here")
    assert request.node.nodeid.endswith("@heeded"), "take the pytest that pyproject.toml names"
