"""What ranks that are processes are given to run: by name where they can import it, by value else, or an error."""

from __future__ import annotations

import pickle
import sys
import types

import pytest

from shardwright.comm.backends.task_pickle import dumps, is_importable
from shardwright.errors import PlanError


def of_notebook():
    """A function as a cell of a notebook defines it: in ``__main__``, where no other process finds it."""
    source = "def work(world, factor=3):\n    return world * factor\n"
    main = types.ModuleType("__main__")
    exec(source, vars(main))
    return main.work


def named(world):
    return world + 1


def counter(start):
    """Functions inside of a function, as packages put on models: they share a cell, and one holds itself."""
    count = start

    def add(more=2, *, times=1):
        nonlocal count
        count += more * times
        return add if more < 0 else count

    add.note = "kept"
    return add, lambda: count


def test_functions_inside_of_a_modules_functions_are_pickled_without_cloudpickle(monkeypatch):
    monkeypatch.setattr("shardwright.comm.backends.task_pickle.find_spec", lambda name: None)
    for main in (True, False):
        add, read = pickle.loads(dumps(counter(1), main=main))
        assert (add(), add(times=2), read(), add.note) == (3, 7, 7, "kept")
        assert (add(-7), read()) == (add, 0)
        assert add.__globals__ is globals()


def test_a_function_of_a_module_is_pickled_by_name_also_in_a_notebook():
    for main in (True, False):
        assert pickle.loads(dumps((named, [1]), main=main)) == (named, [1])


@pytest.mark.parametrize("main", [False, True])
def test_what_ranks_cannot_import_is_pickled_by_value(main):
    pytest.importorskip("cloudpickle")
    offset = 5
    work = (lambda world: world + offset) if main else of_notebook()
    assert pickle.loads(dumps(work, main=main))(2) == (7 if main else 6)


@pytest.mark.parametrize("main", [False, True])
def test_without_cloudpickle_the_error_says_what_to_do(monkeypatch, main):
    work = eval("lambda world: world", {"__name__": "__main__"}) if main else of_notebook()
    monkeypatch.setattr(sys.modules["__main__"], "work", work, raising=False)  # this process finds it, a rank does not
    monkeypatch.setattr("shardwright.comm.backends.task_pickle.find_spec", lambda name: None)
    with pytest.raises(PlanError) as caught:
        dumps(work, main=main)
    assert "pip install cloudpickle, or move the function into a module" in str(caught.value)
    assert ("a notebook" in str(caught.value)) is not main


def test_a_script_is_importable_and_an_interactive_session_is_not():
    assert is_importable({"init_main_from_name": "package.train"})
    assert not is_importable({"sys_path": ["."], "dir": "/"})
