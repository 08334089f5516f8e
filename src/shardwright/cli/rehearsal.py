"""Makes the optional output of ``shardwright show``: memory of ranks, pipeline timelines, and what one module does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shardwright.comm.backends.fake import fake_world
from shardwright.comm.limits import Ranks
from shardwright.errors import PlanError
from shardwright.layout import Layout
from shardwright.parallelize import parallelize
from shardwright.parallelize.explain import explain_text, explained, first_rank_with
from shardwright.parallelize.planning import without_storage
from shardwright.parallelize.run import Run
from shardwright.plan.plan import Job
from shardwright.report.description import Description, timeline_data, timeline_of
from shardwright.report.memory import draw_memory, memory_data, memory_text, predicted_accounts
from shardwright.report.timeline_text import timeline_text
from shardwright.report.timelines import write_timelines
from shardwright.train.config import TrainConfig
from shardwright.train.measuring import measure, measure_accounts


def ledger_of(
    config: TrainConfig,
    job: Job,
    batch: tuple[Any, Any] | None,
    ranks: Ranks,
    png: Path | None,
    width: int,
    *,
    measured: bool,
) -> tuple[list[dict[str, Any]], str]:
    """Returns the ranks' predicted memory over a step as data and as text; with ``measured``, that of a real run too.

    Of more than eight ranks, the first of each pipeline stage is predicted. ``ranks`` says whether ranks are processes
    or threads. If ``png`` is given, a picture of the memory is written there. ``width`` is that of the text in
    characters.

    Raises: PlanError: ``batch`` is None: that of a user's own model, without its data, is unknown.
    """
    layout = Layout.parse(config.layout)
    if batch is None:
        raise PlanError(
            "the memory of a step of this model cannot be predicted: the shape of its batches is unknown",
            given=f"--memory with --model {config.model}",
            allowed="a model of your own with the data that it trains on, or mlp, attention, convnet and gpt",
            fix="give --data package.module:factory, as to train",
        )
    predicted = predicted_accounts(job, layout, batch, ranks)
    measured_accounts = dict(enumerate(measure_accounts(config, ranks, job.seconds))) if measured else None
    if png is not None:
        draw_memory(png, config.layout, predicted, measured_accounts)
    return memory_data(predicted, measured_accounts), memory_text(predicted, measured_accounts, width)


def timelines_of(
    description: Description,
    config: TrainConfig,
    job: Job,
    ranks: Ranks,
    path: Path | None,
    width: int,
    *,
    measured: bool,
) -> tuple[dict[str, Any], str]:
    """Draws a pipeline's predicted timeline into the file ``path``, if given, and returns the measured one.

    With ``measured``, a real run is timed: its timeline is drawn too, and the prediction is scaled to its total busy
    time. The result is then the measured timeline as data, and both timelines as text; else both are empty.

    Raises: PlanError: the layout has no pipeline.
    """
    predicted = timeline_of(description)
    if predicted is None:
        line = config.layout
        raise PlanError("there is no pipeline to draw", given=line, allowed="a layout with pp", fix="write pp2 mb4")
    drawn, data, text = [predicted], {}, ""
    if measured:
        seen = measure(config, ranks, job.seconds)
        drawn, data = [predicted.at_speed_of(seen), seen], {"measured": timeline_data(seen)}
        text = "\n\n" + timeline_text(drawn, width)
    if path is not None:
        write_timelines(path, drawn, title=config.layout)
    return data, text


def explanation_of(job: Job, layout: Layout, inputs: Any, path: str) -> tuple[dict[str, Any], str]:
    """Returns what the module named ``path`` holds, runs and sends under a layout, as data and as text.

    The rank described is the first that holds parameters of the module or, for a module without parameters, the first
    that calls it. ``inputs`` are those of a global batch.

    Raises: PlanError: the model has no such module.
    """

    def run_of(rank: int) -> Run:
        return parallelize(
            without_storage(job.model), layout, fake_world(rank, layout.num_ranks), loss=without_storage(job.loss),
            example=inputs, num_tokens=job.num_tokens, roles=job.roles, seconds=job.seconds,
        )  # fmt: skip

    run = run_of(0)
    rank = first_rank_with(run.plan, path)
    explanation = explained(run_of(rank) if rank else run, path)
    return explanation, explain_text(explanation)
