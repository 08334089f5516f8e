"""ZeRO-3 written against the Protocol, to see whether the Protocol holds it. Not tuned: nothing overlaps.

A parameter rests as one flat slice per data rank. Its unit is gathered before it is used, forward and backward, and
dropped after; its gradient, summed by nobody else, is reduce-scattered into the slice's.
"""

import itertools
from dataclasses import dataclass, replace

import torch
from torch import nn

from shardwright.mesh import balanced
from shardwright.pipeline import Events
from shardwright.strategies.data_parallel import STRATEGY as DATA_PARALLEL
from shardwright.strategy import Applied, Rest, Traffic, blocks


@dataclass(frozen=True)
class Zero3:
    name = "zero3"
    axis = "dp"
    phase = "state"
    default = False
    options = {"zero3": "parameters, gradients and optimizer state cut over dp"}  # noqa: RUF012
    source = "Rajbhandari et al. 2020, arXiv:1910.02054"

    def place(self, job, plan):
        size = plan.mesh["dp"]
        rest = {}
        for name, lies in plan.compute.items():
            flat = lies.flat("dp", size)
            rest[name] = Rest(flat, flat, flat)
        return replace(plan, rest=rest, units=blocks(job.model, least_bytes=0))

    def apply(self, job, axes, plan):
        state = _State(job.model, axes["dp"], plan)
        return Applied(events=state.events(), parameters=state.slices)

    def traffic(self, plan, batch, coord):
        """Per microbatch: each parameter gathered for forward and again for backward; reduce-scattered once a step."""
        found = []
        for name in plan.compute:
            size = plan.compute[name].num_elements(coord) * batch.gradient_bytes
            members = plan.mesh["dp"]
            gathers = sum(_gathers(plan, name, visits) for visits in batch.visits)
            found += [Traffic("all_gather", "dp", size, members)] * gathers
            found += [Traffic("reduce_scatter", "dp", size, members)]
        return tuple(found)


def _gathers(plan, name, visits):
    """Forward and backward; one gather serves both where the unit's output needs its weights at once: never here."""
    return 2


class _State:
    def __init__(self, model, dp, plan):
        self.dp = dp
        self.whole = dict(model.named_parameters())
        self.slices, self.cuts = {}, {}
        for name, parameter in self.whole.items():
            cuts = balanced(parameter.numel(), dp.size)
            self.cuts[name] = [b - a for a, b in itertools.pairwise(cuts)]
            mine = parameter.detach().reshape(-1)[cuts[dp.index] : cuts[dp.index + 1]].clone()
            self.slices[name] = nn.Parameter(mine, requires_grad=parameter.requires_grad)
        self.present = set(self.whole)
        for unit in plan.units:
            self.drop(unit)

    def gather(self, unit):
        for name in unit.parameters:
            if name in self.whole and name not in self.present:
                parameter = self.whole[name]
                parameter.data.untyped_storage().resize_(parameter.numel() * parameter.element_size())
                gathered = self.dp.all_gather(self.slices[name].detach(), sizes=self.cuts[name])
                with torch.no_grad():
                    parameter.data.copy_(gathered.view_as(parameter))
                self.present.add(name)

    def drop(self, unit):
        for name in unit.parameters:
            if name in self.present:
                self.whole[name].data.untyped_storage().resize_(0)
                self.present.discard(name)

    def reduce(self):
        for name, parameter in self.whole.items():
            gradient = parameter.grad if parameter.grad is not None else parameter.new_zeros(parameter.shape)
            self.slices[name].grad = self.dp.reduce_scatter(gradient.reshape(-1), sizes=self.cuts[name])
            parameter.grad = None

    def drop_all(self, units):
        for unit in units:
            self.drop(unit)

    def events(self):
        seen = []

        def note(unit):
            seen.append(unit)
            self.gather(unit)

        def after_action(action):
            # the first block's input needs no gradient, so no event of its own ever drops it
            self.drop_all(seen)
            seen.clear()

        return Events(
            before_forward=note,
            after_forward=self.drop,
            before_backward=note,
            after_action=after_action,
            after_sync=self.reduce,
        )


STRATEGIES = (DATA_PARALLEL, Zero3())
