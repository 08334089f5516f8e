"""Code between layers that stages cut inside: exceptions that it catches, draws by methods of tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardwright.verify import verify

LINES = ["pp2 mb2", "pp4/zb-v mb4", "pp2 mb2 dp2/zero3", "pp2 mb2 tp2", "pp2 mb2 recompute:layers.*"]


def layers(count=8):
    return nn.ModuleList(nn.Linear(16, 16) for _ in range(count))


def tail():
    """What tensor parallelism cuts."""
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


class Tries(nn.Module):
    """Calls each layer with an argument that most do not take, as code for lists of unlike layers does."""

    def __init__(self):
        super().__init__()
        self.layers, self.tail = layers(), tail()

    def forward(self, x):
        for layer in self.layers:
            try:
                x = layer(x, lengths=None)
            except TypeError:
                x = torch.relu(layer(x))
        return self.tail(x.mean(1))


class TooLongError(Exception):
    """An exception that is not made of its arguments."""

    def __init__(self, *, limit, given):
        super().__init__(f"{given} of at most {limit}")
        self.limit = limit


class Checked(nn.Linear):
    """A layer that takes no longer sequences, and says so after it has computed something."""

    def forward(self, x):
        h = super().forward(x)
        if x.shape[1] > 4:
            raise TooLongError(limit=4, given=x.shape[1])
        return h


class Fallback(nn.Module):
    """Cuts its input where a layer refuses it; the layer is in the middle of the model, or at one of its ends."""

    def __init__(self, place):
        super().__init__()
        self.layers, self.tail = layers(), tail()
        self.layers.insert(place, Checked(16, 16))

    def forward(self, x):
        for layer in self.layers:
            try:
                h = layer(x)
            except TooLongError as failure:
                h = torch.cat([layer(part) for part in x.split(failure.limit - 1, 1)], 1)
            x = x + torch.tanh(h)
        return self.tail(x.mean(1))


class Drops(nn.Module):
    """Leaves out whole samples, with numbers that a method of an activation draws."""

    def __init__(self, draw):
        super().__init__()
        self.layers, self.tail, self.draw = layers(), tail(), draw

    def forward(self, x):
        for layer in self.layers:
            h = torch.relu(layer(x))
            x = x + h * self.draw(h)
        return self.tail(x.mean(1))


DRAWS = {
    "new_empty": lambda h: h.new_empty((len(h), 1, 1)).bernoulli_(0.7),
    "empty_like": lambda h: (torch.empty_like(h).uniform_() < 0.8).to(h.dtype),
    "clone": lambda h: h.detach().clone().normal_(),
    "bernoulli": lambda h: torch.sigmoid(h).detach().bernoulli(),
}
KINDS = {
    "tries": Tries, **{f"raises in {place}": (lambda place=place: Fallback(place)) for place in (0, 4, 8)},
    **{name: (lambda draw=draw: Drops(draw)) for name, draw in DRAWS.items()},
}  # fmt: skip


@pytest.mark.sampled(7)
@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("kind", KINDS)
def test_code_between_layers_runs_on_every_stage_as_on_one_device(kind, line):
    numbers = torch.sin(torch.arange(2 * 8 * 6 * 16, dtype=torch.float64) * 1.3).view(2, 8, 6, 16)
    found = verify(KINDS[kind](), line, [(x, torch.arange(8) % 16) for x in numbers])
    assert found.equal, found
