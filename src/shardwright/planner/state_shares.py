"""``StateShares``: the training state that a rank holds under options such as a ZeRO stage, read from a plan."""

from __future__ import annotations

from typing import NamedTuple

from shardwright.plan.plan import Plan

MOMENTS_BYTES = 8
"""The bytes of optimizer state that estimates count for each trained element: two moments in fp32."""

STATE_KINDS = "parameters", "gradients", "optimizer"
"""The kinds of state that a rank stores between steps."""


class StateShares(NamedTuple):
    """The training state that one rank stores, updates, gathers and offloads under options such as a ZeRO stage.

    The values are shares of the state without options, for which they have their defaults. In the result of
    :func:`state_of` they are bytes, and a number of elements for ``updated``. ``parameters``, ``gradients`` and
    ``optimizer`` are stored on the device.
    """

    parameters: float = 1.0
    gradients: float = 1.0
    optimizer: float = 1.0
    updated: float = 1.0
    """The elements that the optimizer updates."""
    gathered: float = 0.0
    """The parameters that are gathered at each use."""
    moved: float = 0.0
    """The optimizer state that is offloaded to the host or to disk."""
    computed: float = 1.0
    """The gradients as the backward computes them: whole, and in the dtype in which the layer computes."""
    repeated: float = 0.0
    """The bytes of gradient sums that each microbatch after the first adds, as a share of those of the first."""

    @property
    def summed(self) -> float:
        """The gradients that are held from one microbatch to the next: whole until they are summed over the copies."""
        return self.gradients if self.repeated or self.gradients >= 1 else self.computed


def state_of(plan: Plan) -> StateShares:
    """Returns the bytes of training state that the first rank of a plan stores, all-gathers at each use, and offloads.

    The state is parameters, frozen ones included, gradients, and the two fp32 moments of an optimizer such as Adam. Of
    parameters whose state is offloaded, ``moved`` has the moments, and the gradients are not counted. ``updated`` is
    the number of elements that the optimizer updates. ``repeated`` is left at 0.

    >>> from torch import nn
    >>> from shardwright.layout import Layout
    >>> from shardwright.parallelize.planning import job_for, make_plan
    >>> job = job_for(nn.Linear(4, 4, bias=False), nn.Identity(), Layout.parse("dp2"))
    >>> state_of(make_plan(job, Layout.parse("dp2"))[0])[:3]
    (64, 64, 128)
    """
    coord = dict.fromkeys(plan.mesh.axes, 0)
    trained = {name: state for name, state in plan.state.items() if name not in plan.frozen}
    here = {name: state for name, state in trained.items() if name not in plan.offloaded}
    updated = {name: state.optimizer.num_elements(coord) for name, state in trained.items()}
    return StateShares(
        sum(plan.parameter_bytes(name, coord) for name in plan.state),
        sum(state.gradient.num_elements(coord) * plan.stored_dtypes[name].itemsize for name, state in here.items()),
        sum(updated[name] * MOMENTS_BYTES for name in here),
        sum(updated.values()),
        sum(plan.compute[n].num_elements(coord) * plan.compute_dtypes[n].itemsize for n in plan.unsharded_on_use),
        sum(updated[name] * MOMENTS_BYTES for name in trained if name not in here),
        sum(plan.compute[n].num_elements(coord) * plan.compute_dtypes[n].itemsize for n in trained),
    )
