"""Which module's code runs, in a forward, its backward, and the forward that checkpointing repeats there."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from shardwright.analysis.calls.running_module import following_modules


class Noted(torch.autograd.Function):
    """Notes where its forward and its backward run."""

    @staticmethod
    def forward(ctx, x, note):
        ctx.note = note
        ctx.save_for_backward(x)
        note("F")
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        assert len(ctx.saved_tensors) == 1  # asked for, so that checkpointing repeats the forward
        ctx.note("B")
        return dy * 2, None


class Leaf(nn.Module):
    def __init__(self, note, fails=False):
        super().__init__()
        self.note, self.fails = note, fails

    def forward(self, x, *, again=None):
        if self.fails:
            raise ValueError("as asked")
        return Noted.apply(x if again is None else x + again, self.note)


class Outer(nn.Module):
    """Calls its own operator, a child, its own operator, a child by its forward, and a child by keyword."""

    def __init__(self, note, repeats=False):
        super().__init__()
        self.first, self.second, self.third = Leaf(note), Leaf(note), Leaf(note)
        self.note, self.repeats = note, repeats

    def forward(self, x):
        x = Noted.apply(x, self.note)
        x = checkpoint(self.first, x, use_reentrant=False) if self.repeats else self.first(x)
        x = self.second.forward(Noted.apply(x, self.note))
        return self.third(x, again=Noted.apply(x, self.note))


def places(make, *args):
    """The (kind, path) of each call of :class:`Noted` in a forward and backward of ``make(note, *args)``."""
    found, running = [], [""]
    model = make(lambda kind: found.append((kind, running[0])), *args)

    def tell(path):
        running[0] = path

    with following_modules(model, tell):
        model(torch.ones(2, requires_grad=True)).sum().backward()
    assert running == [""]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    return found


def test_a_backward_runs_in_the_module_whose_forward_made_its_nodes():
    forward = ["", "first", "", "", "", "third"]
    assert places(Outer) == [("F", path) for path in forward] + [("B", path) for path in reversed(forward)]


def test_a_forward_that_is_repeated_in_the_backward_runs_in_its_own_module():
    forward = ["", "first", "", "", "", "third"]
    backward = [("B", "third"), ("B", ""), ("B", ""), ("B", ""), ("F", "first"), ("B", "first"), ("B", "")]
    assert places(Outer, True) == [("F", path) for path in forward] + backward


def test_a_module_that_raises_is_left():
    paths = []
    model = nn.ModuleDict({"good": Leaf(lambda _: None), "bad": Leaf(lambda _: None, fails=True)})
    with following_modules(model, paths.append):
        with pytest.raises(ValueError, match="as asked"):
            model["bad"](torch.ones(1))
        model["good"](torch.ones(1))
    assert paths == ["bad", "", "good", ""]
