"""``shardwright plan --replay RUN``: says where the predictions of a run's steps were off, and prints anchors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from shardwright.cli.options import Shared
from shardwright.comm.limits import Ranks
from shardwright.errors import PlanError
from shardwright.formatting import format_bytes
from shardwright.planner.predicted import compared


def _seconds(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1000:.3g} ms"


TABLES: Mapping[str, tuple[str, Any]] = {
    "waterfall": ("seconds by part", _seconds),
    "memory_by_kind": ("memory by kind", format_bytes),
    "traffic_by_axis": ("sent by axis", format_bytes),
}
"""For each table of ``predicted`` and ``measured``: its heading, and how its numbers are written."""


def check_no_others(options: Sequence[str]) -> None:
    """Raises PlanError if there are ``options`` that a replay does not read."""
    if options:
        raise PlanError(
            "a replay takes the options of the run",
            given=", ".join(options),
            allowed="--replay RUN with --cluster, --model, --data and --json",
            fix="leave out the others",
        )


def replayed(folder: Path, shared: Shared, cluster: str | None) -> tuple[dict[str, Any], str]:
    """Predicts the steps of the run in ``folder`` again; returns how far off they are, as data and as text.

    A part is the steps from one start of the run to the next. ``shared`` may name the run's ``model`` and ``data``, and
    must name them if they are factories, since a folder alone runs no code. ``cluster`` replaces the cluster by which
    the run was predicted. The data has the run's parts with the predicted and measured figures, by how much each is
    off, and the ``anchor`` that ``plan --anchor`` takes.

    Raises: CheckpointError: there is no run, or its model or data must be named again. PlanError: no part of it was
        measured, an option is given that the run has already, or a part cannot be predicted.
    """
    from shardwright.train.config import TrainConfig, read_options
    from shardwright.train.run_figures import predicted_step
    from shardwright.train.run_file import RUN_FILE, check_named, parts_of, read_run

    check_no_others([f"--{name.strip('_').replace('_', '-')}" for name in sorted(set(shared) - {"model", "data"})])
    named = {key: shared.get(key) for key in ("model", "data")}
    model = read_run(folder, **named).get("model", TrainConfig.model)
    parts = [part for part in parts_of(folder) if _is_measured(part.get("measured"))]
    if not parts:
        raise PlanError(
            f"no part of the run in '{folder}' was measured",
            given="run.json without measured seconds of a step",
            allowed="a run of this version that has ended or was stopped after a few steps",
            fix="train a few steps more with --resume, or name another run",
        )
    comparisons, texts = [], []
    for part in parts:
        options = read_options(part["options"], given_in=RUN_FILE)
        check_named(options, f"a part in {RUN_FILE} of '{folder}'", **named)  # a part has options of its own
        config = TrainConfig(**{**options, "model": model, "stop_at": 0})
        ranks: Ranks = "threads" if part.get("ranks") == "threads" else "processes"
        predicted = predicted_step(config, ranks, cluster)
        measured = part["measured"]
        comparisons.append(
            {
                "first_step": part["first_step"],
                "layout": config.layout,
                "cluster": cluster or config.cluster or None,
                "predicted": predicted,
                "measured": measured,
                "off": compared(predicted, measured),
                "anchor": f"{config.layout}={measured['step_s']:.6g}",
            }
        )
        texts.append("\n".join(_lines(comparisons[-1])))
    return {"run": str(folder), "parts": comparisons}, "\n\n".join(texts)


def _is_measured(measured: Any) -> bool:
    return isinstance(measured, Mapping) and isinstance(measured.get("step_s"), int | float) and measured["step_s"] > 0


def _lines(part: Mapping[str, Any]) -> Iterator[str]:
    """Yields the lines of one part: each figure predicted and measured, and by how much the prediction is off."""
    predicted, measured, off = part["predicted"], part["measured"], part["off"]
    on = f" on {part['cluster']}" if part["cluster"] else ""
    yield f"from step {part['first_step']}: {part['layout']}{on}"
    yield f"  {'':24}{'predicted':>14}{'measured':>14}   predicted is"
    step = predicted["step_s"]
    if step is None:
        yield "  seconds are not predicted: name a --cluster, such as a file that shardwright calibrate has written"
    yield _row("step", step, measured["step_s"], off.get("step_s"), _seconds)
    for table, (heading, written) in TABLES.items():
        names = dict.fromkeys([*predicted[table], *measured.get(table, {})])
        if names:
            yield f"  {heading}"
        for name in names:
            said, seen, by = (figures.get(table, {}).get(name) for figures in (predicted, measured, off))
            yield _row(f"  {name}", said, seen, by, written)
    yield f"  --anchor '{part['anchor']}'"


def _row(name: str, predicted: float | None, measured: float | None, off: float | None, written: Any) -> str:
    numbers = [written(figure) if figure is not None else "" for figure in (predicted, measured)]
    said = "" if off is None else "equal" if abs(off) < 5e-5 else f"{abs(off):.1%} {'more' if off > 0 else 'less'}"
    return f"  {name:24}{numbers[0]:>14}{numbers[1]:>14}   {said}".rstrip()
