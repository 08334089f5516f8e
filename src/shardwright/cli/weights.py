"""The command ``shardwright checkpoint export``: writes the weights of a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer
from torch import Tensor, nn

from shardwright.cli.options import AVERAGES, JSON, emit, report_errors
from shardwright.comm.launch import launch
from shardwright.comm.world import World
from shardwright.errors import CheckpointError, PlanError
from shardwright.formatting import format_bytes
from shardwright.initial_values import without_values
from shardwright.models import MODELS
from shardwright.parallelize import parallelize
from shardwright.weights.loading import load_weights
from shardwright.weights.saving import MOST_FILE_BYTES, save_weights

if TYPE_CHECKING:
    from shardwright.train.config import TrainConfig
    from shardwright.train.opening import TrainingJob

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
        Path | None, typer.Option(help="transformers: a folder from which config.json and tokenizer are copied.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="package.module:factory of your own model, for its ties, config and adapter of peft."),
    ] = None,
    dtype: Annotated[str | None, typer.Option(help=f"{', '.join(DTYPES)}.", show_default="as stored")] = None,
    prefix: Annotated[str, typer.Option(help="What each name gets before it, such as 'model.'.")] = "",
    max_file_gb: Annotated[float, typer.Option(help="GB of tensors in one file of a folder.")] = MOST_FILE_BYTES / 1e9,
    averages: Annotated[bool, AVERAGES] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replaces what is there, also weights of others, such as pretrained ones.")
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Writes the weights of a checkpoint for other programs, under the plain model's names.

    A folder of transformers needs --config or --model, and for a model wrapped by peft --model makes it the folder of
    its adapter. A .pt file and a folder of torch.distributed.checkpoint (dcp) have a tied tensor under each name, if
    PATH is a run.
    """
    if dtype is not None and dtype not in DTYPES:
        raise PlanError("no such dtype", given=dtype, allowed=", ".join(DTYPES), fix="--dtype bfloat16")
    kind: Any = format
    saved = save_weights(
        path, to, format=kind, names=prefix or None, dtype=None if dtype is None else getattr(torch, dtype),
        config=config, model=_model_of(path, model), max_file_bytes=int(max_file_gb * 1e9), averages=averages,
        force=force,
    )  # fmt: skip
    files = [str(file) for file in saved.files]
    where = f"{to}" if len(files) == 1 else f"{to} ({len(files)} files)"
    value = {"file": str(to), "files": files, "tensors": len(saved.names), "bytes": saved.num_bytes}
    of = ", averages" if averages else ""
    emit(value, f"{where}: {len(saved.names)} tensors{of}, {format_bytes(saved.num_bytes)}", as_json=as_json)


def _model_of(path: Path, model: str | None) -> nn.Module | None:
    """Returns the plain model of the run at ``path``, or of the user's factory ``model`` if given, without values.

    Without ``model``, the run's model is returned if it is a built-in one, else None: a folder alone runs no code. From
    the model comes what a checkpoint does not have, such as ties.

    Raises: CheckpointError, PlanError: there is no such factory, it fails, or the run has another model.
    """
    from shardwright.train.config import TrainConfig
    from shardwright.train.run_file import RUN_FILE, options_of, read_run

    run = next((folder for folder in (path, path.parent, path.parent.parent) if (folder / RUN_FILE).is_file()), None)
    if model is not None:
        named = {} if run is None else read_run(run, model=model, data=TrainConfig.data)
        with without_values():
            return TrainConfig(model=model, settings=named.get("settings", {})).build()[0]
    try:
        options = {} if run is None else options_of(run)
        if options.get("model", TrainConfig.model) not in MODELS or run is None:
            return None
        with without_values():
            return TrainConfig(**options).build()[0]
    except (CheckpointError, PlanError):  # the weights can be read without it
        return None


def opened_with_weights(config: TrainConfig) -> TrainingJob:
    """Returns the model, loss and data that a run's options name; the model has values if the options name weights.

    Raises: CheckpointError, PlanError: there is no such model, or the weights are not its own.
    """
    from shardwright.train.opening import opened

    if not config.weights:
        return opened(config)
    job = opened(config, with_values=True)

    def loaded(world: World) -> dict[str, Tensor]:
        run = parallelize(job.model, "single", world, loss=job.loss)
        load_weights(run, config.weights, names=config.weights_prefix, averages=config.averages)
        return run.state_dict()

    (state,) = launch(loaded, 1, ranks="threads")
    job.model.load_state_dict(state, strict=False)  # other names of tied parameters may be missing
    return job
