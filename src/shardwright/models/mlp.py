"""A multi-layer perceptron that classifies vectors, and its config."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Literal

from torch import nn

from shardwright.errors import PlanError
from shardwright.models.settings import check_fraction

Activation = Literal["gelu", "relu", "silu", "tanh"]

ACTIVATIONS: dict[str, type[nn.Module]] = {"gelu": nn.GELU, "relu": nn.ReLU, "silu": nn.SiLU, "tanh": nn.Tanh}


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """The settings of an MLP. ``widths`` are the features of the input, of each hidden layer, and of the output.

    Raises: PlanError: there are fewer than two widths, a width is below 1, or ``dropout`` is not from 0 to below 1.

    >>> MLPConfig(widths=(8,))
    Traceback (most recent call last):
    shardwright.errors.PlanError: these widths make no layer
      given:   widths=(8,)
      allowed: two widths or more, each 1 or more
      fix:     set widths=8,8
    """

    widths: tuple[int, ...] = (32, 64, 64, 10)
    activation: Activation = "gelu"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if len(self.widths) < 2 or min(self.widths) < 1:
            width, allowed = max((1, *self.widths)), "two widths or more, each 1 or more"
            setting, fix = f"widths={self.widths}", f"set widths={width},{width}"
            raise PlanError("these widths make no layer", given=setting, allowed=allowed, fix=fix)
        check_fraction("dropout", self.dropout)


def build_mlp(config: MLPConfig) -> nn.Sequential:
    """Returns an MLP: linear layers with an activation, and dropout if it is not 0, between each two of them.

    Shapes: x (..., widths[0]); returns (..., widths[-1]).

    >>> [name for name, _ in build_mlp(MLPConfig(widths=(4, 8, 2))).named_children()]
    ['linear1', 'activation1', 'linear2']
    """
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    num_layers = len(config.widths) - 1
    for layer in range(1, num_layers + 1):
        layers[f"linear{layer}"] = nn.Linear(config.widths[layer - 1], config.widths[layer])
        if layer < num_layers:
            layers[f"activation{layer}"] = ACTIVATIONS[config.activation]()
            if config.dropout > 0:
                layers[f"dropout{layer}"] = nn.Dropout(config.dropout)
    return nn.Sequential(layers)
