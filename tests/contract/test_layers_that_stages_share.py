"""A layer that several stages use and whose input is put together, and a weight that a forward gives a second name."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from shardwright import verify

WIDTH = 8


def batches(*shape):
    numbers = torch.Generator().manual_seed(0)
    return [(torch.randn(8, *shape, WIDTH, generator=numbers), torch.randint(3, (8,), generator=numbers))] * 2


class Loop(nn.Module):
    """Calls three layers four times; ``join`` takes two tensors as one: a rank of ``tp`` has two ranges of inputs."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.join = nn.Linear(WIDTH, 16), nn.Linear(WIDTH, 16), nn.Linear(32, WIDTH)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x):
        for _ in range(4):
            x = x + self.join(torch.cat([self.a(x), self.b(x)], -1))
        return self.head(x)


@pytest.mark.parametrize("stage", ["", "/zero1", "/zero2", "/zero3"])
def test_gradients_of_a_shared_layer_with_two_ranges_of_inputs_are_summed_over_stages(stage):
    torch.manual_seed(0)
    assert verify(Loop(), f"pp2/1f1b mb2 dp2{stage} tp2", batches()).equal


class Dropped(nn.Linear):
    """Computes with what its method has put under a second name, as DropConnect of recurrent cells does."""

    def sample(self):
        self._weight = self.weight

    def forward(self, x):
        return functional.linear(x, self._weight, self.bias)


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.inputs = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
        self.states, self.head = nn.ModuleList(Dropped(WIDTH, WIDTH) for _ in range(2)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        for layer in self.states:
            layer.sample()
        for first, second in zip(self.inputs, self.states, strict=True):
            h, out = torch.zeros_like(x[:, 0]), []
            for token in x.unbind(1):
                h = torch.tanh(first(token) + second(h))
                out.append(h)
            x = torch.stack(out, 1)
        return self.head(x[:, -1])


@pytest.mark.parametrize("line", ["pp2/1f1b mb2", "pp2/1f1b mb2 tp2", "pp2/1f1b mb2 dp2/zero1 tp2"])
def test_a_weight_that_code_registers_under_a_second_name_runs_in_stages(line):
    torch.manual_seed(0)
    assert verify(Cells(), line, batches(4)).equal


class Blocked(torch.autograd.Function):
    """Its backward returns something for the mask too, which needs no gradient: autograd drops that."""

    @staticmethod
    def forward(ctx, x, mask):
        ctx.save_for_backward(mask)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (mask,) = ctx.saved_tensors
        return gradient * mask, mask * 0.0


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.up(x)
        return self.down(Blocked.apply(h, (h.detach() > 0).to(h.dtype)))


def test_what_a_backward_returns_for_a_mask_is_no_added_term():
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verify(Masked(), "dp2", batches()).equal
