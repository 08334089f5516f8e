"""Models of pictures to cut in space: each kind of layer, with the settings that are easily got wrong."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from contract.cases import Pictures
from shardwright.models import MeanSquaredError


def head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 5)]


def strided():
    """Kernel 7 and stride 2, a pool whose windows overlap, dilation 2: 17 rows, 9, 5, 5, 3."""
    return nn.Sequential(
        nn.Conv2d(4, 6, 7, stride=2, padding=3), nn.ReLU(), nn.MaxPool2d(3, stride=2, padding=1), nn.Dropout(0.3),
        nn.Conv2d(6, 6, 3, padding=2, dilation=2, groups=2), nn.Tanh(), nn.Conv2d(6, 5, 3, stride=2, padding=1),
        *head(5),
    )  # fmt: skip


def wide():
    """A kernel of 7 rows on slices of one or two; norms of every kind."""
    return nn.Sequential(
        nn.BatchNorm2d(4), nn.Conv2d(4, 6, (7, 3), padding="same", bias=False), nn.BatchNorm2d(6),
        nn.ReLU(inplace=True), nn.Conv2d(6, 6, 5, padding=2), nn.SyncBatchNorm(6), nn.PReLU(6), nn.Dropout(0.2),
        nn.Conv2d(6, 6, 7, padding=3), nn.BatchNorm2d(6, affine=False, momentum=None), *head(6),
    )  # fmt: skip


def grouped_norms():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3), nn.GroupNorm(3, 6), nn.SiLU(), nn.Conv2d(6, 6, 3, padding=1), nn.InstanceNorm2d(6),
        nn.Conv2d(6, 4, 2, padding="same"), nn.InstanceNorm2d(4, affine=True), nn.Softmax(dim=1), nn.Flatten(),
        nn.Linear(4 * 11 * 5, 5),
    )  # fmt: skip


def borders():
    """The padding repeats the picture itself."""
    return nn.Sequential(
        nn.Conv2d(4, 5, 5, padding=2, padding_mode="reflect"), nn.Tanh(),
        nn.Conv2d(5, 5, 3, padding=(3, 1), padding_mode="replicate"), nn.Tanh(),
        nn.Conv2d(5, 5, (4, 3), padding="same", padding_mode="circular"), nn.Tanh(),
        nn.Conv2d(5, 5, 3, stride=2, padding=1, padding_mode="reflect"), *head(5),
    )  # fmt: skip


def pools():
    return nn.Sequential(
        nn.Conv2d(4, 5, 1), nn.AvgPool2d(3, stride=2, padding=1), nn.Conv2d(5, 5, 1), nn.MaxPool2d(2, ceil_mode=True),
        nn.Conv2d(5, 5, 1), nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False),
        nn.MaxPool2d((2, 1), stride=1, dilation=(2, 1)), nn.Conv2d(5, 5, 1),
        nn.AvgPool2d(2, stride=2, padding=1, ceil_mode=True), nn.AvgPool2d((2, 1), stride=1, divisor_override=3),
        *head(5),
    )  # fmt: skip


class Residual(nn.Module):
    def __init__(self, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, stride=stride, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.short = nn.Conv2d(channels, channels, 1, stride=stride) if stride > 1 else nn.Identity()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = self.relu(self.norm1(self.conv1(x)))
        y = self.norm2(self.conv2(y))
        y += self.short(x)
        return self.relu(y)


class ResNet(nn.Module):
    """As torchvision writes it, ending in a view."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(4, 6, 3, padding=1)
        self.blocks = nn.Sequential(Residual(6), Residual(6, stride=2), Residual(6))
        self.pool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(6, 5)

    def forward(self, x):
        x = self.pool(self.blocks(self.stem(x)))
        return self.fc(torch.flatten(x, 1))


class UNet(nn.Module):
    """Down twice, up by a transposed convolution and by an enlargement, maps joined by channels; a map comes out."""

    def __init__(self, mode: str = "nearest") -> None:
        super().__init__()
        self.down1, self.down2 = nn.Conv2d(4, 5, 3, padding=1), nn.Conv2d(5, 6, 3, padding=1)
        self.bottom, self.pool, self.drop = nn.Conv2d(6, 6, 3, padding=1), nn.MaxPool2d(2), nn.Dropout(0.25)
        self.up1 = nn.ConvTranspose2d(6, 6, 2, stride=2)
        self.up2 = nn.Upsample(scale_factor=2, mode=mode)
        self.mix1, self.mix2, self.out = (
            nn.Conv2d(12, 5, 3, padding=1),
            nn.Conv2d(10, 5, 3, padding=1),
            nn.Conv2d(5, 2, 1),
        )

    def forward(self, x):
        one = functional.relu(self.down1(x))
        two = torch.relu(self.down2(self.pool(one)))
        low = self.drop(self.bottom(self.pool(two)).relu())
        x = self.mix1(torch.cat([self.up1(low), two], dim=1)).tanh()
        return self.out(torch.tanh(self.mix2(torch.cat((self.up2(x), one), 1))))


