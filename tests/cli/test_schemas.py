"""What commands print with --json fits the schemas that are published with the package."""

from __future__ import annotations

import importlib.util
import json
import sys
from importlib.resources import files
from pathlib import Path

import pytest
import typer

from shardwright.cli.main import app

TOOL = Path(__file__).parents[2] / "tools" / "json_schemas.py"
SCHEMAS = files("shardwright.cli") / "schemas"
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


def tool():
    spec = importlib.util.spec_from_file_location("json_schemas", TOOL)
    module = importlib.util.module_from_spec(spec)
    sys.modules["json_schemas"] = module
    spec.loader.exec_module(module)
    return module


def is_of(value, kind):
    if kind in ("integer", "number"):
        return isinstance(value, int if kind == "integer" else int | float) and not isinstance(value, bool)
    return isinstance(value, KINDS[kind])


def misfits(value, schema, path="$"):
    """Where a value does not fit a schema, by the part of JSON Schema that the published ones use."""
    assert schema.keys() <= {"$schema", "title", "type", "properties", "required", "items", "description"}
    kinds = schema.get("type", [])
    kinds = [kinds] if isinstance(kinds, str) else kinds
    if kinds and not any(is_of(value, kind) for kind in kinds):
        return [f"{path} is {type(value).__name__}, not {kinds}"]
    found = []
    if isinstance(value, dict):
        found += [f"{path} has no '{key}'" for key in schema.get("required", ()) if key not in value]
        for key, inner in schema.get("properties", {}).items():
            found += misfits(value[key], inner, f"{path}.{key}") if key in value else []
    for number, entry in enumerate(value if isinstance(value, list) else ()):
        found += misfits(entry, schema.get("items", {}), f"{path}[{number}]")
    return found


def schema_of(name):
    return json.loads((SCHEMAS / f"{name}.json").read_text())


def test_every_command_that_prints_json_has_a_schema():
    def names(command, path=()):
        for name, sub in getattr(command, "commands", {}).items():
            yield from names(sub, (*path, name))
        if not hasattr(command, "commands") and any("--json" in each.opts for each in command.params):
            yield "-".join(path)

    published = {each.name.removesuffix(".json") for each in SCHEMAS.iterdir() if each.name.endswith(".json")}
    assert set(names(typer.main.get_command(app))) <= published


def test_real_outputs_fit_the_schemas(tmp_path):
    found, names = [], set()
    for name, words in tool().commands(tmp_path):
        if name in ("doctor", "plan", "calibrate"):  # they measure or search: their own tests run them
            continue
        value = tool().output_of(words)
        names.add(name)
        found += [f"{' '.join(words)}: {each}" for each in misfits(value, schema_of(name))]
        assert misfits(dict.fromkeys(value), schema_of(name)), "a value that does not fit is found"
    assert not found
    assert len(names) >= 9


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
