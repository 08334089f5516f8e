"""Measures the timeline or the memory of a real training step, the time of each layer, and each rank's peak memory.

Layers are timed before ranks train, so that a pipeline's stages can be balanced by their times.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType

import psutil
import torch

from shardwright import devices
from shardwright.analysis.costs import time_layers
from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks
from shardwright.comm.world import World
from shardwright.layout import Layout, has_stages
from shardwright.ledger.account import measure_memory
from shardwright.ledger.tracking import Account
from shardwright.parallelize import parallelize
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import job_for, on_device, rows
from shardwright.parallelize.run import Run
from shardwright.planner.predicted import by_price
from shardwright.rng import without_values
from shardwright.runtime.executor import Microbatch
from shardwright.runtime.timeline import Timeline
from shardwright.train.config import TrainConfig
from shardwright.train.data import Order, global_batch, open_data

Seconds = Mapping[str, float]
NOT_MEASURED: Seconds = MappingProxyType({})

WARM_UP = 3
"""The number of steps that are taken before the measured step."""


def layer_seconds(config: TrainConfig, device: torch.device | None = None) -> dict[str, float]:
    """Returns the measured forward seconds of each module, by name, for one microbatch of one model replica.

    The result is empty unless the config has ``measured_costs`` and its layout a pipeline. The whole model is built
    with values on ``device``, by default this machine's accelerator if it has one.
    """
    layout = Layout.parse(config.layout)
    if not config.measured_costs or not has_stages(layout):
        return {}
    if device is None:
        device = devices.default()
    model, _, model_config = config.build()
    data = open_data(config.data, seq=config.seq, model=model_config)
    inputs, _ = global_batch(data, Order(len(data), config.batch, config.seed).batch(0))
    microbatch = rows(inputs, 0, -(-config.batch // num_shares(layout)))
    return time_layers(model.to(device), on_device(microbatch, device))


def agreed_seconds(config: TrainConfig, world: World) -> dict[str, float]:
    """Returns the forward seconds of each module that rank 0 has measured by :func:`layer_seconds`, on every rank.

    All ranks call it. Without ``measured_costs`` they are those predicted for the config's cluster; without either the
    result is empty and nothing is sent.

    Traffic: otherwise, two all-gathers, of the lengths of texts and of the texts.
    """
    if config.measured_costs:
        mine = layer_seconds(config, world.device) if world.rank == 0 else {}
    elif config.cluster and has_stages(Layout.parse(config.layout)):
        mine = predicted_seconds(config) if world.rank == 0 else {}
    else:
        return {}
    found: dict[str, float] = gather_json(world.everyone(), mine)[0]
    return found


def predicted_seconds(config: TrainConfig) -> dict[str, float]:
    """Returns the forward seconds of each module that are predicted for the config's cluster, by name."""
    layout = Layout.parse(config.layout)
    with without_values():
        model, loss, model_config = config.build()
    inputs, _ = open_data(config.data, seq=config.seq, model=model_config).sample(0)
    job = job_for(model, loss, layout, inputs.expand(config.batch, *inputs.shape), config.num_tokens, config.roles)
    return dict(by_price(job, layout, config.cluster).seconds)


def measure(config: TrainConfig, ranks: Ranks = "processes", seconds: Seconds = NOT_MEASURED) -> Timeline:
    """Starts ranks, trains ``WARM_UP`` steps, and returns the measured timeline of the next step on rank 0's pipeline.

    The layout is that of ``config``. ``seconds`` are times of layers from :func:`layer_seconds`, by which the model is
    cut into stages. Errors are those of :func:`~shardwright.comm.launch.launch`.
    """
    return launch(_timeline, Layout.parse(config.layout), config, dict(seconds), ranks=ranks)[0]


def measure_accounts(config: TrainConfig, ranks: Ranks = "processes", seconds: Seconds = NOT_MEASURED) -> list[Account]:
    """Starts ranks, trains ``WARM_UP`` steps, and returns the measured memory of each rank over the next one, by rank.

    Optimizer state is included. The layout is that of ``config``. ``seconds`` are times of layers from
    :func:`layer_seconds`, by which the model is cut into stages. Errors are those of
    :func:`~shardwright.comm.launch.launch`.
    """
    return list(launch(_account, Layout.parse(config.layout), config, dict(seconds), ranks=ranks))


def _timeline(world: World, config: TrainConfig, seconds: Seconds) -> Timeline:
    run, _, batch = _warmed_up(world, config, seconds)
    return run.timeline(batch)


def _account(world: World, config: TrainConfig, seconds: Seconds) -> Account:
    run, optimizer, batch = _warmed_up(world, config, seconds)
    return measure_memory(run, batch, optimizer)


def _warmed_up(world: World, config: TrainConfig, seconds: Seconds) -> tuple[Run, torch.optim.Optimizer, Microbatch]:
    """Returns a run after ``WARM_UP`` steps, its optimizer, and this rank's part of the next batch."""
    with without_values():
        plain, loss, model_config = config.build()
    run = parallelize(
        plain, config.layout, world, loss=loss, seed=config.seed, num_tokens=config.num_tokens, roles=config.roles,
        example=config.example(model_config), seconds=seconds, offload_folder=config.offload_folder or None,
    )  # fmt: skip
    data = open_data(config.data, seq=config.seq, model=model_config)
    order = Order(len(data), config.batch, config.seed)
    optimizer = run.optimizer(torch.optim.AdamW, lr=config.lr)
    batches = run.shard(global_batch(data, order.batch(step)) for step in range(WARM_UP + 1))
    for _ in range(WARM_UP):
        run.step(next(batches))
        optimizer.step()
    return run, optimizer, next(batches)


def peak_bytes(everyone: Axis) -> list[int]:
    """Returns the peak memory of every rank so far, in bytes and rank order.

    On CPUs it is the peak of the rank's process, on an accelerator that of the device's allocator. All ranks call it.

    Traffic: one all-gather.
    """
    device = everyone.device
    peak = devices.peak_bytes(device) if device.type not in devices.HOST else _peak_of_process()
    mine = torch.tensor([peak], dtype=torch.int64, device=device)
    found: list[int] = everyone.for_strategy("progress").all_gather(mine).tolist()
    return found


def _peak_of_process() -> int:
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
