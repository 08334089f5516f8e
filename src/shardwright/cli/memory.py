"""What ``show --memory`` does: the memory ledger of the ranks to list, predicted and, with --measured, measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.comm.launch import Ranks
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.plan.plan import Job
from shardwright.report.memory import draw_memory, memory_data, memory_text, predicted_accounts
from shardwright.train.config import TrainConfig
from shardwright.train.measuring import measure_accounts


def ledger_of(
    config: TrainConfig, job: Job, model_config: Any, ranks: Ranks, png: Path | None, width: int, *, measured: bool
) -> tuple[list[dict[str, Any]], str]:
    """Returns the ledger as data and as text, and draws it into ``png``; with ``measured``, measured on ``ranks`` too.

    Raises: PlanError: the model is a user's own factory, so the shape of its batches is unknown.
    """
    batch, layout = config.example_batch(model_config), Layout.parse(config.layout)
    if batch is None:
        raise PlanError(
            "the memory of a step of this model cannot be predicted: the shape of its batches is unknown",
            given=f"--memory with --model {config.model}",
            allowed="the models mlp, attention, convnet and gpt",
            fix="call shardwright.ledger.predict_memory(job, layout, rank, batch) with a batch of your own",
        )
    predicted = predicted_accounts(job, layout, batch, ranks)
    found = dict(enumerate(measure_accounts(config, ranks, job.seconds))) if measured else None
    if png is not None:
        draw_memory(png, config.layout, predicted, found)
    return memory_data(predicted, found), memory_text(predicted, found, width)
