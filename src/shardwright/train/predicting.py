"""Evaluates a trained model, or predicts with it, on a run's data under any layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shardwright.checkpoint.manifest import find, read
from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks
from shardwright.comm.world import World
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize import parallelize
from shardwright.parallelize.run import Run
from shardwright.runtime.executor import Microbatch
from shardwright.train.config import TrainConfig
from shardwright.train.data import Dataset, Split, global_batch
from shardwright.train.given_data import MapDataset
from shardwright.train.opening import inputs_of, num_tokens, opened
from shardwright.train.out_folder import CHECKPOINTS
from shardwright.train.progress import StatusLog
from shardwright.weights.loading import load_weights
from shardwright.weights.targets import WeightEntry, check_replaces, prepare, write_safetensors

MOST_SAMPLES = 2**20
"""The most samples of one prediction, which are all returned."""


def evaluate(
    config: TrainConfig, run: Path, layout: Layout, *, num: int = 0, split: Split = "eval", averages: bool = False,
    ranks: Ranks = "threads",
) -> dict[str, Any]:  # fmt: skip
    """Returns the mean loss of the newest checkpoint of ``run`` on a split of its data, as plain data for JSON.

    ``config`` is that of the run, and ``layout`` the layout to evaluate under. ``num`` samples are read, or all for 0,
    in batches of ``config.batch``. With ``averages``, the parameters are the averages in the checkpoint. The result has
    the loss, the share of right predictions if targets are classes (else None), the number of samples, the step and the
    layout. Loss and share are those of all targets, each of which counts the same; targets that the loss ignores do not
    count.

    Raises: PlanError: an option is out of range; LayoutError: the layout does not fit the model or the ranks;
        CheckpointError: ``run`` has no checkpoint that fits; RankFailedError: a rank failed in another way.
    """
    return launch(_evaluate, layout, config, run, layout, num, split, averages, ranks=ranks)[0]


def predict(
    config: TrainConfig, run: Path, layout: Layout, *, num: int = 10, split: Split = "eval", to: Path | None = None,
    averages: bool = False, force: bool = False, ranks: Ranks = "threads",
) -> dict[str, Any]:  # fmt: skip
    """Returns what the newest checkpoint of ``run`` predicts for the first ``num`` samples of a split of its data.

    If the targets are classes, the result has the likeliest class of each sample, or of each token of it, beside the
    targets; else the outputs. ``texts`` has both as text where the data can turn tokens into it, else it is None. With
    ``to``, a ``.safetensors`` file, all outputs and targets are written there; a file that another program has written
    is replaced only with ``force``. ``averages`` as in :func:`evaluate`.

    Raises: as :func:`evaluate`; PlanError: ``to`` is no ``.safetensors`` file. CheckpointError: it cannot be written,
        or would be replaced, which is known before anything is predicted unless the disk is full.
    """
    if not 0 < num <= MOST_SAMPLES:
        raise PlanError("'num' is out of range", given=num, allowed=f"1 to {MOST_SAMPLES}", fix="set num=10")
    if to is not None and to.suffix != ".safetensors":
        fix = f"write --to {to.with_suffix('.safetensors')}"
        raise PlanError("outputs are written as safetensors", given=to, allowed="a .safetensors file", fix=fix)
    if to is not None:
        prepare(to)
        if not force:
            check_replaces(to, [])
    return launch(_predict, layout, config, run, layout, num, split, averages, to, ranks=ranks)[0]


def _opened(
    world: World, config: TrainConfig, folder: Path, layout: Layout, split: Split, *, averages: bool
) -> tuple[Run, Dataset, dict[str, Any]]:
    """Returns the run with the values of its newest checkpoint, the split of its data, and what results begin with."""
    plain, loss, _, data = opened(config, split)
    run = parallelize(
        plain, layout, world, loss=loss, seed=config.seed, roles=config.roles, example=inputs_of(data, config.batch),
        check_every=0,
    )  # fmt: skip
    load_weights(run, folder / CHECKPOINTS, averages=averages)
    step = read(find(folder / CHECKPOINTS)).step
    return run, data, {"step": step, "layout": str(layout), "split": split}


def _batches(data: Dataset, num: int, size: int, *, says: str) -> Iterator[tuple[Any, Any]]:
    """Yields the batches of the first ``num`` samples; ``says``, if it is not "", is what progress is called."""
    waited = StatusLog(says, num, "samples")
    for start in range(0, num, size):
        yield global_batch(data, range(start, min(start + size, num)))
        waited.show(min(start + size, num))


def scores_of(output: Any) -> Any:
    """Returns the tensor of a model's output that is compared with targets: the output itself, or its ``logits``."""
    return output.get("logits", output) if isinstance(output, Mapping) else output


