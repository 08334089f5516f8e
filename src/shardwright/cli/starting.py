"""The command ``shardwright init``: writes a folder to start from, with options, a model, data and a loop that run."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

from shardwright.cli.options import JSON, emit, report_errors
from shardwright.errors import PlanError

FILES = ("run.toml", "my_model.py", "train.py")
"""The files that the command writes; ``templates`` holds each as ``NAME.txt``."""


@report_errors
def init(
    folder: Annotated[Path, typer.Argument(help="The folder to write into; it is made if it does not exist.")],
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Writes a folder to start from: commented options, a plain model with its data, and a loop of your own."""
    there = [name for name in FILES if (folder / name).exists() or (folder / name).is_symlink()]
    if there:
        raise PlanError(
            f"'{folder}' has {', '.join(there)} already",
            given="files of these names, which would be overwritten",
            allowed="a folder without them",
            fix="give another folder, or move them",
        )
    folder.mkdir(parents=True, exist_ok=True)
    templates = files("shardwright.cli") / "templates"
    for name in FILES:
        with (folder / name).open("x", encoding="utf-8") as file:
            file.write((templates / f"{name}.txt").read_text(encoding="utf-8"))
    written = [str(folder / name) for name in FILES]
    text = (
        "\n".join(written) + f"\n\ncd {folder}\nshardwright verify --config run.toml\n"
        "shardwright train  --config run.toml\npython train.py dp2"
    )
    emit({"folder": str(folder), "files": written}, text, as_json=as_json)