class Refined(nn.Module):
    """A residual around the whole model: what comes out is a sum of cut maps."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(4, 6, 3, padding=1), nn.GELU(), nn.ConvTranspose2d(6, 4, 3, stride=1, padding=1)
        )

    def forward(self, x):
        return (x + self.body(x)) / 2


def transposed():
    return nn.Sequential(
        nn.Conv2d(4, 5, 3, stride=3), nn.Tanh(),
        nn.ConvTranspose2d(5, 6, (3, 2), stride=(2, 1), padding=1, output_padding=(1, 0)),
        nn.Tanh(), nn.ConvTranspose2d(6, 4, 2, stride=3, groups=2, bias=False), nn.Tanh(),
        nn.ConvTranspose2d(4, 4, 3, dilation=2, padding=(1, 0)), nn.Tanh(), nn.ConvTranspose2d(4, 4, 1, stride=2),
        *head(4),
    )  # fmt: skip


class Squeezed(nn.Module):
    """Each channel weighed by a function of all rows: the weight's gradient is a sum over the ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.pool = nn.Conv2d(4, 6, 3, padding=1), nn.AdaptiveAvgPool2d(1)
        self.fc1, self.fc2, self.act, self.gate = nn.Conv2d(6, 3, 1), nn.Conv2d(3, 6, 1), nn.ReLU(), nn.Sigmoid()
        self.last = nn.Conv2d(6, 5, 3)

    def forward(self, x):
        x = self.conv(x)
        weights = self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))
        return self.last(torch.relu(weights * x)).mean((2, 3))


class SqueezedByFunctions(Squeezed):
    def forward(self, x):
        x = self.conv(x)
        weights = 1 + torch.sigmoid(self.fc2(self.fc1(self.pool(x)).relu())).square()
        return self.last(weights * x).mean((2, 3))


class SqueezedAndSeen(Squeezed):
    """The weights go elsewhere too, where their gradient is whole."""

    def forward(self, x):
        x = self.conv(x)
        weights = self.gate(self.fc2(self.act(self.fc1(self.pool(x)))))
        return self.last(weights * x).mean((2, 3)) + weights.flatten(1)[:, :5]


class Shared(nn.Module):
    """One activation, one convolution and one dropout on large maps and on small ones; functions among them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.conv, self.act, self.drop = (
            nn.Conv2d(4, 5, 3),
            nn.Conv2d(5, 5, 3, padding=1),
            nn.ReLU(),
            nn.Dropout(0.2),
        )
        self.norm, self.fc1, self.fc2 = nn.GroupNorm(1, 5), nn.Linear(5 * 3 * 2, 8), nn.Linear(8, 5)

    def forward(self, x):
        x = self.drop(self.act(self.conv(self.act(self.first(x)))))
        x = functional.max_pool2d(self.norm(self.conv(x)), 3)  # a function: whole from here on
        x = self.norm(self.drop(self.conv(x)))
        return self.fc2(self.drop(self.act(self.fc1(x.view(x.size(0), 30)))))


def shrinking():
    """Fewer and fewer rows: 16, 8, 4, 2, 1, on many ranks whole before the end, weights trained all the same."""
    layers: list[nn.Module] = []
    for channels in (4, 5, 5, 5):
        layers += [nn.Conv2d(channels, 5, 3, stride=2, padding=1), nn.BatchNorm2d(5), nn.PReLU(), nn.Dropout(0.1)]
    return nn.Sequential(*layers, nn.Conv2d(5, 5, 1), nn.Flatten())


def lines():
    return nn.Sequential(
        nn.Conv1d(4, 6, 5, padding=2, dilation=1), nn.BatchNorm1d(6), nn.AvgPool1d(3, stride=2, padding=1), nn.ReLU(),
        nn.ConvTranspose1d(6, 4, 2, stride=2), nn.Upsample(scale_factor=3, mode="linear"), nn.MaxPool1d(2),
        nn.Conv1d(4, 4, 3, padding=1, padding_mode="circular"), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


def volumes():
    return nn.Sequential(
        nn.Conv3d(2, 4, 3, padding=1, padding_mode="replicate"), nn.BatchNorm3d(4), nn.AvgPool3d(2), nn.SiLU(),
        nn.ConvTranspose3d(4, 4, 2, stride=2), nn.MaxPool3d(3, stride=1, padding=1), nn.AdaptiveAvgPool3d(1),
        nn.Flatten(), nn.Linear(4, 5),
    )  # fmt: skip


class SeenFirst(nn.Module):
    """Layers without weights see the picture first, here and much later: each stage that needs them runs them."""

    def __init__(self) -> None:
        super().__init__()
        self.pool, self.first = nn.AvgPool2d(3, stride=1, padding=1), nn.Conv2d(4, 5, 3, padding=1)
        self.second, self.third = nn.Conv2d(5, 5, 5, padding=2), nn.Conv2d(9, 5, 3, padding=1)
        self.out = nn.Conv2d(9, 5, 1)

    def forward(self, x):
        blurred = self.pool(x)
        y = torch.tanh(self.second(torch.tanh(self.first(blurred))))
        y = torch.tanh(self.third(torch.cat([y, blurred], 1)))
        return self.out(torch.cat([y, self.pool(blurred)], 1)).mean((2, 3))


class Untraceable(nn.Module):
    """A block whose code cannot be traced: its map is gathered before it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Conv2d(4, 4, 3)

    def forward(self, x):
        return self.inner(x) if len(x) >= 0 else x