def _is_right(output: Any, targets: Any, *, shifted: bool) -> Tensor | None:
    """Returns which of the likeliest classes are the targets, or None if the targets are no classes of the output.

    ``shifted`` says that the output at each token is for the token after it, which is the next of the targets.
    """
    if not isinstance(output, Tensor) or not isinstance(targets, Tensor) or targets.is_floating_point():
        return None
    if output.shape[:-1] != targets.shape:
        return None
    classes = output.argmax(-1).cpu()
    return classes[:, :-1] == targets[:, 1:] if shifted else classes == targets


def _is_shifted(run: Run, data: Dataset) -> bool:
    """Returns whether the model itself shifts its labels, so that each token's target is the next token."""
    return isinstance(run.loss, ModelLoss) and bool(run.loss.shifted) and num_tokens(data) > 0


def _evaluate(
    world: World, config: TrainConfig, folder: Path, layout: Layout, num: int, split: Split, averages: bool
) -> dict[str, Any]:
    run, data, facts = _opened(world, config, folder, layout, split, averages=averages)
    num = min(num or len(data), len(data))
    right, count = 0, 0
    ignored = getattr(run.loss, "ignore_index", None)
    shifted = _is_shifted(run, data)

    def parts() -> Iterator[Microbatch]:
        nonlocal right, count
        for inputs, targets in _batches(data, num, config.batch, says=f"evaluated of {split}" * (world.rank == 0)):
            yield from run.shard([(inputs, targets)])
            matches = _is_right(scores_of(run.predict(inputs)), targets, shifted=shifted)
            if matches is not None:
                labels = targets[:, 1:] if shifted else targets
                counted = torch.ones_like(matches) if ignored is None else labels.cpu() != ignored
                right, count = right + int(matches[counted].sum()), count + int(counted.sum())

    loss = run.evaluate_all(parts()).item()
    return {"loss": loss, "accuracy": right / count if count else None, "samples": num, **facts}


def _predict(
    world: World, config: TrainConfig, folder: Path, layout: Layout, num: int, split: Split, averages: bool,
    to: Path | None,
) -> dict[str, Any]:  # fmt: skip
    run, data, facts = _opened(world, config, folder, layout, split, averages=averages)
    num = min(num, len(data))
    outputs, target_batches = [], []
    for inputs, targets in _batches(data, num, config.batch, says=f"predicted of {split}" * (world.rank == 0)):
        output = scores_of(run.predict(inputs))
        if not isinstance(output, Tensor):
            raise PlanError(
                "a model whose output is written is one that returns a tensor",
                given=type(output).__name__,
                allowed="a tensor, or an output with 'logits'",
                fix="return the tensor alone, or call run.predict in a script",
            )
        outputs.append(output.cpu())
        target_batches.append(targets)
        if output.shape[1:] != outputs[0].shape[1:]:
            raise PlanError(
                "the outputs of two batches have different shapes, and are joined to one tensor",
                given=f"{list(outputs[0].shape)} and {list(output.shape)}, in batches of {config.batch} samples",
                allowed="one shape but for the samples: batches that are collated to one length",
                fix=f"write --batch {num}, for one batch, or pad all samples alike",
            )
    whole, truth = torch.cat(outputs), torch.cat(target_batches)
    is_class = _is_right(whole, truth, shifted=False) is not None
    if to is not None and world.rank == 0:
        tensors = {"outputs": whole, "targets": truth}
        table = [WeightEntry((name,), tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]
        write_safetensors(to, table, zip(table, tensors.values(), strict=True))
    shown = whole.argmax(-1) if is_class else whole
    if is_class and _is_shifted(run, data):
        shown, truth = shown[:, :-1], truth[:, 1:]
    decode = getattr(data.dataset if isinstance(data, MapDataset) else data, "decode", None)
    texts = None
    if is_class and shown.dim() > 1 and callable(decode):
        rows = zip(shown.tolist(), truth.tolist(), strict=True)  # negative ids are targets that a loss ignores
        texts = [[str(decode([token for token in row if token >= 0])) for row in pair] for pair in rows]
    return {
        "texts": texts,
        "predictions": shown.tolist(), "targets": truth.tolist(), "samples": num,
        "file": str(to) if to is not None else None, **facts,
    }  # fmt: skip
