"""A loss is tried on class targets, to see whether it may run on logits that are cut: without a word to the user."""

import warnings

import torch
from torch import nn
from torch.nn import functional

from shardwright.comm.launch import launch
from shardwright.models.model_loss import MeanLoss
from shardwright.parallelize import parallelize


class Convolutions(nn.Module):
    """A convolutional network, the channels of whose output tp cuts."""

    def __init__(self):
        super().__init__()
        self.first, self.apart = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.wide, self.grouped = nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 3, padding=1, groups=4)
        self.larger, self.last = nn.PixelShuffle(2), nn.Conv2d(4, 4, 3, padding="same")
        self.scales = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(16, 4, 1), nn.ReLU(), nn.Conv2d(4, 16, 1), nn.Sigmoid()
        )

    def forward(self, x):
        h = functional.silu(self.wide(torch.relu(self.apart(self.first(x)))))
        return self.last(self.larger(torch.relu(self.grouped(h * self.scales(h)))))


def test_a_loss_of_values_on_an_output_that_is_cut_makes_torch_warn_of_nothing():
    model = Convolutions()
    pictures = torch.sin(torch.arange(8 * 4 * 6 * 6.0)).view(8, 4, 6, 6)
    targets = torch.cos(torch.arange(8 * 4 * 12 * 12.0)).view(8, 4, 12, 12)

    def work(world, line):
        run = parallelize(model, line, world, loss=MeanLoss(functional.mse_loss), example=pictures)
        return run.step(next(run.shard([(pictures, targets)]))).item()

    (alone,) = launch(work, 1, "single", ranks="threads")
    with warnings.catch_warnings(record=True, action="always") as given:
        both = launch(work, 2, "tp2", ranks="threads")
    assert not [str(each.message) for each in given]
    torch.testing.assert_close(both, [alone, alone])
