"""The command ``shardwright checkpoint export``: writes the weights of a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from torch import nn

from shardwright.cli.options import JSON, emit, report_errors
from shardwright.errors import CheckpointError, PlanError
from shardwright.formatting import format_bytes
from shardwright.models import MODELS
from shardwright.rng import without_values
from shardwright.weights.saving import MOST_FILE_BYTES, save_weights

DTYPES = ("float64", "float32", "bfloat16", "float16")


@report_errors
def export(
    path: Annotated[Path, typer.Argument(help="A checkpoint, the folder of a run, or a file or folder of weights.")],
    to: Annotated[Path, typer.Argument(help="The file (.safetensors, .pt) or the folder to write.")],
    format: Annotated[
        str | None,
        typer.Option(
            help="safetensors, transformers, pt or dcp.", show_default="by the suffix of TO, else safetensors"
        ),
    ] = None,
    config: Annotated[
        Path | None, typer.Option(help="transformers: the folder from which config.json and tokenizer are copied.")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}.", show_default="as stored")] = None,
    prefix: Annotated[str, typer.Option(help="What each name gets before it, such as 'model.'.")] = "",
    max_file_gb: Annotated[float, typer.Option(help="GB of tensors in one file of a folder.")] = MOST_FILE_BYTES / 1e9,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Writes the weights of a checkpoint for other programs, under the plain model's names.

    A .pt file and a folder of torch.distributed.checkpoint (dcp) have a tied tensor under each name, if PATH is a run.
    """
    if dtype is not None and dtype not in DTYPES:
        raise PlanError("no such dtype", given=dtype, allowed=", ".join(DTYPES), fix="--dtype bfloat16")
    kind: Any = format
    saved = save_weights(
        path, to, format=kind, names=prefix, dtype=None if dtype is None else getattr(torch, dtype),
        config=config, model=_model_of(path), max_file_bytes=int(max_file_gb * 1e9),
    )  # fmt: skip
    files = [str(file) for file in saved.files]
    where = f"{to}" if len(files) == 1 else f"{to} ({len(files)} files)"
    value = {"file": str(to), "files": files, "tensors": len(saved.names), "bytes": saved.num_bytes}
    emit(value, f"{where}: {len(saved.names)} tensors, {format_bytes(saved.num_bytes)}", as_json=as_json)


def _model_of(path: Path) -> nn.Module | None:
    """Returns the plain model of a run in a folder, without values; None if it is none of the models that come along.

    Its ties are not in a checkpoint. A folder alone runs no code, so that a factory of the user's is not called.
    """
    from shardwright.train.config import TrainConfig
    from shardwright.train.run_file import RUN_FILE, options_of

    run = next((each for each in (path, path.parent, path.parent.parent) if (each / RUN_FILE).is_file()), None)
    try:
        options = {} if run is None else options_of(run)
        if options.get("model", TrainConfig.model) not in MODELS or run is None:
            return None
        with without_values():
            return TrainConfig(**options).build()[0]
    except (CheckpointError, PlanError):  # the weights can be read without it
        return None