def untraceable_block():
    return nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU(), Untraceable(), *head(4))


class Half(nn.Conv2d):
    def forward(self, x):
        return super().forward(x) / 2


def unknown_layers():
    """Layers not known to treat each row alone, and one of a class that may do anything."""
    return nn.Sequential(
        nn.Conv2d(4, 5, 3), nn.BatchNorm2d(5), Half(5, 5, 3),
        nn.BatchNorm2d(5), nn.LPPool2d(2, 2), nn.Conv2d(5, 5, 1), nn.AdaptiveMaxPool2d(2), nn.Flatten(),
        nn.Linear(20, 5),
    )  # fmt: skip


def tied():
    """One weight on cut maps and, by another layer, on whole ones."""
    model = nn.Sequential(
        nn.Conv2d(4, 4, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Conv2d(4, 4, 3, padding=1), *head(4)
    )
    model[3].weight = model[0].weight
    return model


class JoinedByRows(nn.Module):
    """Maps one below the other: no rank would hold balanced rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.last = nn.Conv2d(4, 5, 3), nn.Conv2d(4, 5, 1), nn.Conv2d(10, 5, 3)

    def forward(self, x):
        below = torch.cat((self.one(x)[..., :1], self.two(x)[..., :1]), dim=2)
        above = torch.cat((self.one(x), self.two(x)[:, :, 1:-1, 1:-1]), dim=2)
        return self.last(torch.cat([above, above * 2], 1)).mean((2, 3)) * (1 + below.mean((1, 2, 3))[:, None])


RESNET = Pictures("resnet", make=ResNet, shape=(4, 11, 7))
STRIDED = Pictures("strided", make=strided, shape=(4, 17, 9))
WIDE = Pictures("wide kernels", make=wide, shape=(4, 11, 5))
UNET = Pictures("unet", make=UNet, shape=(4, 12, 8), targets=(2, 12, 8), loss=MeanSquaredError())
SHRINKING = Pictures("shrinking", make=shrinking, shape=(4, 16, 16))
SQUEEZED = Pictures("squeezed", make=Squeezed, shape=(4, 11, 6))
SHARED = Pictures("shared layers", make=Shared, shape=(4, 13, 8))
SEEN_FIRST = Pictures("seen first", make=SeenFirst, shape=(4, 11, 6))
CASES = (
    RESNET,
    STRIDED,
    WIDE,
    UNET,
    SHRINKING,
    SQUEEZED,
    SHARED,
    SEEN_FIRST,
    Pictures("grouped norms", make=grouped_norms, shape=(4, 13, 7)),
    Pictures("borders", make=borders, shape=(4, 13, 7)),
    Pictures("pools", make=pools, shape=(4, 31, 17)),
    Pictures("transposed", make=transposed, shape=(4, 14, 9)),
    Pictures(
        "bilinear unet", make=lambda: UNet("bilinear"), shape=(4, 16, 8), targets=(2, 16, 8), loss=MeanSquaredError()
    ),
    Pictures(
        "bicubic unet", make=lambda: UNet("bicubic"), shape=(4, 16, 8), targets=(2, 16, 8), loss=MeanSquaredError()
    ),
    Pictures("refined", make=Refined, shape=(4, 11, 5), targets=(4, 11, 5), loss=MeanSquaredError()),
    Pictures("squeezed by functions", make=SqueezedByFunctions, shape=(4, 11, 6)),
    Pictures("squeezed and seen", make=SqueezedAndSeen, shape=(4, 11, 6)),
    Pictures("conv1d", make=lines, shape=(4, 19)),
    Pictures("conv3d", make=volumes, shape=(2, 9, 5, 6)),
    Pictures("untraceable block", make=untraceable_block, shape=(4, 11, 7)),
    Pictures("unknown layers", make=unknown_layers, shape=(4, 13, 9)),
    Pictures("joined by rows", make=JoinedByRows, shape=(4, 11, 7)),
    Pictures("tied", make=tied, shape=(4, 11, 5)),
)
