"""The files beside weights in a folder of transformers: the model's configs, and those of the tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from shardwright.analysis.traced.structure import kind_of
from shardwright.errors import CheckpointError
from shardwright.weights.files import MOST_INDEX_BYTES, OpenFile, broken, read_json
from shardwright.weights.targets import COPIED, WeightEntry

CONFIG = "config.json"
"""The name of the file that describes a model in a folder of transformers."""

GENERATION = "generation_config.json"
"""The file in such a folder that says how the model generates: its end tokens, and how it draws the next token."""


def files_beside(config: Any, model: nn.Module | None, table: Sequence[WeightEntry]) -> dict[str, bytes]:
    """Returns the files of a folder of transformers beside its weights, by name.

    ``config`` is a config object, a dict, or the path of a folder of transformers or of a ``config.json``; None for the
    ``config`` of the model. The dtype of the weights and, if it is missing, the class of the model are noted in it. A
    model that can generate has its ``generation_config`` written too, unless the folder has one.

    Raises: CheckpointError: there is no config, or no ``model_type`` in it.
    """
    files: dict[str, bytes] = {}
    source = getattr(model, "config", None) if config is None else config
    if isinstance(source, str | Path):
        folder = Path(source)
        fields = read_json(folder / CONFIG if folder.is_dir() else folder)
        files = {name: _content(folder / name) for name in COPIED if folder.is_dir() and (folder / name).exists()}
    elif isinstance(source, Mapping):
        fields = dict(source)
    elif callable(write := getattr(source, "to_json_string", None)):
        fields = json.loads(write())
    else:
        fields = None
    if not isinstance(fields, dict) or not fields.get("model_type"):
        raise CheckpointError(
            "a folder of transformers needs a config",
            given="no config" if fields is None else "a config without a 'model_type'",
            allowed="a model that has one, or the config: its object, a dict, or a folder of transformers",
            fix="config='FOLDER', or --config FOLDER, where FOLDER is the model that the weights came from",
        )
    floating = next((weight.dtype for weight in table if weight.dtype.is_floating_point), None)
    if floating is not None:
        fields["torch_dtype" if "torch_dtype" in fields else "dtype"] = str(floating).removeprefix("torch.")
    if model is not None and not fields.get("architectures"):
        fields["architectures"] = [kind_of(model).__name__]
    texts = {CONFIG: json.dumps(fields, indent=2, sort_keys=True) + "\n", **_generation(model)}
    return {name: text.encode() for name, text in texts.items()} | files


def _generation(model: nn.Module | None) -> dict[str, str]:
    """Returns the text of the model's generation config, by its file name; {} for a model that cannot generate."""
    write = getattr(getattr(model, "generation_config", None), "to_json_string", None)  # None where it cannot generate
    return {GENERATION: write()} if callable(write) else {}


def _content(path: Path) -> bytes:
    file = OpenFile(path)
    if file.num_bytes > MOST_INDEX_BYTES:
        raise broken(path, f"{file.num_bytes} bytes")
    return bytes(file.read(0, file.num_bytes))
