"""Measures the zoo: every model under every layout, each model in a process of its own, and keeps the rows.

``make zoo`` runs it. ``--only llama,bert --layouts tp2,dp2`` measures a part; ``--mode eval`` measures without dropout.
Rows that were measured on the same source of the library are kept, unless ``--again``. A row is one line of
``rows.json``; ``docs/models.md`` is made of them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import json
import multiprocessing
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout, suppress
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from zoo.building import LeftOutError
from zoo.models import MODELS, ZooModel
from zoo.page import PAGE, ROWS, SWEEP, page_of
from zoo.trying import EQUAL, ERROR, LAYOUTS, TIMEOUT, Row, library_digest, tried

Key = tuple[str, str, str]


def main() -> None:
    options = arguments()
    with suppress(ModuleNotFoundError):
        importlib.import_module("transformers.modeling_utils")
    library, kept = library_digest(), read_rows()
    for number, name in enumerate(options.only, 1):
        model, mode = MODELS[name], options.mode
        layouts = [each for each in options.layouts if options.again or is_due(kept, (name, each, mode), library)]
        if options.failed:
            layouts = [each for each in layouts if kept.get((name, each, mode), {}).get("result") != EQUAL]
        for row in measured(model, layouts, mode, options.limit_s, library):
            kept[name, row.layout, mode] = row.to_dict()
            print(
                f"{number}/{len(options.only)} {name} | {row.layout} | {row.result} {row.why} | {row.seconds} s",
                flush=True,
            )
        write_rows(kept)
    PAGE.write_text(page_of(json.loads(ROWS.read_text()), json.loads(SWEEP.read_text())))


def is_due(kept: dict[Key, dict], key: Key, library: str) -> bool:
    """Whether a row is missing or of other source; without dropout only where training is not equal."""
    trained = kept.get((*key[:2], "train"), {})
    if key[2] == "eval" and (trained.get("library"), trained.get("result")) == (library, EQUAL):
        return False
    return kept.get(key, {}).get("library") != library


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m zoo", description=__doc__)
    parser.add_argument("--only", help="names of models, separated by commas; by default all")
    parser.add_argument("--layouts", help="layouts, separated by commas; by default the columns of the table")
    parser.add_argument("--mode", choices=("train", "eval"), default="train", help="eval: without dropout")
    parser.add_argument("--again", action="store_true", help="measure again what was measured on the same source")
    parser.add_argument("--failed", action="store_true", help="measure only what is not known to be equal")
    parser.add_argument("--limit-s", type=float, default=120.0, help="the most seconds of one model and layout")
    options = parser.parse_args()
    options.only = options.only.split(",") if options.only else list(MODELS)
    options.layouts = options.layouts.split(",") if options.layouts else list(LAYOUTS)
    unknown = [name for name in options.only if name not in MODELS]
    if unknown:
        parser.error(f"no such model: {', '.join(unknown)}; there are: {', '.join(MODELS)}")
    return options


def measured(
    model: ZooModel,
    layouts: Sequence[str],
    mode: str,
    limit_s: float,
    library: str,
    left_out: Callable[[str], object] = lambda why: print(f"left out: {why}", flush=True),
) -> Iterator[Row]:
    """Each layout's row; a process that ends or takes too long is replaced by one for the layouts that are left.

    ``left_out`` is called with the reason of a model that cannot be built here.
    """
    same = {"package": model.package, "family": model.family, "mode": mode, "library": library}
    waiting = list(layouts)
    context = multiprocessing.get_context("fork")  # what main imported need not be imported again
    while waiting:
        receive, send = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(model, waiting, mode, library, send))
        process.start()
        send.close()
        while waiting:
            try:
                row = receive.recv() if receive.poll(limit_s) else None
            except EOFError:
                process.join()
                why = f"the process ended with code {process.exitcode}"
                yield Row(model=model.name, layout=waiting.pop(0), result=ERROR, why=why, **same)
                break
            if isinstance(row, str):
                left_out(row)
                waiting.clear()
            elif row is None:
                yield Row(model=model.name, layout=waiting.pop(0), result=TIMEOUT, why=f"over {limit_s:.0f} s", **same)
                break
            else:
                waiting.pop(0)
                yield row
        process.kill()
        process.join()


def work(model: ZooModel, layouts: Sequence[str], mode: str, library: str, send: Connection) -> None:
    """Sends one row for each layout, or a text if the model cannot be built here."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    with Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        for layout in layouts:
            try:
                send.send(tried(model, layout, mode, library))
            except (ModuleNotFoundError, LeftOutError) as missing:
                send.send(str(missing))
                return


def read_rows() -> dict[Key, dict]:
    """The committed rows by model, layout and mode."""
    if not ROWS.exists():
        return {}
    return {(row["model"], row["layout"], row["mode"]): row for row in json.loads(ROWS.read_text())["rows"]}


def write_rows(kept: dict[Key, dict]) -> None:
    """Writes all rows in the order of the table, one a line, beside the versions of their packages."""
    names, layouts = list(MODELS), list(LAYOUTS)
    known = [key for key in kept if key[0] in MODELS and key[1] in LAYOUTS]
    known.sort(key=lambda key: (names.index(key[0]), layouts.index(key[1]), key[2] != "train"))
    versions = {}
    for package in sorted({"torch", *(model.package for model in MODELS.values())}):
        with suppress(importlib.metadata.PackageNotFoundError):
            versions[package] = importlib.metadata.version(package)
    lines = ",\n".join(json.dumps(kept[key]) for key in known)
    part = ROWS.with_suffix(".part")
    part.write_text(
        f'{{"versions": {json.dumps(versions)},\n"layouts": {json.dumps(layouts)},\n"rows": [\n{lines}\n]}}\n'
    )
    part.replace(ROWS)


if __name__ == "__main__":
    main()
