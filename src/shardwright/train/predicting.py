"""Evaluates a trained model, or predicts with it, on a run's data under any layout."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.loading import load
from shardwright.checkpoint.manifest import find, read
from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.parallelize.run import Run
from shardwright.rng import without_values
from shardwright.runtime.executor import Microbatch
from shardwright.train.config import TrainConfig
from shardwright.train.data import Dataset, Split, global_batch, open_data
from shardwright.train.out_folder import CHECKPOINTS
from shardwright.weights.targets import WeightEntry, prepare_file, write_safetensors

MOST_SAMPLES = 2**20
"""The most samples of one prediction, which are all returned."""


def evaluate(
    config: TrainConfig, run: Path, layout: Layout, *, num: int = 0, split: Split = "eval", ranks: Ranks = "threads"
) -> dict[str, Any]:
    """Returns the mean loss of the newest checkpoint of ``run`` on a split of its data, as plain data for JSON.

    ``config`` is that of the run, and ``layout`` the layout to evaluate under. ``num`` samples are read, or all for 0,
    in batches of ``config.batch``. The result has the loss, the share of right predictions if targets are classes (else
    None), the number of samples, the step and the layout. Loss and share are those of all targets, each of which counts
    the same; targets that the loss ignores do not count.

    Raises: PlanError: an option is out of range; LayoutError: the layout does not fit the model or the ranks;
        CheckpointError: ``run`` has no checkpoint that fits; RankFailedError: a rank failed in another way.
    """
    return launch(_evaluate, layout, config, run, layout, num, split, ranks=ranks)[0]


def predict(
    config: TrainConfig, run: Path, layout: Layout, *, num: int = 10, split: Split = "eval", to: Path | None = None,
    ranks: Ranks = "threads",
) -> dict[str, Any]:  # fmt: skip
    """Returns what the newest checkpoint of ``run`` predicts for the first ``num`` samples of a split of its data.

    If the targets are classes, the result has the likeliest class of each sample, or of each token of it, beside the
    targets; else the outputs. With ``to``, a ``.safetensors`` file, all outputs and targets are written there.

    Raises: as :func:`evaluate`; PlanError: ``to`` is no ``.safetensors`` file. CheckpointError: it cannot be written,
        which is known before anything is predicted unless the disk is full.
    """
    if not 0 < num <= MOST_SAMPLES:
        raise PlanError("'num' is out of range", given=num, allowed=f"1 to {MOST_SAMPLES}", fix="set num=10")
    if to is not None and to.suffix != ".safetensors":
        fix = f"write --to {to.with_suffix('.safetensors')}"
        raise PlanError("outputs are written as safetensors", given=to, allowed="a .safetensors file", fix=fix)
    if to is not None:
        prepare_file(to)
    return launch(_predict, layout, config, run, layout, num, split, to, ranks=ranks)[0]


def _opened(
    world: World, config: TrainConfig, folder: Path, layout: Layout, split: Split
) -> tuple[Run, Dataset, dict[str, Any]]:
    """Returns the run with the values of its newest checkpoint, the split of its data, and what results begin with."""
    with without_values():
        plain, loss, model_config = config.build()
    data = open_data(config.data, seq=config.seq, model=model_config, split=split)
    inputs, _ = data.sample(0)
    example = inputs.expand(config.batch, *inputs.shape)
    run = parallelize(
        plain, layout, world, loss=loss, seed=config.seed, roles=config.roles, example=example, check_every=0
    )
    load(folder / CHECKPOINTS, run)
    step = read(find(folder / CHECKPOINTS)).step
    return run, data, {"step": step, "layout": str(layout), "split": split}


def _batches(data: Dataset, num: int, size: int) -> Iterator[tuple[Tensor, Tensor]]:
    for start in range(0, num, size):
        yield global_batch(data, range(start, min(start + size, num)))


def _is_right(output: Any, targets: Tensor) -> Tensor | None:
    """Returns which of the likeliest classes are the targets, or None if the targets are no classes of the output."""
    fits = isinstance(output, Tensor) and output.shape[:-1] == targets.shape and not targets.is_floating_point()
    return output.argmax(-1).cpu() == targets if fits else None


def _evaluate(
    world: World, config: TrainConfig, folder: Path, layout: Layout, num: int, split: Split
) -> dict[str, Any]:
    run, data, found = _opened(world, config, folder, layout, split)
    num = min(num or len(data), len(data))
    right, count = 0, 0
    ignored = getattr(run.loss, "ignore_index", None)

    def parts() -> Iterator[Microbatch]:
        nonlocal right, count
        for inputs, targets in _batches(data, num, config.batch):
            yield from run.shard([(inputs, targets)])
            matches = _is_right(run.predict(inputs), targets)
            if matches is not None:
                counted = torch.ones_like(matches) if ignored is None else targets.cpu() != ignored
                right, count = right + int(matches[counted].sum()), count + int(counted.sum())

    loss = run.evaluate_all(parts()).item()
    return {"loss": loss, "accuracy": right / count if count else None, "samples": num, **found}


def _predict(
    world: World, config: TrainConfig, folder: Path, layout: Layout, num: int, split: Split, to: Path | None
) -> dict[str, Any]:
    run, data, found = _opened(world, config, folder, layout, split)
    num = min(num, len(data))
    outputs, wanted = [], []
    for inputs, targets in _batches(data, num, config.batch):
        output = run.predict(inputs)
        if not isinstance(output, Tensor):
            raise PlanError(
                "a model whose output is written is one that returns a tensor",
                given=type(output).__name__,
                allowed="a tensor",
                fix="return the tensor alone, or call run.predict in a script",
            )
        outputs.append(output.cpu())
        wanted.append(targets)
    whole, truth = torch.cat(outputs), torch.cat(wanted)
    is_class = _is_right(whole, truth) is not None
    if to is not None and world.rank == 0:
        tensors = {"outputs": whole, "targets": truth}
        table = [WeightEntry((name,), each.dtype, tuple(each.shape)) for name, each in tensors.items()]
        write_safetensors(to, table, zip(table, tensors.values(), strict=True))
    shown = whole.argmax(-1) if is_class else whole
    return {
        "predictions": shown.tolist(), "targets": truth.tolist(), "samples": num,
        "file": str(to) if to is not None else None, **found,
    }  # fmt: skip
