"""Says where a value that a command prints with --json does not fit the schema that is published for it."""

from __future__ import annotations

import json
from importlib.resources import files

SCHEMAS = files("shardwright.cli") / "schemas"
KINDS = {"object": dict, "array": list, "string": str, "boolean": bool, "null": type(None)}


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
