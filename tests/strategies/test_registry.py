"""Choosing strategies by the layout line: an option takes a value only where a strategy shows one."""

from __future__ import annotations

import sys

import pytest

from contract.cases import spelling, written
from shardwright import strategies
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.strategies import STRATEGIES, choose

OPTIONS = [(s, name) for s in STRATEGIES.values() for name in s.options]


def takes_value(name):
    return any(f"{name}:" in s.options[name].text for s in STRATEGIES.values() if name in s.options)


@pytest.mark.parametrize(("strategy", "name"), OPTIONS, ids=lambda value: getattr(value, "name", value))
def test_a_value_is_refused_by_every_option_that_shows_none(strategy, name):
    if takes_value(name):
        return
    factor = spelling(strategy, 8)
    line = factor.replace(f"/{name}", f"/{name}:7") if f"/{name}" in factor else f"{factor}/{name}:7"
    with pytest.raises(LayoutError, match=f"'{name}' on axis '{strategy.axis}' takes no value"):
        choose(Layout.parse(line))


@pytest.mark.parametrize(("strategy", "name"), OPTIONS, ids=lambda value: getattr(value, "name", value))
def test_an_option_that_is_tried_with_values_shows_one(strategy, name):
    if any(part.startswith(f"{name}:") for text in written(strategy, name) for part in text.split("/")):
        assert takes_value(name)


def test_the_fix_is_the_line_without_the_value():
    with pytest.raises(LayoutError, match="write dp2 tp4/regather/sp"):
        choose(Layout.parse("tp4/sp:7/regather dp2"))


def test_a_strategy_is_found_in_a_file_and_in_a_file_of_a_folder(tmp_path, monkeypatch):
    (tmp_path / "folder").mkdir()
    for name in ("alone_.py", "folder/__init__.py", "folder/inside_.py"):
        (tmp_path / name).write_text("STRATEGY = __name__")
    monkeypatch.setattr(strategies, "__path__", [str(tmp_path)])
    found = [module.STRATEGY for module in strategies._modules()]
    for name in found:
        monkeypatch.delitem(sys.modules, name)
    root = "shardwright.strategies"
    assert found == [f"{root}.alone_", f"{root}.folder", f"{root}.folder.inside_"]
