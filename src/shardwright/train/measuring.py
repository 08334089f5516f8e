"""Measures the timeline or the memory of a real training step, the time of each layer, and each rank's peak memory.

Layers are timed before ranks train, so that a pipeline's stages can be balanced by their times.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

import psutil
import torch

from shardwright import devices
from shardwright.analysis.chunks.costs import time_layers
from shardwright.comm.agreement import gather_json
from shardwright.comm.axis import Axis
from shardwright.comm.launch import launch
from shardwright.comm.limits import Ranks
from shardwright.comm.world import World
from shardwright.layout import Layout, has_stages
from shardwright.ledger.account import measure_memory
from shardwright.ledger.tracking import MemoryAccount
from shardwright.parallelize import parallelize
from shardwright.parallelize.auto import num_shares
from shardwright.parallelize.planning import job_for, on_device, rows
from shardwright.parallelize.run import Run
from shardwright.planner.predicted import by_price
from shardwright.runtime.executor import Microbatch
from shardwright.runtime.timeline import Timeline
from shardwright.train.config import TrainConfig
from shardwright.train.data import SampleOrder, global_batch
from shardwright.train.opening import inputs_of, opened

SecondsByLayer = Mapping[str, float]
NOT_MEASURED: SecondsByLayer = MappingProxyType({})

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
    model, _, _, data = opened(config, with_values=True)
    inputs, _ = global_batch(data, SampleOrder(len(data), config.batch, config.seed).batch(0))
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
    seconds: dict[str, float] = gather_json(world.everyone(), mine)[0]
    return seconds


def predicted_seconds(config: TrainConfig) -> dict[str, float]:
    """Returns the forward seconds of each module that are predicted for the config's cluster, by name."""
    layout = Layout.parse(config.layout)
    model, loss, _, data = opened(config)
    job = job_for(model, loss, layout, inputs_of(data, config.batch), config.num_tokens, config.roles)
    return dict(by_price(job, layout, config.cluster).seconds)


def measure(config: TrainConfig, ranks: Ranks = "processes", seconds: SecondsByLayer = NOT_MEASURED) -> Timeline:
    """Starts ranks, trains ``WARM_UP`` steps, and returns the measured timeline of the next step on rank 0's pipeline.

    The layout is that of ``config``. ``seconds`` are times of layers from :func:`layer_seconds`, by which the model is
    cut into stages. Errors are those of :func:`~shardwright.comm.launch.launch`.
    """
    return launch(_timeline, Layout.parse(config.layout), config, dict(seconds), ranks=ranks)[0]


def measure_accounts(
    config: TrainConfig, ranks: Ranks = "processes", seconds: SecondsByLayer = NOT_MEASURED
) -> list[MemoryAccount]:
    """Starts ranks, trains ``WARM_UP`` steps, and returns the measured memory of each rank over the next one, by rank.

    Optimizer state is included. The layout is that of ``config``. ``seconds`` are times of layers from
    :func:`layer_seconds`, by which the model is cut into stages. Errors are those of
    :func:`~shardwright.comm.launch.launch`.
    """
    return list(launch(_account, Layout.parse(config.layout), config, dict(seconds), ranks=ranks))


def _timeline(world: World, config: TrainConfig, seconds: SecondsByLayer) -> Timeline:
    run, _, batch = _warmed_up(world, config, seconds)
    return run.timeline(batch)


def _account(world: World, config: TrainConfig, seconds: SecondsByLayer) -> MemoryAccount:
    run, optimizer, batch = _warmed_up(world, config, seconds)
    return measure_memory(run, batch, optimizer)


def _warmed_up(
    world: World, config: TrainConfig, seconds: SecondsByLayer
) -> tuple[Run, torch.optim.Optimizer, Microbatch]:
    """Returns a run after ``WARM_UP`` steps, its optimizer, and this rank's part of the next batch."""
    plain, loss, _, data = opened(config)
    run = parallelize(
        plain, config.layout, world, loss=loss, seed=config.seed, num_tokens=config.num_tokens, roles=config.roles,
        example=inputs_of(data, config.batch), seconds=seconds, offload_folder=config.offload_folder or None,
    )  # fmt: skip
    order = SampleOrder(len(data), config.batch, config.seed)
    optimizer = run.optimizer(torch.optim.AdamW, lr=config.lr)
    batches = run.shard(global_batch(data, order.batch(step)) for step in range(WARM_UP + 1))
    for _ in range(WARM_UP):
        run.step(next(batches))
        optimizer.step()
    return run, optimizer, next(batches)


class RankMemory(NamedTuple):
    """Bytes of memory of every rank, in rank order: ``peak``, the most so far, and ``held``, the memory held now."""

    peak: list[int]
    held: list[int]


def step_usage(run: Run, everyone: Axis) -> tuple[RankMemory, float | None]:
    """Returns the memory of every rank, and the bubble of the last step, a share from 0 to 1.

    The bubble is the share of the ranks' time in which no forward or backward of theirs ran, from the start of the
    first to the end of the last. It is None without pipeline stages, and on accelerators, since the host does not wait
    for their work. All ranks call it.

    Traffic: one all-gather of four numbers a rank.
    """
    busy_s, whole_s = run.busy_seconds()
    mine = [*_memory_here(everyone.device), round(busy_s * 1e6), round(whole_s * 1e6)]
    peak, held, busy, whole = _of_ranks(mine, everyone)
    known = has_stages(run.plan.layout) and everyone.device.type in devices.HOST and max(whole) > 0
    return RankMemory(peak, held), max(0.0, 1 - sum(busy) / len(busy) / max(whole)) if known else None


def memory_of_ranks(everyone: Axis) -> RankMemory:
    """Returns the peak memory of every rank so far, and the memory that it holds now, in bytes.

    On CPUs it is the memory of the rank's process, on an accelerator that of the device's allocator. All ranks call it.

    Traffic: one all-gather of two numbers a rank.
    """
    peak, held = _of_ranks([*_memory_here(everyone.device)], everyone)
    return RankMemory(peak, held)


def _of_ranks(mine: list[int], everyone: Axis) -> list[list[int]]:
    """Returns, for each place in ``mine``, the numbers that all ranks have there; all ranks call it."""
    numbers = torch.tensor([mine], dtype=torch.int64, device=everyone.device)
    columns: list[list[int]] = everyone.for_strategy("progress").all_gather(numbers).T.tolist()
    return columns


@lru_cache(maxsize=1)
def _process(number: int) -> psutil.Process:
    """Returns psutil's handle of process ``number``, cached because making one takes longer than using it."""
    return psutil.Process(number)


def _memory_here(device: torch.device) -> tuple[int, int]:
    """Returns the most bytes that this rank has held so far, and the bytes that it holds now."""
    if device.type not in devices.HOST:
        return devices.peak_bytes(device), devices.held_bytes(device)
    memory = _process(os.getpid()).memory_info()
    if sys.platform == "win32":
        return int(memory.peak_wset), int(memory.rss)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return max(peak, memory.rss), int(memory.rss)
