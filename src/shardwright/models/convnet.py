"""A small convolutional network for images, in parts that can be pipeline stages: by default four.

B batch, C channels, Y and X the image's rows and columns
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from torch import nn

from shardwright.errors import PlanError
from shardwright.models.settings import check_sizes


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvNetConfig:
    """The settings of a convolutional network; the defaults fit CIFAR-10.

    With ``softmax`` the outputs are probabilities, for a loss of your own; ``CrossEntropy`` takes logits.

    Raises: PlanError: a size is below 1, ``channels`` or ``hidden`` is empty, or the convolutions leave no pixel.

    >>> ConvNetConfig().flat_features, ConvNetConfig(image_size=64).flat_features
    (400, 2704)
    """

    image_channels: int = 3
    image_size: int = 32
    channels: tuple[int, ...] = (6, 16)
    kernel: int = 5
    hidden: tuple[int, ...] = (120, 84)
    num_classes: int = 10
    softmax: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, 1, "image_channels", "image_size", "kernel", "num_classes")
        for name, widths in (("channels", self.channels), ("hidden", self.hidden)):
            if not widths or min(widths) < 1:
                allowed, fix = "one width or more, each 1 or more", f"set {name}=6,16"
                raise PlanError(f"'{name}' makes no layer", given=f"{name}={widths}", allowed=allowed, fix=fix)
        if self.last_size < 1:
            raise PlanError(
                "the picture is used up before the last convolution",
                given=f"image_size={self.image_size}, kernel={self.kernel}, channels={self.channels}",
                allowed="sizes that leave one pixel: each convolution takes kernel - 1, each pool halves",
                fix="set a larger image_size or a smaller kernel",
            )

    @property
    def last_size(self) -> int:
        """The number of rows, and of columns, of the last pooling's output."""
        size = self.image_size
        for _ in self.channels:
            size = (size - self.kernel + 1) // 2
        return size

    @property
    def flat_features(self) -> int:
        """The number of input features of the first fully connected layer."""
        return self.channels[-1] * self.last_size**2

    @property
    def reads_cifar10(self) -> bool:
        """Whether the network takes CIFAR-10's images and has an output for each of its classes."""
        return (self.image_channels, self.image_size) == (3, 32) and self.num_classes >= 10


def build_convnet(config: ConvNetConfig) -> nn.Sequential:
    """Returns a network of convolutions with ReLU and max pooling, then fully connected layers, with a logit per class.

    Its children, in order, are ``conv1``, ``conv2`` (one per entry of ``channels``), ``fc`` and ``out``. With
    ``config.softmax`` the outputs are probabilities instead of logits.

    Shapes: x_BCYX (B, C, Y, X); returns (B, num_classes).
    Source: LeCun et al. 1998, "Gradient-based learning applied to document recognition" (LeNet-5's sizes).

    >>> model = build_convnet(ConvNetConfig())
    >>> [name for name, _ in model.named_children()], sum(p.numel() for p in model.parameters())
    (['conv1', 'conv2', 'fc', 'out'], 62006)
    """
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    channels = (config.image_channels, *config.channels)
    for layer in range(1, len(channels)):
        conv = nn.Conv2d(channels[layer - 1], channels[layer], config.kernel)
        parts[f"conv{layer}"] = nn.Sequential(OrderedDict(conv=conv, relu=nn.ReLU(), pool=nn.MaxPool2d(2)))
    widths = (config.flat_features, *config.hidden)
    fc: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for layer in range(1, len(widths)):
        fc[f"linear{layer}"] = nn.Linear(widths[layer - 1], widths[layer])
        fc[f"relu{layer}"] = nn.ReLU()
    parts["fc"] = nn.Sequential(fc)
    out: OrderedDict[str, nn.Module] = OrderedDict(linear=nn.Linear(widths[-1], config.num_classes))
    if config.softmax:
        out["softmax"] = nn.Softmax(dim=-1)
    parts["out"] = nn.Sequential(out)
    return nn.Sequential(parts)
