"""One layer by itself, in every mode: cut, multiplied, gathered, and equal to one device."""

import pytest
import torch
from torch import nn

from shardwright.comm import launch
from shardwright.errors import LayoutError
from shardwright.layout import Layout
from shardwright.parallelize import layer_alone

LINES = [
    "tp1", "tp3", "tp2/sp", "tp2x2/2d", "tp2x3/2d", "tp1x4/2d", "tp2x2x2/2.5d", "tp2x2x2/3d", "tp2x2/2d:summa",
    "tp2x2x2/2.5d:summa", "tp2x2x2/3d:classic", "tp2x2/2d/regather",
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


def test_another_axis_is_refused():
    def work(world):
        with pytest.raises(LayoutError, match="tp alone"):
            layer_alone(nn.Linear(3, 2), "dp2", world)

    launch(work, 2, ranks="threads")
