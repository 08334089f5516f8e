"""Running on the meta device, where torch's own code may look at values, mix devices or fail for no samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardwright.analysis.device_moves import IgnoresDeviceMoves
from shardwright.analysis.known_modules import without_branches


@contextmanager
def on_meta(model: nn.Module) -> Iterator[None]:
    """While it lasts, the model's forward can run on the meta device, on no samples too.

    >>> class Masked(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x) + torch.zeros(1)  # which lies on the CPU
    >>> model = Masked(2, 3).to("meta")
    >>> with on_meta(model):
    ...     model(torch.empty(4, 2, device="meta")).shape
    torch.Size([4, 3])
    """
    with IgnoresDeviceMoves(torch.device("meta")), _EnlargesNothing(), without_branches(model):
        yield


class _EnlargesNothing(TorchFunctionMode):
    """While it is on, no samples are enlarged to the size of one: torch's nearest neighbours fail for none on meta."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func is functional.interpolate:
            return _enlarge(*args, **named)
        return func(*args, **named)


def _enlarge(input: Tensor, *args: Any, **named: Any) -> Tensor:
    if len(input) or not input.is_meta:
        return functional.interpolate(input, *args, **named)
    one = functional.interpolate(input.new_empty(1, *input.shape[1:]), *args, **named)
    return input.reshape(0, *one.shape[1:])
