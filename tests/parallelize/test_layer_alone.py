"""One layer by itself, in every mode: cut, multiplied, gathered, and equal to one device."""

import pytest
import torch
from torch import nn

from shardwright.comm.launch import launch
from shardwright.errors import LayoutError, PlanError
from shardwright.layout import Layout
from shardwright.parallelize.layer_alone import layer_alone

LINES = [
    "tp1", "tp3", "tp2/sp", "tp2x2/2d", "tp2x3/2d", "tp1x4/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "tp2x2/2d:summa",
    "tp2x2x2/2.5d:summa", "tp2x2x2/3d:classic", "tp2x2/2d/regather", "tp4/auto",
]  # fmt: skip


@pytest.mark.parametrize("line", LINES)
@pytest.mark.parametrize("num_tokens", [1, 100_000])  # roles that move activations, and roles that move weights
def test_a_layer_alone_gives_the_output_and_all_gradients_of_one_device(line, num_tokens):
    torch.manual_seed(0)
    plain = nn.Linear(7, 5).double()
    x_whole, dy = torch.randn(5, 3, 7, dtype=torch.float64), torch.randn(5, 3, 5, dtype=torch.float64)
    x = x_whole.clone().requires_grad_()
    y = plain(x)
    y.backward(dy)

    def work(world):
        alone = layer_alone(plain, line, world, num_tokens=num_tokens)
        mine = x_whole.clone().requires_grad_()
        found = alone.gather(alone(alone.cut(mine)))
        found.backward(dy)
        alone.sum_gradients()
        coord = alone.plan.mesh.coord(world.rank)
        gradients = []
        for name, parameter in plain.named_parameters():
            (piece,) = alone.plan.compute[name].pieces(coord)
            gradients.append((alone.layer.get_parameter(name).grad, parameter.grad[piece.whole.slices]))
        return [(found, y), (mine.grad, x.grad), *gradients]

    for pairs in launch(work, Layout.parse(line), ranks="threads"):
        for ours, theirs in pairs:
            assert torch.allclose(ours, theirs, rtol=0, atol=1e-12)


def test_a_layer_that_is_smaller_than_the_grid_is_refused_by_name():
    def work(world):
        with pytest.raises(LayoutError, match="3 features to 2, over tp=4"):
            layer_alone(nn.Linear(3, 2), "tp4", world)

    launch(work, 4, ranks="threads")


@pytest.mark.parametrize("line", ["tp2 bf16", "tp2 fp16", "tp2 recompute:full", "tp2 compile"])
def test_options_of_whole_models_are_refused_and_not_ignored(line):
    def work(world):
        with pytest.raises(LayoutError, match="fix:     leave out " + line.split()[1]):
            layer_alone(nn.Linear(4, 4), line, world)

    launch(work, 2, ranks="threads")


def test_another_axis_is_refused():
    def work(world):
        with pytest.raises(LayoutError, match="tp alone"):
            layer_alone(nn.Linear(3, 2), "dp2", world)

    launch(work, 2, ranks="threads")


# ---- what is refused


class Doubled(nn.Linear):
    def forward(self, input):
        return 2 * super().forward(input)


def hooked():
    layer = nn.Linear(6, 5)
    layer.register_forward_hook(lambda module, args, output: 7 * output)
    return layer


LAYERS = {
    "a subclass": lambda: Doubled(6, 5),
    "hooks": hooked,
    "a parametrization": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(6, 5)),
    "an old parametrization": lambda: nn.utils.weight_norm(nn.Linear(6, 5)),
    "another layer": lambda: nn.Bilinear(6, 6, 5),
    "no layer": lambda: None,
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("layer", LAYERS)
def test_what_is_more_or_less_than_a_linear_is_refused(layer):
    with pytest.raises(PlanError, match=r"one nn\.Linear, and no more"):
        launch(lambda world: layer_alone(LAYERS[layer](), "tp2", world), 2, ranks="threads")


CALLS = {
    "another width": lambda alone: alone.cut(torch.ones(4, 7)),
    "no samples": lambda alone: alone.cut(torch.ones(6)),
    "nothing": lambda alone: alone.cut(torch.ones(())),
    "another dtype": lambda alone: alone.cut(torch.ones(4, 6).double()),
    "a whole input": lambda alone: alone(alone.cut(torch.ones(4, 6)).new_ones(4, 6)),
    "the part of another batch": lambda alone: (
        [alone.cut(torch.ones(n, 6)) for n in (4, 8)] and alone(torch.ones(2, 3))
    ),
    "no batch": lambda alone: alone(torch.ones(2, 3)),
    "a whole output": lambda alone: alone.gather(alone(alone.cut(torch.ones(4, 6))).new_ones(4, 5)),
}


@pytest.mark.parametrize("call", CALLS)
def test_an_input_or_output_of_another_shape_is_refused_on_every_rank(call):
    layer = nn.Linear(6, 5)

    def work(world):
        alone = layer_alone(layer, "tp2x2/2d", world)
        with pytest.raises(PlanError, match="has another shape or dtype than the layer takes"):
            CALLS[call](alone)

    launch(work, 4, ranks="threads")


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("line", ["tp2x2/2d", "tp2x2x2/2.5d"])
def test_gradients_are_summed_once(line, bias):
    layer = nn.Linear(6, 5, bias=bias)

    def work(world):
        alone = layer_alone(layer, line, world, num_tokens=100_000)

        def backward():
            alone.gather(alone(alone.cut(torch.ones(4, 6)))).sum().backward()

        backward()
        alone.sum_gradients()
        with pytest.raises(PlanError, match="would be summed twice"):
            alone.sum_gradients()
        backward()
        with pytest.raises(PlanError, match="would be summed twice"):
            alone.sum_gradients()
        alone.layer.zero_grad()
        backward()
        alone.sum_gradients()

    launch(work, Layout.parse(line), ranks="threads")


def test_a_layer_without_tokens_is_refused():
    def work(world):
        with pytest.raises(LayoutError, match="'num_tokens' is too small"):
            layer_alone(nn.Linear(6, 5), "tp2/sp", world, num_tokens=0)

    launch(work, 2, ranks="threads")
