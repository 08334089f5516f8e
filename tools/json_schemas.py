"""Writes the JSON schemas of what commands print with --json, from real outputs: python tools/json_schemas.py

The schemas are in src/shardwright/cli/schemas, one for each command, and one each for ``plan --replay`` and
``plan --ranks``, which print something else. A key that every output of a command has is required; new keys may come,
so programs that read the output should pass over keys that they do not know. The test tests/cli/test_schemas.py holds
every command to its schema.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from shardwright.cli.main import app

SCHEMAS = Path(__file__).parents[1] / "src" / "shardwright" / "cli" / "schemas"
TINY = ["--set", "num_layers=2", "--set", "width=16", "--set", "num_heads=2", "--seq", "16", "--batch", "4"]
THREADS = ["--ranks", "threads"]

MEANINGS = {
    "accuracy": "the share of targets that the likeliest class equals; null if the targets are no classes",
    "all_reduce_s": "seconds of an all-reduce between two ranks, by its bytes",
    "allowed": "the tolerance of each tensor that is allowed more than the usual one",
    "batch": "the samples of a step; of the best batch, where several were planned",
    "best": "the line of the best layout; of the nearest one, if none fits",
    "memory_limit_bytes": "the bytes of a device that a layout may take",
    "by_batch": "of each batch its best layout, or why it has none",
    "by_ranks": "an output of plan for each number of ranks",
    "bytes": "of all files",
    "checkpoint": "the path of the last checkpoint; null if there is none",
    "diverged": "the number of the step whose loss or gradient norm was not finite; null if there was none",
    "devices": "the names of accelerators",
    "equal": "whether the layout's result is that of one device",
    "file": "the path of what was written; null if nothing was",
    "files": "paths",
    "first_loss": "of the first step of this call; null without a step",
    "last_loss": "of the last step of this call; null without a step",
    "fit": "the number of layouts whose memory fits",
    "unpriced": "layouts that might be better than the best, by their estimates, and were not priced",
    "layout": "the layout line, in its canonical form",
    "loss": "the mean over all targets of the samples that were read; ignored targets do not count",
    "missing": "what parts of the library lack on this machine, and what to type",
    "parameters": "of the plain model: their number, or one entry each",
    "parts": "of each start of the run that was measured: its predicted and measured figures, and how far off they are",
    "peak_memory_bytes": "of each rank, in the order of ranks",
    "predictions": "of each sample the likeliest class, or of each token of it; or the model's output",
    "rejected": "why layouts were left out, how many for each reason, and the first of them",
    "report": "the path of the report page, or why it was not written",
    "runner_up": "the layout line of the second best that fits; null if there is none",
    "step": "the number of training steps taken",
    "steps": "the number of training steps taken",
    "step_ms_median": "milliseconds; null with too few steps",
    "stopped": "whether a stop signal or a callback ended the run before its last step",
    "targets": "of each sample",
    "tensors": "shapes by name, or the number of tensors",
    "texts": "of each sample the prediction and the target as text; null if the data cannot turn tokens into text",
    "text": "the prompt and what follows it, or a line for each picture",
    "samples_per_s_median": "of all ranks together; null with too few steps",
    "tokens_per_s_median": "of all ranks together; null with too few steps, or if targets are not one for each token",
    "trace": "the path of the profile; null without one",
    "world_size": "the number of ranks",
}
"""What keys of the top level mean, where their names do not say it."""


TYPES = {"trace": "string", "diverged": "integer", "file": "string", "texts": "array"}
"""The types of keys that are null in all outputs here."""

DEPTHS = {"plan": 2, "doctor": 2}
"""How many levels of objects a schema describes key by key; 1 where a name is not listed."""


def commands(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """Yields command lines whose outputs the schemas describe, by the name of the schema; later ones need earlier."""
    run = str(folder / "run")
    yield "train", ["train", "--layout", "dp2", "--steps", "2", "--out", run, *TINY, *THREADS]
    yield "train", ["train", "--layout", "pp2 mb2", "--steps", "5", "--out", f"{run}2", *TINY, *THREADS]
    yield "train", ["train", "--layout", "dp2", "--steps", "2", "--out", run, "--resume", *THREADS]
    yield "verify", ["verify", "--layout", "dp2", *TINY]
    yield "show", ["show", "--layout", "pp2 mb2 dp2 tp2", "--memory", "--nodes", "2x4", "--explain", "token", *TINY]
    yield "show", ["show", "--layout", "single", *TINY]
    plan = ["plan", "--cluster", "a100-80gb:1x2", *TINY]
    yield "plan", [*plan, "--layout", "dp2 bf16", "--explain", "dp2", "--explain", "dp3"]
    yield "plan", [*plan, "--layout", "dp2 bf16"]
    yield "plan", [*plan, "--most-priced", "2"]
    yield "plan", [*plan, "--layout", "dp2", "--batch", "auto:2-4"]
    yield "plan-ranks", [*plan, "--ranks", "1,2", "--most-priced", "1"]
    yield "plan-replay", ["plan", "--replay", f"{run}2"]
    yield "plan-replay", ["plan", "--replay", f"{run}2", "--cluster", "a100-80gb"]
    yield "sample", ["sample", "--from", run, "--num", "3"]
    yield "evaluate", ["evaluate", "--from", run, "--num", "4"]
    yield "predict", ["predict", "--from", run, "--num", "2"]
    yield "predict", ["predict", "--from", run, "--num", "2", "--to", f"{folder}/outputs.safetensors"]
    yield "report", ["report", run]
    yield "report", ["report", "--compare", run, f"{run}2", "--out", f"{folder}/comparison.html"]
    # a loaded machine may measure too widely: the keys are those of a quiet one
    calibrated = f"{folder}/here.toml"
    yield "calibrate", ["calibrate", "--num-ranks", "2", "--force", "--out", calibrated, *TINY, *THREADS]
    yield "checkpoint-inspect", ["checkpoint", "inspect", run]
    yield "checkpoint-export", ["checkpoint", "export", run, f"{folder}/model.safetensors"]
    yield "init", ["init", f"{folder}/first"]
    yield "doctor", ["doctor"]


def output_of(words: list[str]) -> Any:
    """Returns what a command prints with --json."""
    found = CliRunner().invoke(app, [*words, "--json"])
    if found.exit_code:
        raise SystemExit(f"{' '.join(words)}: {found.output}{found.stderr}")
    return json.loads(found.stdout)


def merged(values: list[Any], depth: int) -> dict[str, Any]:
    """Returns a schema that all of ``values`` fit, with the keys of objects down to ``depth``."""
    kinds = {_kind(value) for value in values}
    kinds -= {"integer"} if "number" in kinds else set()
    schema: dict[str, Any] = {"type": kinds.pop() if len(kinds) == 1 else sorted(kinds)} if kinds else {}
    objects = [value for value in values if isinstance(value, dict)]
    entries = [entry for value in values if isinstance(value, list) for entry in value]
    if objects and depth and all(key.isidentifier() for each in objects for key in each):
        keys = list(dict.fromkeys(key for each in objects for key in each))
        schema["properties"] = {key: merged([each[key] for each in objects if key in each], depth - 1) for key in keys}
        schema["required"] = sorted(key for key in keys if all(key in each for each in objects))
    if entries:
        schema["items"] = merged(entries, depth)
    return schema


def _kind(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def main() -> None:
    """Writes all schemas."""
    outputs: dict[str, list[Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name, words in commands(Path(folder)):
            outputs.setdefault(name, []).append(output_of(words))
            print(name, file=sys.stderr)
    SCHEMAS.mkdir(exist_ok=True)
    for name, values in outputs.items():
        schema = merged(values, DEPTHS.get(name, 1))
        for key, value in schema["properties"].items():
            if key in MEANINGS:
                value["description"] = MEANINGS[key]
            if "null" in MEANINGS.get(key, ""):
                kinds = {value["type"]} if isinstance(value["type"], str) else {*value["type"]}
                value["type"] = sorted({*kinds, TYPES.get(key, "null"), "null"})
        title = f"shardwright {name.replace('-', ' ')} --json"
        head = {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": title}
        (SCHEMAS / f"{name}.json").write_text(json.dumps({**head, **schema}, indent=1) + "\n")


if __name__ == "__main__":
    main()
