"""Lets the modules that a plan names keep nothing but what goes in, or keep what they save elsewhere."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from shardwright.axes import mesh_axes
from shardwright.comm.axis import Axis
from shardwright.forward_stack import Forward, Rung, wrap
from shardwright.plan.plan import Job, Plan
from shardwright.plan.recompute import activation_offload_target
from shardwright.runtime.activation_offload import ActivationOffload
from shardwright.runtime.applied import Applied
from shardwright.runtime.checkpointed_block import CheckpointedBlock, Restorable
from shardwright.runtime.offload_storage import LEAST_BYTES, OffloadStorage


def checkpoint_activations(job: Job, plan: Plan) -> None:
    """Makes each call of the plan's ``again`` modules a region; the last change of a rank's model before it runs.

    Ranks that share operators run all of a block again, so that all make the same calls; others run as far as the
    backward asks.
    """
    states: list[Restorable] = [each for each in (job.rng, job.batch_shard, job.frame) if each is not None]
    selective = plan.layout.recompute == "selective"
    shared = any(plan.mesh[axis] > 1 for axis in mesh_axes("operators"))
    for path in plan.recomputed:
        module = job.model.get_submodule(path)

        def around(inner: Forward, path: str = path, module: nn.Module = module) -> Forward:
            return CheckpointedBlock(path, module, inner, tuple(states), selective, shared)

        wrap(module, Rung.RECOMPUTE, f"recompute:{plan.layout.recompute}", by="core", around=around)


def offload_activations(job: Job, plan: Plan, applied: Sequence[Applied], everyone: Axis) -> None:
    """What the plan's ``packed`` modules save for the backward goes to host memory or to disk, and comes back for it.

    On a CPU host memory is the device's: there nothing moves.
    """
    place = activation_offload_target(plan.layout)
    if place is None or (place == "host" and everyone.device.type in ("cpu", "meta")):
        return
    outer = next((each.saving for each in applied if each.saving is not None), None)
    storage = OffloadStorage(place, everyone, job.offload_folder)
    storage.reserve([LEAST_BYTES])  # a folder that cannot be written is refused now, and not in the first step
    packing = ActivationOffload(storage, outer)
    for path in plan.offloaded_activations:
        packing.attach(job.model.get_submodule(path))
