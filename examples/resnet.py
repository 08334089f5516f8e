"""A residual network for pictures of 224 x 224, and data in its shapes, for `shardwright plan`."""

import torch
from torch import nn


class Residual(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.inner = nn.Sequential(
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
            nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1),
            nn.BatchNorm2d(width),
        )

    def forward(self, x):
        return torch.relu(x + self.inner(x))


def build(width=32, blocks=2):
    stages = [nn.Conv2d(3, width, 7, stride=4, padding=3)]
    for stage in range(4):
        wide = width * 2**stage
        stages += [*(Residual(wide) for _ in range(blocks)), nn.Conv2d(wide, 2 * wide, 3, stride=2, padding=1)]
    return nn.Sequential(*stages, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16 * width, 1000))


def data(split):  # "train" or "eval"
    return [(torch.zeros(3, 224, 224), torch.tensor(0))]
