"""What commands print with --json fits the schemas that are published with the package."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest
import typer

from json_fits import SCHEMAS, misfits, schema_of
from shardwright.cli.main import app

TOOL = Path(__file__).parents[2] / "tools" / "json_schemas.py"


def tool():
    spec = importlib.util.spec_from_file_location("json_schemas", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["json_schemas"] = module
    spec.loader.exec_module(module)
    return module


def test_every_command_that_prints_json_has_a_schema():
    def names(command, path=()):
        for name, sub in getattr(command, "commands", {}).items():
            yield from names(sub, (*path, name))
        if not hasattr(command, "commands") and any("--json" in each.opts for each in command.params):
            yield "-".join(path)

    published = {each.name.removesuffix(".json") for each in SCHEMAS.iterdir() if each.name.endswith(".json")}
    assert set(names(typer.main.get_command(app))) <= published


ALONE = {"verify", "show", "plan", "plan-ranks", "init", "doctor"}
"""The commands that need no run, so that two tests share the time."""


@pytest.mark.sampled(0)
@pytest.mark.parametrize("needs_a_run", [False, True])
def test_real_outputs_fit_the_schemas(tmp_path, needs_a_run):
    found, names = [], set()
    for name, words in tool().commands(tmp_path):
        if name == "calibrate" or (name in ALONE) == needs_a_run:  # calibrate: its own test runs it
            continue
        value = tool().output_of(words)
        names.add(name)
        found += [f"{' '.join(words)}: {each}" for each in misfits(value, schema_of(name))]
        assert misfits(dict.fromkeys(value), schema_of(name)), "a value that does not fit is found"
    assert not found
    assert len(names) >= 8 if needs_a_run else names == ALONE


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ({"a": 1, "b": [1.5, 2]}, []),
        ({"a": True, "b": []}, ["$.a is bool, not ['integer']"]),
        ({"b": ["x"]}, ["$ has no 'a'", "$.b[0] is str, not ['number', 'null']"]),
    ],
)
def test_the_check_finds_what_does_not_fit(value, found):
    inner = {"type": "array", "items": {"type": ["number", "null"]}}
    schema = {"type": "object", "required": ["a"], "properties": {"a": {"type": "integer"}, "b": inner}}
    assert misfits(value, schema) == found
