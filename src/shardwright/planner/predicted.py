"""Predicts a run's step as plain data for ``run.json``: seconds by part, memory by kind, and bytes sent by axis."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

from shardwright.axes import mesh_axes
from shardwright.comm.limits import Ranks
from shardwright.cost.cluster import Cluster
from shardwright.layout import Layout, has_stages
from shardwright.ledger.account import predict_memory
from shardwright.parallelize.planning import num_rows
from shardwright.plan.plan import Job
from shardwright.planner.layer_seconds import predicted_layer_seconds
from shardwright.planner.memory import memory_by_stage
from shardwright.planner.outline import ModelPlans
from shardwright.planner.price import Pricing, traffic_by_stage
from shardwright.planner.records import record_layout

HERE = "here.toml"
"""The cluster file that is used where none is named: what ``shardwright calibrate --out here.toml`` writes."""


def cluster_here(folder: Path = Path()) -> str:
    """Returns the cluster by which a run is predicted if none is named; "" if there is none.

    It is the file ``here.toml`` of the folder.
    """
    return str(folder / HERE) if (folder / HERE).is_file() else ""


def cluster_for(text: str, num_ranks: int) -> Cluster:
    """Returns the cluster that ``text`` describes, with as many ranks as a layout has. Raises: as ``Cluster.parse``."""
    cluster = Cluster.parse(text, num_ranks)
    return cluster if cluster.num_ranks == num_ranks else cluster.with_ranks(num_ranks)


def by_price(job: Job, layout: Layout, cluster: str) -> Job:
    """Returns the job with a cluster and the forward seconds of its layers on it.

    By these, stages are cut and ``pp/auto`` and ``tp/auto`` choose. Seconds that were measured stay; else they are
    predicted if the layout has pipeline stages.

    Raises: PlanError, LayoutError: the cluster cannot be read.
    """
    parsed_cluster = cluster_for(cluster, layout.num_ranks)
    seconds = job.seconds or (predicted_layer_seconds(job, layout, parsed_cluster) if has_stages(layout) else {})
    return job._replace(cluster=parsed_cluster, seconds=seconds)


def predict_step(
    job: Job, layout: Layout, batch: tuple[Any, Any], cluster: Cluster | None, *, device_type: str, ranks: Ranks,
    optimizer: Any, **options: Any,
) -> dict[str, Any]:  # fmt: skip
    """Returns what a step of a run is predicted to take, as plain data for JSON.

    ``step_s`` are its seconds and ``waterfall`` the same by part, None and {} without a ``cluster``.
    ``memory_by_kind`` has the bytes at the peak of the rank that holds most, the first one of its pipeline stage, and
    ``traffic_by_axis`` the payload bytes of the stage whose ranks send most; both need no cluster. ``job`` is for
    batches like ``batch``; only shapes and dtypes of it are read. Ranks are processes or threads on devices of
    ``device_type``, and ``optimizer`` is a class that gets ``options``.

    Raises: LayoutError, PlanError: the model cannot have the layout, or does not run on the meta device.
    """
    records = record_layout(job, layout, batch, device_type, optimizer=optimizer)
    stages = range(records.schedule.num_stages)
    sent = traffic_by_stage(records)
    peaks = [memory.num_bytes for memory in memory_by_stage(records)]
    rank = records.layout.mesh.first_rank(mesh_axes("stages"), max(stages, key=peaks.__getitem__))
    account = predict_memory(
        job, layout, rank, batch, optimizer=optimizer, ranks=ranks, device=device_type, **options
    )  # fmt: skip
    # in the ledger a rank holds the whole global batch, and in a run it reads its own samples alone
    copies, held_by_kind = prod(layout.mesh[axis] for axis in mesh_axes("copies")), account.at_peak()
    held_by_kind["batch"] = held_by_kind["batch"] * -(-num_rows(batch) // copies) // num_rows(batch)
    price = None if cluster is None else Pricing(cluster, ModelPlans(job.model).kind).price(records.layout, records)
    return {
        "step_s": None if price is None else price.step_s,
        "waterfall": {} if price is None else {name: s for name, s in price.waterfall.items() if s},
        "memory_by_kind": {kind: size for kind, size in held_by_kind.items() if size},
        "traffic_by_axis": {
            axis: size for axis, size in max(sent, key=lambda traffic: traffic.total()).items() if size
        },
    }


def compared(predicted: Mapping[str, Any], measured: Mapping[str, Any]) -> dict[str, Any]:
    """Returns by how much predictions are off: predicted / measured - 1, in the shape of both.

    What only one of the two has, or what was measured as 0, is left out.

    >>> compared({"step_s": 2.0, "waterfall": {"tp": 1.0}}, {"step_s": 1.0, "waterfall": {"dp": 1.0}})
    {'step_s': 1.0, 'waterfall': {}, 'memory_by_kind': {}, 'traffic_by_axis': {}}
    """
    errors: dict[str, Any] = {}
    a, b = predicted.get("step_s"), measured.get("step_s")
    if a is not None and b:
        errors["step_s"] = a / b - 1
    for table in ("waterfall", "memory_by_kind", "traffic_by_axis"):
        said, seen = predicted.get(table, {}), measured.get(table, {})
        errors[table] = {name: size / seen[name] - 1 for name, size in said.items() if seen.get(name)}
    return errors
