"""Checks, before ranks start, that a model takes the data and that its parameters fit into this machine's memory."""

from __future__ import annotations

import os
from contextlib import suppress

import psutil
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shardwright import devices
from shardwright.analysis.module_calls import call_model
from shardwright.errors import PlanError
from shardwright.formatting import format_bytes
from shardwright.layout import Layout
from shardwright.models.model_loss import ModelLoss
from shardwright.parallelize.planning import on_device
from shardwright.train.config import TrainConfig
from shardwright.train.data import Dataset, global_batch


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


def check_takes(config: TrainConfig, model: nn.Module, loss: nn.Module, data: Dataset) -> None:
    """Raises PlanError if a forward of a user's own model, or its loss, fails on the first sample of the data.

    The forward runs on the meta device. If it fails there, the model is built from ``config`` again and tried with
    values, because some code reads values.
    """
    batch = global_batch(data, range(1))
    with suppress(Exception), torch.no_grad():
        inputs, targets = on_device(batch, torch.device("meta"))
        loss(call_model(model, inputs), targets)
        return
    real, _, _ = config.build()
    inputs, targets = batch
    try:
        with torch.no_grad():
            loss(call_model(real, inputs), targets)
    except Exception as failure:  # any Python code may run here
        if isinstance(failure, PlanError) and isinstance(loss, ModelLoss):
            fix = f"{failure.fix}; a factory named to the command returns the pair of its model and this loss"
            raise PlanError(failure.what, given=failure.given, allowed=failure.allowed, fix=fix) from failure
        shapes = tree_map_only(Tensor, lambda each: f"{list(each.shape)} of {each.dtype}", inputs)
        raise PlanError(
            f"the model '{config.model}' cannot take the data '{config.data}'",
            given=f"{shapes}: {type(failure).__name__}: {failure}".splitlines()[0],
            allowed="data whose samples the model and the loss take",
            fix="give --data and --seq that fit, or call shardwright.verify and parallelize with batches of your own",
        ) from failure
