"""What ``show --memory`` does: the ledger of the ranks worth listing, rehearsed, and measured where asked for."""

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
    config: TrainConfig, job: Job, model_config: Any, ranks: Ranks | None, png: Path | None, width: int
) -> tuple[list[dict[str, Any]], str]:
    """The ledger as data and as text, and drawn into ``png``; measured on ``ranks``, unless there are none.

    Raises: PlanError: a model of one's own, of whose batches nobody knows.
    """
    batch, layout = config.example_batch(model_config), Layout.parse(config.layout)
    if batch is None:
        raise PlanError(
            "nobody knows what a batch of this model looks like, so no step can be rehearsed",
            given=f"--memory with --model {config.model}",
            allowed="the models mlp, attention, convnet and gpt",
            fix="call shardwright.ledger.predict_memory(job, layout, rank, batch) with a batch of your own",
        )
    predicted = predicted_accounts(job, layout, batch)
    measured = dict(enumerate(measure_accounts(config, ranks, job.seconds))) if ranks is not None else None
    if png is not None:
        draw_memory(png, config.layout, predicted, measured)
    return memory_data(predicted, measured), memory_text(predicted, measured, width)
