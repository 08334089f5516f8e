"""Runs a model's forward on the meta device even if its code reads masks, mixes devices or gets no samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardwright.analysis.objects.code_caches import code_caches_put_back
from shardwright.analysis.objects.copying import copied
from shardwright.analysis.on_meta.device_moves import IgnoresDeviceMoves
from shardwright.analysis.on_meta.meta_values import TO_NUMBERS, MetaValues, keep_values
from shardwright.analysis.on_meta.operator_results import MetaOperators
from shardwright.analysis.traced.known_modules import without_branches


@contextmanager
def on_meta(
    model: nn.Module, *, values: bool = True, guess: bool | None = None, spread: bool = False,
    instead: Mapping[Callable[..., Any], Callable[..., Any]] = MappingProxyType({}),
) -> Iterator[MetaValues | None]:  # fmt: skip
    """Returns a context in which a model's forward can run on the meta device, even on a batch without samples.

    With ``values``, small constants such as masks keep values that the model's code may read, and the context yields
    the :class:`MetaValues` that hold them; without ``values``, it yields None. ``guess`` is the answer to conditions on
    unknown values, as in :class:`MetaValues`; if it is given, unknown masks select everything, and unknown numbers are
    1. With ``spread``, ``topk``, ``argmax`` and the like choose each index equally often (:class:`MetaValues`).
    ``instead`` maps torch functions to the functions that run in their place.

    >>> class Masked(nn.Linear):
    ...     def forward(self, x):
    ...         return super().forward(x) + torch.zeros(1)  # made on the CPU
    >>> model = Masked(2, 3).to("meta")
    >>> with on_meta(model):
    ...     model(torch.empty(4, 2, device="meta")).shape
    torch.Size([4, 3])
    """
    mode = MetaValues(guess=guess, selects_all=guess is not None, spread=spread) if values else MetaOperators()
    replaced: dict[Callable[..., Any], Callable[..., Any]] = {functional.interpolate: _interpolate, **instead}
    if isinstance(mode, MetaValues):
        mode.give_kept(model.buffers())
        replaced |= {func: partial(mode.numbers_in, func) for func in TO_NUMBERS} | {Tensor.__format__: mode.text_of}
    with code_caches_put_back(model), IgnoresDeviceMoves(torch.device("meta"), replaced), without_branches(model), mode:
        yield mode if isinstance(mode, MetaValues) else None


def meta_copy(module: nn.Module) -> nn.Module:
    """Returns a copy of a module on the meta device; small buffers keep their values beside it (:func:`keep_values`).

    >>> meta_copy(nn.Linear(2, 3)).weight.device.type
    'meta'
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in module.parameters()}
    memo.update({id(b): keep_values(b, b.detach().to("meta")) for b in module.buffers()})
    return copied(module, memo)


@contextmanager
def buffers_put_back(model: nn.Module) -> Iterator[None]:
    """Returns a context after which a model has the buffers that it had before, in the shapes that they had.

    A forward may replace buffers: for example, it may compute a new table of positions for longer inputs. On the meta
    device that table has no values, so a later forward must compute it again.

    >>> model = nn.BatchNorm1d(2)
    >>> before = model.running_mean
    >>> with buffers_put_back(model):
    ...     model.running_mean, model.running_var.data = torch.ones(3), torch.ones(4)
    >>> model.running_mean is before, model.running_var.shape
    (True, torch.Size([2]))
    """
    before = [(module._buffers, dict(module._buffers)) for module in model.modules()]
    views = [(tensor, tensor.detach()) for _, buffers in before for tensor in buffers.values() if tensor is not None]
    try:
        yield
    finally:
        for now, buffers in before:
            now.clear()
            now.update(buffers)
        for buffer, view in views:
            if buffer.shape != view.shape:
                buffer.data = view


def _interpolate(input: Tensor, *args: Any, **named: Any) -> Tensor:
    """Runs ``interpolate``, also on a meta batch without samples, for which torch's nearest-neighbour kernels raise."""
    if len(input) or not input.is_meta:
        return functional.interpolate(input, *args, **named)
    one = functional.interpolate(input.new_empty(1, *input.shape[1:]), *args, **named)
    return input.reshape(0, *one.shape[1:])
