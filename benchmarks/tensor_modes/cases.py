"""The layouts that the tensor modes are compared under, the MLP that they run, and what is known beforehand."""

from collections import OrderedDict

import torch
from benchmarks.common import sized
from torch import nn

import shardwright as sw
from shardwright.errors import LayoutError
from shardwright.models.gpt import GPT, GPTConfig
from shardwright.models.mlp import MLPConfig, build_mlp
from shardwright.parallelize.planning import make_plan
from shardwright.plan.plan import Job

SMALL = ("tp2/sp", "tp2x1/2d", "tp1x1x2/3d")
"""Those of two ranks."""
CHOSEN = ("tp4", "tp4/sp", "tp2x2/2d", "tp2x2x2/2.5d", "tp2x2x2/3d")
REGATHER = tuple(f"{line}/regather" for line in CHOSEN)
CLASSIC = ("tp2x2/2d:summa", "tp2x2x2/2.5d:summa", "tp2x2x2/3d:classic")
GOALS = dict(zip((*CHOSEN, *CLASSIC), (1.10, 1.10, 1.15, 1.30, 1.28, 1.22, 1.45, 1.38), strict=True))
PEER_MB = {1: 12.6, 2: 40.9, 2.5: 33.0, 3: 18.9}
"""Sent per rank and step by a known peer's mode on the MLP, by its number of dimensions."""

WIDTH, HIDDEN, TOKENS = sized((1024, 4096, 1024), (32, 128, 128))


def dimensions(line):
    """How many dimensions the layout's mode has."""
    return next((number for number in (2.5, 2, 3) if f"/{number:g}d" in line), 1)


class GivenGradient(nn.Module):
    """A loss that costs nothing: backward starts from the targets. Made to time what lies before it, and no more."""

    def forward(self, output, targets):
        return _GivenGradient.apply(output, targets), targets.numel()


class _GivenGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, output, gradient):
        ctx.gradient = gradient
        return output.new_zeros(())

    @staticmethod
    def backward(ctx, _):
        return ctx.gradient, None


def plain_mlp():
    """Linear, GELU, Linear, with biases."""
    torch.manual_seed(0)
    return build_mlp(MLPConfig(widths=(WIDTH, HIDDEN, WIDTH)))


def mlp_inside(mlp):
    """The MLP with a layer before and one after it, so that what it takes and gives lies as between layers.

    They are never run: :class:`InsideMLP` hands over what would come from the one and go to the other. Their weights
    are zeros, since every rank must give ``parallelize`` the same model.
    """
    before, after = nn.Embedding(1, WIDTH).requires_grad_(False), nn.Linear(WIDTH, 8).requires_grad_(False)
    for parameter in (*before.parameters(), *after.parameters()):
        nn.init.zeros_(parameter)
    return nn.Sequential(OrderedDict([("before", before), *mlp.named_children(), ("after", after)]))


def mlp_data():
    """The input of the whole MLP and the gradient of its output."""
    generator = torch.Generator().manual_seed(1)
    return tuple(torch.randn(TOKENS, WIDTH, generator=generator) for _ in range(2))


class InsideMLP:
    """A rank's part of the MLP under a layout, with its block of the input, which requires a gradient.

    ``x`` and ``dy`` are the input of the whole MLP and the gradient of its output.
    """

    def __init__(self, world, line, mlp, x, dy):
        self.run = sw.parallelize(
            mlp_inside(mlp), line, world, loss=GivenGradient(), num_tokens=TOKENS,
            check_every=0,  # ranks are given their own parts of the gradient as targets
        )  # fmt: skip
        notes, samples = self.run.plan.notes, self.run.share(TOKENS)
        x, dy = (whole[samples.start : samples.stop].detach() for whole in (x, dy))
        self.x = self._held(x, notes["linear1"].x).requires_grad_()
        self.batch = self.run.part(torch.zeros(len(x), dtype=torch.int64), self._held(dy, notes["linear2"].y), TOKENS)
        self.run.model.before.forward = lambda _: self.x
        self.run.model.after.forward = lambda y: y

    def _held(self, rows, features):
        """The features that lie here."""
        return torch.cat([rows[:, a:b] for a, b in features.held(self.run.coord)], dim=1).clone()

    def step(self):
        """Forward and backward, gradient of the input included, gradients summed where ranks share weights."""
        self.x.grad = None
        self.run.step(self.batch)

    def check(self, plain, x):
        """Raises AssertionError unless the gradients are the plain MLP's, which has run on ``x``."""
        self.step()
        rows = x.grad[self.batch.samples.start : self.batch.samples.stop]
        check_close("the input", self.x.grad, self._held(rows, self.run.plan.notes["linear1"].x))
        mine = dict(self.run.model.named_parameters())
        for name, parameter in plain.named_parameters():
            for piece in self.run.plan.compute[name].pieces(self.run.coord):
                at = [slice(low, high) for low, high in zip(piece.whole.start, piece.whole.stop, strict=True)]
                here = [slice(low, low + s.stop - s.start) for low, s in zip(piece.local_offset, at, strict=True)]
                check_close(name, mine[name].grad[tuple(here)], parameter.grad[tuple(at)])


def check_close(name, found, wanted):
    """Raises AssertionError where float32 would not excuse the difference."""
    error = ((found - wanted).norm() / wanted.norm()).item()
    assert error < 2e-5, f"the gradient of {name} is off by {error:.1e}"


def accepted(lines, config):
    """The layouts that can be laid out today, and for each other one why not, in a line."""
    found, refused = [], {}
    with torch.device("meta"):
        jobs = (
            Job(mlp_inside(plain_mlp()), GivenGradient(), TOKENS),
            Job(GPT(GPTConfig(**config)), sw.CrossEntropy(), TOKENS),
        )
    for line in lines:
        try:
            for job in jobs:
                make_plan(job, sw.Layout.parse(line))
            found.append(line)
        except LayoutError as problem:
            refused[line] = str(problem).splitlines()[0]
    return found, refused
