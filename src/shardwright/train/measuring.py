"""What really happened: some steps of a run, and of the last what stages did when, or what every rank held."""

from __future__ import annotations

import torch

from shardwright.comm import World, launch
from shardwright.comm.launch import Ranks
from shardwright.draws import without_values
from shardwright.layout import Layout
from shardwright.ledger import Account, measure_memory
from shardwright.parallelize import Run, parallelize
from shardwright.pipeline import Microbatch, Timeline
from shardwright.train.config import TrainConfig
from shardwright.train.data import Order, global_batch, open_data

WARM_UP = 3
"""Steps before the one that is measured."""


def measure(config: TrainConfig, ranks: Ranks = "processes") -> Timeline:
    """The timeline of one step under ``config.layout``, of the pipeline that rank 0 is in."""
    return launch(_rank, Layout.parse(config.layout), config, ranks=ranks)[0]


def measure_accounts(config: TrainConfig, ranks: Ranks = "processes") -> list[Account]:
    """What every rank holds over one step under ``config.layout``, the optimizer's with it."""
    return list(launch(_account, Layout.parse(config.layout), config, ranks=ranks))


def _rank(world: World, config: TrainConfig) -> Timeline:
    run, _, batch = _warmed_up(world, config)
    return run.timeline(batch)


def _account(world: World, config: TrainConfig) -> Account:
    run, optimizer, batch = _warmed_up(world, config)
    return measure_memory(run, batch, optimizer)


def _warmed_up(world: World, config: TrainConfig) -> tuple[Run, torch.optim.Optimizer, Microbatch]:
    """A run that has taken some steps, and the batch of the next."""
    with without_values():
        plain, loss, model_config = config.build()
    run = parallelize(
        plain, config.layout, world, loss=loss, seed=config.seed, num_tokens=config.num_tokens, roles=config.roles,
        example=config.example(model_config), offload_folder=config.offload_folder or None,
    )  # fmt: skip
    data = open_data(config.data, seq=config.seq, model=model_config)
    order = Order(len(data), config.batch, config.seed)
    optimizer = run.optimizer(torch.optim.AdamW, lr=config.lr)
    for step in range(WARM_UP):
        (batch,) = run.shard([global_batch(data, order.batch(step))])
        run.step(batch)
        optimizer.step()
    (batch,) = run.shard([global_batch(data, order.batch(WARM_UP))])
    return run, optimizer, batch
