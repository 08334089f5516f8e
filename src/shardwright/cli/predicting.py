"""The commands ``shardwright evaluate`` and ``predict``: a trained model's loss or outputs, under any layout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from shardwright.cli import options as opt
from shardwright.cli.options import emit, report_errors, warn, with_shared
from shardwright.errors import PlanError
from shardwright.layout import Layout

if TYPE_CHECKING:
    from shardwright.train.config import TrainConfig

RunFolder = Annotated[Path | None, opt.RUN_FOLDER]
From = Annotated[Path | None, opt.FROM]
DataSplit = Annotated[str, typer.Option(help="train or eval.")]
_FIRST, _MOST_LETTERS = 8, 60


def _trained(run: Path, shared: opt.Shared) -> tuple[TrainConfig, Layout]:
    """Returns a run's config, with the command's data and batch if given, and the command's layout, else ``single``."""
    from shardwright.cli.run_config import with_file
    from shardwright.train.config import TrainConfig, read_options
    from shardwright.train.run_file import read_run

    shared = with_file(shared, "layout", "model", "data", "batch")
    base = read_run(run, model=shared.get("model"), data=shared.get("data"))
    own = {key: shared[key] for key in ("data", "batch") if key in shared}
    layout = Layout.parse(shared.get("layout", "single"))
    options = {**base, **read_options(own, given_in="the command"), "layout": str(layout)}
    return TrainConfig(**options), layout


def _split_of(name: str) -> Literal["train", "eval"]:
    if name in ("train", "eval"):
        return cast('Literal["train", "eval"]', name)
    raise PlanError("no such split", given=name, allowed="train, eval", fix="--split eval")


@report_errors
@with_shared("layout", "model", "data", "batch", "config", config=opt.CONFIG_OF_RUN)
def evaluate(
    shared: opt.Shared,
    run: RunFolder = None,
    from_: From = None,
    num: Annotated[int, typer.Option(help="Samples to read; 0 for all of the split.")] = 0,
    split: DataSplit = "eval",
    averages: Annotated[bool, opt.AVERAGES] = False,
    ranks: Annotated[str, opt.RANKS] = "threads",
    as_json: Annotated[bool, opt.JSON] = False,
) -> None:
    """Prints the mean loss of a trained model on a split of its data, and the share of right predictions."""
    from shardwright.train.predicting import evaluate as of_run

    run = opt.run_folder(run, from_)
    config, layout = _trained(run, shared)
    if num < 0:
        raise PlanError("'num' is out of range", given=num, allowed="0 or more", fix="--num 0")
    options: dict[str, Any] = {"split": _split_of(split), "averages": averages, "ranks": opt.ranks_of(ranks)}
    figures = of_run(config, run, layout, num=num, **options)
    right = "" if figures["accuracy"] is None else f", {figures['accuracy']:.1%} right"
    text = (
        f"loss {figures['loss']:.4f}{right}: {figures['samples']} samples of {split}, step {figures['step']}, "
        f"under {figures['layout']}{', averages' if averages else ''}"
    )
    emit(figures, text, as_json=as_json)


@report_errors
@with_shared("layout", "model", "data", "batch", "config", config=opt.CONFIG_OF_RUN)
def predict(
    shared: opt.Shared,
    run: RunFolder = None,
    from_: From = None,
    num: Annotated[int, typer.Option(help="Samples to predict, from the first on.")] = 10,
    split: DataSplit = "eval",
    to: Annotated[Path | None, typer.Option(help="Write all outputs and targets into this .safetensors file.")] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replaces the file of --to, also one that another program wrote.")
    ] = False,
    averages: Annotated[bool, opt.AVERAGES] = False,
    ranks: Annotated[str, opt.RANKS] = "threads",
    as_json: Annotated[bool, opt.JSON] = False,
) -> None:
    """Predicts the samples of a split of a run's data: the likeliest class of each, or the model's outputs."""
    from shardwright.train.predicting import predict as of_run

    run = opt.run_folder(run, from_)
    config, layout = _trained(run, shared)
    options: dict[str, Any] = {"split": _split_of(split), "averages": averages, "ranks": opt.ranks_of(ranks)}
    prediction = of_run(config, run, layout, num=num, to=to, force=force, **options)
    pairs = prediction["texts"] or list(zip(prediction["predictions"], prediction["targets"], strict=True))
    lines = [f"{i}: {_shown(value)} (is {_shown(target)})" for i, (value, target) in enumerate(pairs)]
    if prediction["texts"] is None and any(isinstance(value, list) and isinstance(value[0], int) for value, _ in pairs):
        warn("token ids: a method decode(ids) of the dataset turns them into text here")
    lines += [f"{to}: outputs and targets of {prediction['samples']} samples"] if to is not None else []
    emit(prediction, "\n".join(lines), as_json=as_json)


def _shown(value: Any) -> str:
    """Returns a value as text; of a list only the first few entries."""
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, str):
        return repr(value if len(value) <= _MOST_LETTERS else f"{value[:_MOST_LETTERS]} ...")
    if not isinstance(value, list):
        return str(value)
    more = " ..." if len(value) > _FIRST else ""
    return f"[{' '.join(_shown(entry) for entry in value[:_FIRST])}{more}]"
