"""A pipeline of two or more stages written against the Protocol, to see whether the Protocol holds it.

The blocks of a ``ModuleList`` are dealt to the stages; what is before them lives on the first, what is after on the
last, and a tied parameter on both. 1F1B; activations carry a header, so shapes may change.
"""

import itertools
from dataclasses import dataclass, replace
from types import MethodType

import torch

from shardwright.mesh import balanced
from shardwright.pipeline import Action, LossEnd
from shardwright.strategy import Applied, Partial, Traffic

HEADER = 8


@dataclass(frozen=True)
class Pipeline:
    name = "pipeline"
    axis = "pp"
    phase = "stages"
    default = True
    options = {}  # noqa: RUF012
    source = "Narayanan et al. 2021, arXiv:2104.04473"

    def place(self, job, plan):
        size = plan.mesh["pp"]
        compute, rest = dict(plan.compute), dict(plan.rest)
        stages = stages_of(job.model, size)
        users = {}
        for use in plan.uses:
            users.setdefault(use.parameter, set()).add(stage_of(stages, use.module))
        for name, where in users.items():
            compute[name] = compute[name].only("pp", where)
            rest[name] = type(rest[name])(*(lies.only("pp", where) for lies in _fields(rest[name])))
            if len(where) > 1:  # tied across stages: each has one use, and the sum serves both
                for use in plan.uses:
                    if use.parameter == name:
                        plan = plan.use(use.module, dy={"pp": Partial()})
        schedules = tuple(one_f_one_b(stage, size, plan.layout.num_microbatches) for stage in range(size))
        return replace(plan, compute=compute, rest=rest, schedules=schedules, loss_axes=plan.loss_axes | {"pp"})

    def apply(self, job, axes, plan):
        pp = axes["pp"]
        stages = stages_of(job.model, pp.size)
        job.model.forward = MethodType(stage_forward(pp.index, pp.size, stages), job.model)
        neighbour = Neighbour(pp, job)
        first = neighbour if pp.index > 0 else None
        last = neighbour if pp.index < pp.size - 1 else None
        return Applied(first=first, last=last)

    def traffic(self, plan, batch, coord):
        size, stage = plan.mesh["pp"], coord["pp"]
        found = []
        for visits in batch.visits:
            (visit,) = visits["blocks.0"]
            num_bytes = visit.element_bytes
            for dim in visit.y_shape:
                num_bytes *= dim
            for sends in (stage < size - 1, stage > 0):
                if sends:
                    found += [Traffic("send", "pp", HEADER * 8, 2), Traffic("send", "pp", num_bytes, 2)]
                    found += [Traffic("receive", "pp", HEADER * 8, 2), Traffic("receive", "pp", num_bytes, 2)]
        return tuple(found)


def _fields(rest):
    return rest.parameter, rest.gradient, rest.optimizer


def stages_of(model, size):
    cuts = balanced(len(model.blocks), size)
    return [range(a, b) for a, b in itertools.pairwise(cuts)]


def stage_of(stages, module):
    if module.startswith("blocks."):
        number = int(module.split(".")[1])
        return next(i for i, held in enumerate(stages) if number in held)
    return 0 if module in ("token", "position", "dropout") else len(stages) - 1


def stage_forward(stage, size, stages):
    def forward(self, x):
        if stage == 0:
            tokens = x
            x = self.token(tokens)
            if self.position is not None:
                x = x + self.position(self.positions(tokens))
            x = self.dropout(x)
        for number in stages[stage]:
            x = self.blocks[number](x)
        return self.head(self.norm(x)) if stage == size - 1 else x

    return forward


def one_f_one_b(stage, size, num_microbatches):
    warmup = min(size - stage - 1, num_microbatches)
    first = [Action("F", m) for m in range(warmup)]
    steady = [a for m in range(warmup, num_microbatches) for a in (Action("F", m), Action("B", m - warmup))]
    return (*first, *steady, *(Action("B", m) for m in range(num_microbatches - warmup, num_microbatches)))


class Neighbour:
    """Both ends of a stage in the middle: takes from the stage before, gives to the stage after."""

    def __init__(self, pp, job):
        self.pp, self.job = pp, job
        self.inputs, self.loss = {}, LossEnd(job.loss)

    def _send(self, tensor, to):
        header = torch.zeros(HEADER, dtype=torch.int64)
        header[0] = tensor.dim()
        header[1 : 1 + tensor.dim()] = torch.tensor(tensor.shape)
        self.pp.send(header, to)
        self.pp.send(tensor, to)

    def _receive(self, dtype, source):
        header = self.pp.receive((HEADER,), torch.int64, source).tolist()
        return self.pp.receive(header[1 : 1 + header[0]], dtype, source)

    @property
    def dtype(self):
        return next(p.dtype for p in self.job.model.parameters())

    def take(self, number, microbatch):
        self.inputs[number] = self._receive(self.dtype, self.pp.index - 1).requires_grad_()
        return self.inputs[number]

    def give_gradient(self, number):
        self._send(self.inputs.pop(number).grad, self.pp.index - 1)

    def give(self, number, microbatch, output):
        self._send(output.detach(), self.pp.index + 1)
        return output

    def take_gradient(self, number):
        return self._receive(self.dtype, self.pp.index + 1)


STRATEGY = Pipeline()
