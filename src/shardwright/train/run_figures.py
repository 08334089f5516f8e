"""Writes into ``run.json``, for each part of a run, what its steps were predicted to take and what was measured."""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from shardwright import devices
from shardwright.comm.limits import Ranks
from shardwright.errors import CheckpointError, LayoutError, PlanError
from shardwright.file_locks import lock
from shardwright.garbage_collection import collection_paused
from shardwright.layout import Layout
from shardwright.parallelize.planning import job_for, make_plan, on_device
from shardwright.planner.predicted import by_price, cluster_for, cluster_here, predict_step
from shardwright.train.config import TrainConfig
from shardwright.train.data import first_sample_repeated
from shardwright.train.opening import inputs_of, opened
from shardwright.train.out_folder import LOCK
from shardwright.train.progress import say, write_json
from shardwright.train.run_file import RUN_FILE, parts_of
from shardwright.train.step_recording import LEAST_STEPS


def check_cluster(config: TrainConfig) -> None:
    """Raises PlanError if the config names a cluster that cannot be read, before any rank starts."""
    if config.cluster:
        cluster_for(config.cluster, Layout.parse(config.layout).num_ranks)


def settled_by_price(config: TrainConfig) -> TrainConfig:
    """Returns the config with ``tpN/auto`` of its layout replaced by what is fastest on the cluster that it names.

    Without a cluster, or without ``auto``, the config is returned unchanged: ``parallelize`` then chooses what sends
    least.

    Raises: LayoutError, PlanError: no mode fits the model, or the cluster or the data cannot be read.
    """
    layout = Layout.parse(config.layout)
    factor = layout.factor("tp")
    if not config.cluster or factor is None or factor.option("auto") is None:
        return config
    model, loss, _, data = opened(config)
    job = job_for(model, loss, layout, inputs_of(data, config.batch), config.num_tokens, config.roles)
    return replace(config, layout=str(make_plan(by_price(job, layout, config.cluster), layout)[0].layout))


def note_figures(out: Path, **figures: Any) -> None:
    """Adds entries, such as ``predicted`` or ``measured``, to ``run.json`` in ``out``, for the run's last start.

    The caller holds the lock of the folder. Raises: OSError: ``run.json`` cannot be read or written. ValueError: it is
    damaged.
    """
    kept = json.loads((out / RUN_FILE).read_text())
    kept.update(figures)
    if kept.get("parts"):
        kept["parts"][-1].update(figures)
    write_json(out / RUN_FILE, kept)


def predicted_step(config: TrainConfig, ranks: Ranks, cluster: str | None = None) -> dict[str, Any]:
    """Returns what a step of a run with these options is predicted to take, as ``run.json`` has it.

    ``cluster`` replaces that of the config. Without either, the cluster that is found here is used; without any, the
    seconds are not predicted.

    Raises: LayoutError, PlanError: the model cannot have the layout or does not run on the meta device, or the cluster
        or the data cannot be read.
    """
    device_type = devices.wanted() if ranks == "processes" else "cpu"
    layout = Layout.parse(config.layout)
    text = cluster or config.cluster or cluster_here()
    model, loss, _, data = opened(config)
    batch = on_device(first_sample_repeated(data, config.batch), torch.device("meta"))
    job = job_for(model, loss, layout, batch[0], config.num_tokens, config.roles)
    if config.cluster:  # the run's stages were cut by these seconds
        job = job._replace(seconds=by_price(job, layout, config.cluster).seconds)
    hardware = cluster_for(text, layout.num_ranks) if text else None
    options = {"lr": config.lr, "betas": (0.9, 0.95), "weight_decay": config.weight_decay, "fused": True}
    with collection_paused():
        return predict_step(
            job, layout, batch, hardware, device_type=device_type, ranks=ranks, optimizer=torch.optim.AdamW, **options
        )


def note_predicted(config: TrainConfig, out: Path, ranks: Ranks, last_step: int) -> None:
    """Writes into ``run.json`` what a step of the run's last start, up to ``last_step``, was predicted to take.

    Under ``torchrun`` the process of rank 0 does it. Nothing is predicted after too few steps to be measured. A model
    that cannot be predicted gives a warning and no error.
    """
    if os.environ.get("RANK", "0") != "0":
        return
    try:
        first_step = parts_of(out)[-1]["first_step"]
        if last_step - first_step < LEAST_STEPS:
            return
        prediction = predicted_step(config, ranks)
    except Exception as problem:  # any error, also of the user's model or dataset: the run itself has ended well
        what = (
            problem.what
            if isinstance(problem, CheckpointError | LayoutError | PlanError)
            else f"{type(problem).__name__}: {problem}"
        )
        say(f"warning: the run's steps are not predicted: {what}")
        return
    # the run's lock is released, so another run may write to the folder by now; in that case nothing is written here
    with suppress(OSError, ValueError, KeyError, CheckpointError), (out / LOCK).open("r+") as file:
        if lock(file) and parts_of(out)[-1]["first_step"] == first_step:
            note_figures(out, predicted=prediction)
