"""Checks, before ranks start, that a model takes the data and that its parameters fit into this machine's memory."""

from __future__ import annotations

import inspect
import os
from typing import Any

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright import devices
from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.errors import PlanError
from shardwright.formatting import first_line, format_bytes
from shardwright.layout import Layout
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.batches import unknown_names
from shardwright.parallelize.planning import on_device, rows, structural_copy
from shardwright.runtime.empty_batches import support_empty_batches
from shardwright.train.config import TrainConfig
from shardwright.train.data import Dataset, SampleOrder, global_batch

_SMALL = 2**28


def check_room(model: nn.Module, layout: Layout) -> None:
    """Raises PlanError if the parameters need more bytes than this machine and its accelerators have.

    Nothing is checked under a launcher such as ``torchrun``, whose ranks may be on several machines, or if the layout
    offloads state.
    """
    dp = layout.factor("dp")
    if "WORLD_SIZE" in os.environ or (dp is not None and dp.option("offload") is not None):
        return
    needed = sum(parameter.nbytes for parameter in model.parameters())
    room = psutil.virtual_memory().total + devices.total_bytes()
    if needed > room:
        raise PlanError(
            "the model does not fit on this machine",
            given=f"parameters of {format_bytes(needed)}, {format_bytes(room)} of memory",
            allowed="a model that fits; show and plans take any",
            fix="set smaller sizes",
        )


def first_samples(config: TrainConfig, data: Dataset) -> tuple[Any, Any]:
    """Returns the first two samples as a batch, or only the first one if the batches of ``config`` have no more.

    Two samples are taken because a BatchNorm of vectors has no variance over a single one.
    """
    return global_batch(data, range(min(2, config.batch, len(data))))


def check_takes(
    config: TrainConfig, model: nn.Module, loss: nn.Module, data: Dataset, *, builds_large: bool = True
) -> None:
    """Raises PlanError if a forward of a user's own model, or its loss, fails on the first samples of the data.

    The forward runs on the meta device. A model of up to 256 MiB is also built from ``config`` and tried with values,
    which show, for example, a token outside of the vocabulary. With ``builds_large``, a larger model is built and tried
    too if it fails on the meta device, since some code reads values. Also with ``builds_large``, a batch that leaves a
    rank without samples is refused if the model cannot compute on no samples.
    """
    batch, num = first_samples(config, data), num_shares(Layout.parse(config.layout))
    order = SampleOrder(len(data), config.batch, config.seed)
    least = min(config.batch, len(data))
    if config.last_step >= order.num_steps_per_epoch:  # the last batch of an epoch may be smaller
        least = len(data) % config.batch or least
    is_large = sum(p.nbytes for p in model.parameters()) > _SMALL
    failure = failure_on_meta(model, loss, batch, guesses=is_large and not builds_large)
    none = _failure_on_none(model, loss, batch) if failure is None and builds_large and least < num else None
    if none is not None:
        sizes = range(num, min(len(data), config.batch + 2 * num) + 1)
        fitting = [size for size in sizes if len(data) % size == 0 or len(data) % size >= num]
        near = min(fitting, key=lambda size: abs(size - config.batch), default=num)
        raise PlanError(
            "a batch leaves ranks without a sample, and the model cannot compute on none",
            given=f"{least} of {len(data)} samples in a batch, for {num} shares under {config.layout}: "
            f"{first_line(none)}",
            allowed=f"{num} samples or more in each batch, the last of an epoch too",
            fix=f"write --batch {near}" if len(data) >= num else f"use a layout of up to {len(data)} shares",
        )
    if failure is None and is_large:
        return
    if not is_large or builds_large:
        on_meta, (real, _, _) = failure, config.build()
        failure = _failure(real, loss, batch)
        if on_meta is None and not isinstance(failure, IndexError):
            return  # torch may have an operator for the ranks' devices that it lacks for this device
    if failure is None:
        return
    if isinstance(failure, PlanError) and isinstance(loss, ModelLoss):
        fix = f"{failure.fix}; a factory named to the command returns the pair of its model and this loss"
        raise PlanError(failure.what, given=failure.given, allowed=failure.allowed, fix=fix) from failure
    shapes = tree_map_only(Tensor, lambda tensor: f"{list(tensor.shape)} of {tensor.dtype}", batch[0])
    raise PlanError(
        f"the model '{config.model}' cannot take the data '{config.data}'",
        given=f"{shapes}: {type(failure).__name__}: {failure}".splitlines()[0],
        allowed="data whose samples the model and the loss take",
        fix=_fix(model, batch[0]),
    ) from failure


def failure_on_meta(
    model: nn.Module, loss: nn.Module, batch: tuple[Any, Any], *, guesses: bool = False
) -> Exception | None:
    """Returns the exception of a forward of ``model`` and ``loss`` on the meta device; None if there is none.

    With ``guesses``, code that reads values, such as whether a mask is all ones, runs once more as a plan runs it:
    every condition on values counts as true.
    """
    on_meta_device = on_device(batch, torch.device("meta"))
    failure = _failure(model, loss, on_meta_device)
    if failure is None or not guesses:
        return failure
    with on_meta(model, guess=True):
        return _failure(model, loss, on_meta_device)


def _failure_on_none(model: nn.Module, loss: nn.Module, batch: tuple[Any, Any]) -> Exception | None:
    """Returns the exception of a forward without samples, or None; layers are made to accept none, as in a run."""
    own = structural_copy(model)
    support_empty_batches(own)
    return failure_on_meta(own, loss, rows(batch, 0, 0))


def _failure(model: nn.Module, loss: nn.Module, batch: tuple[Any, Any]) -> Exception | None:
    inputs, targets = batch
    try:
        with torch.no_grad():
            loss(call_model(model, inputs), targets)
    except Exception as failure:  # any Python code may run here
        return failure
    return None


def _fix(model: nn.Module, inputs: Any) -> str:
    """Returns, for an error, what to do so that the samples become inputs that the model takes."""
    names = list(inspect.signature(model.forward).parameters)
    if isinstance(inputs, dict) and (strange := unknown_names(model, inputs)):
        return f"rename {strange[0]!r} in the samples to an argument of the forward: {', '.join(names)}; or give pairs"
    if not isinstance(inputs, dict) and {"input_ids", "labels"} <= {*names}:
        return "give --data package.module:factory of a dataset of dicts with input_ids and labels, as the model takes"
    return "give --data and --seq that fit, or call shardwright.verify and parallelize with batches of your own"
