"""ZeRO-3 beside models that use a param group, then another, then the first again."""

from __future__ import annotations

import pytest
import torch
from tests.contract.cases import check_equal, check_traffic, planned
from tests.contract.test_on_shards import OwnCase
from torch import nn
from torch.nn import functional

from shardwright import verify
from shardwright.errors import LayoutError
from shardwright.models.losses import CrossEntropy

WIDTH = 8


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH)

    def forward(self, x, scale=1.0):
        return x + self.down(functional.gelu(self.up(x))) * scale


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers, self.scale = nn.ModuleList(Layer() for _ in range(4)), nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x * self.scale


class PassesDown(Layers):
    """Reads a parameter of its own once, and gives it to each layer."""

    def forward(self, x):
        scale = self.scale
        for layer in self.layers:
            x = layer(x, scale)
        return x


class Inside(nn.Module):
    """A module that a cut into stages need not open."""

    def __init__(self):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(WIDTH, WIDTH), PassesDown(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.last(self.inner(self.first(x)))


class Twice(Layers):
    """Runs its layers on two inputs, one after the other."""

    def forward(self, x):
        return super().forward(x) + super().forward(x.flip(-1))


class TwiceTied(Twice):
    """One weight is that of two layers, so that its group is held; the others are not."""

    def __init__(self):
        super().__init__()
        self.layers[3].up.weight = self.layers[0].up.weight


class Asks(Layers):
    """Asks a layer's weight for its dtype before it calls others."""

    def forward(self, x):
        return super().forward(x.to(self.layers[3].up.weight.dtype))


class Floats(OwnCase):
    @property
    def batches(self):
        draw = torch.Generator().manual_seed(1)
        sizes = [(samples, WIDTH) for samples in self.num_samples]
        return [(torch.randn(size, generator=draw).double(), torch.randint(WIDTH, size[:1], generator=draw))
                for size in sizes]  # fmt: skip


def case_of(kind) -> Floats:
    torch.manual_seed(2)
    return Floats(kind.__name__, kind(), CrossEntropy(), num_tokens=1)


CASES = {kind.__name__: case_of(kind) for kind in (PassesDown, Inside, Twice, TwiceTied, Asks)}


@pytest.mark.sampled(5)
@pytest.mark.parametrize("line", [
    "dp2/zero3/bucket:0", "dp2/zero3/ahead:2/bucket:0 mb2", "dp2/zero3/bucket:0 tp2",
    "pp2/1f1b mb2 dp2/zero3/bucket:0", "pp2/zb-h1 mb2 dp2/zero3/bucket:0",
])  # fmt: skip
@pytest.mark.parametrize("name", CASES)
def test_what_a_forward_uses_again_is_right_and_gathered_as_often_as_traffic_says(name, line):
    if (name, line) == ("Asks", "dp2/zero3/bucket:0 tp2"):
        pytest.skip("its first layer's weight, which tp cuts, is read by other code than its own layer")
    check_traffic(line, CASES[name])
    check_equal(line, CASES[name])


def test_layers_that_run_twice_are_gathered_twice_and_not_all_held():
    plan, _ = planned("dp2/zero3/bucket:0", CASES["Twice"])
    layers = [group for group in plan.param_groups if group.name.startswith("layers.")]
    assert [(group.num_gathers, group.is_held) for group in layers] == [(2, False)] * 4


class ReadsValues(PassesDown):
    """No record of its forward has the value that it reads."""

    def forward(self, x):
        return super().forward(x) * (1.0 if self.scale.sum().item() > -99 else 2.0)


def test_a_parameter_that_is_passed_down_is_right_also_without_a_record_of_the_forward():
    case = case_of(ReadsValues)
    assert verify(case.model, "dp2/zero3/bucket:0", case.batches, loss=CrossEntropy()).equal


class Halved(torch.autograd.Function):
    """A backward that mixes features: it must see whole gradients."""

    @staticmethod
    def forward(ctx, x):
        return x / 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient.mean(-1, keepdim=True).expand_as(gradient)


class FewSamples(Layers):
    """Calls a function of its own for few samples only, between layers that tensor parallelism would cut."""

    def forward(self, x):
        for layer in self.layers:
            inner = torch.tanh(functional.linear(x, layer.up.weight, layer.up.bias))
            inner = Halved.apply(inner) if len(x) < 16 else inner
            x = x + functional.linear(inner, layer.down.weight, layer.down.bias)
        return x


def test_a_function_of_the_users_own_that_few_samples_alone_call_never_sees_parts():
    case = case_of(FewSamples)
    with pytest.raises(LayoutError, match="no layer of the model can be cut"):
        verify(case.model, "tp2", case.batches, loss=CrossEntropy())
