"""Tells whether a model's forward calls its alike blocks alike, so that a few of them can stand for all.

Blocks with the same code and sizes may still be used in different ways: some under ``torch.no_grad``, some never, some
on fewer tokens, some with a layer of their own behind them. And code that indexes its blocks may not run with fewer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright.analysis.batch_norms import ignoring_batch_statistics
from shardwright.analysis.meta_device import on_meta
from shardwright.analysis.module_calls import call_model
from shardwright.analysis.operator_results import tensors_of
from shardwright.parallelize.planning import without_storage
from shardwright.planner.blocks import AlikeBlocks

_SUMS = frozenset(("add", "radd", "iadd"))
"""The names of the functions that add two tensors, or a number and a tensor, without their underscores."""

FEW = 2
"""The number of blocks with which a forward is tried beside all of them."""


class _FunctionCall(NamedTuple):
    """A call of a function of torch: its name, the shapes of its tensors, and the parameters among these.

    A parameter of a block is named as in the block.
    """

    function: str
    shapes: tuple[torch.Size, ...]
    takes_gradients: bool
    parameters: tuple[str, ...]


class _BlockRun(NamedTuple):
    """What one block calls, from its first function to its last, and what is called between the one before and it."""

    block: int
    between: list[_FunctionCall]
    calls: list[_FunctionCall]


class _FunctionLog(TorchFunctionMode):
    """Records which torch functions a forward calls, and in which of the repeated blocks; None is outside of all."""

    def __init__(self, model: nn.Module, blocks: Sequence[str]) -> None:
        super().__init__()
        self.calls: list[tuple[int | None, _FunctionCall]] = []
        self._inside: list[int] = []
        self._names = {id(parameter): name for name, parameter in model.named_parameters()}
        own = [[*model.get_submodule(name).modules()] for name in blocks]
        times = Counter(chain.from_iterable(own))
        for number, (name, modules) in enumerate(zip(blocks, own, strict=True)):
            parameters = model.get_submodule(name).named_parameters()
            self._names |= {id(parameter): f"(block).{inner}" for inner, parameter in parameters}
            for module in modules:
                if times[module] == 1:  # one that blocks share, as a rotary table, is of the block that calls it
                    module.register_forward_pre_hook(self._entering(number))
                    module.register_forward_hook(self._leave, always_call=True)

    def _entering(self, number: int) -> Callable[..., None]:
        return lambda *_: self._inside.append(number)

    def _leave(self, *_: Any) -> None:
        self._inside.pop()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = tensors_of((args, kwargs))
        if tensors:
            names = tuple(self._names[id(tensor)] for tensor in tensors if id(tensor) in self._names)
            name, shapes = getattr(func, "__qualname__", ""), tuple(tensor.shape for tensor in tensors)
            if name.rpartition(".")[2].strip("_") in _SUMS:  # a sum of numbers that begins with 0, which is no tensor
                name, shapes = "add", tuple(filter(None, shapes))
            call = _FunctionCall(name, shapes, torch.is_grad_enabled(), names)
            self.calls.append((self._inside[-1] if self._inside else None, call))
        return func(*args, **(kwargs or {}))

    def runs(self) -> tuple[list[_BlockRun], list[_FunctionCall]]:
        """Returns what each block calls in turn, and what is called after the last one."""
        runs, between = list[_BlockRun](), list[_FunctionCall]()
        for block, call in self.calls:
            if block is None:
                between.append(call)
            elif runs and runs[-1].block == block:  # what is called in between is the block's: a list's, say
                runs[-1].calls.extend((*between, call))
                between = []
            else:
                runs.append(_BlockRun(block, between, [call]))
                between = []
        return runs, between


def unlike_in_run(model: nn.Module, blocks: AlikeBlocks, inputs: Any) -> str:
    """Returns why a few of a model's blocks cannot stand for all in its forward on ``inputs``, or "".

    The forward of a copy without values runs on the meta device, with all blocks and with two. If it does not run there
    with all of them, nothing is known, and "" is returned. Where blocks differ, a second forward is looked at: the
    first may have made tables that later calls find.

    >>> class Frozen(nn.Sequential):
    ...     def forward(self, x):
    ...         for place, layer in enumerate(self):
    ...             with torch.set_grad_enabled(place > 1):
    ...                 x = layer(x)
    ...         return x
    >>> model = Frozen(*(nn.Linear(2, 2) for _ in range(4)))
    >>> unlike_in_run(model, AlikeBlocks("", 0, 4), torch.ones(1, 2))
    "the forward calls '2' in another way than '0'"
    """
    return _unlike(model, blocks, inputs, 1) and _unlike(model, blocks, inputs, 2)


def _unlike(model: nn.Module, blocks: AlikeBlocks, inputs: Any, times: int) -> str:
    names, log = blocks.names, _logged(without_storage(model), blocks.names, inputs, times)
    if log is None:
        return ""
    runs, after = log.runs()
    if [run.block for run in runs] != [*range(len(names))]:
        return "the forward does not call the alike blocks once each, one after the other"
    first, *others = runs
    for run in others:
        if run.calls != first.calls:
            return f"the forward calls '{names[run.block]}' in another way than '{names[0]}'"
        if run.between != others[0].between:
            return f"the forward does something else before '{names[run.block]}' than before '{names[1]}'"
    if len(names) <= FEW:
        return ""
    few = _logged(blocks.shortened(model, FEW), names[:FEW], inputs, times)
    if few is None:
        return "the forward does not run with fewer of the alike blocks"
    first_runs = runs[:FEW]
    short, short_after = few.runs()
    same_blocks = [run.calls for run in short] == [run.calls for run in first_runs]
    if not same_blocks or _functions_outside(short, short_after) != _functions_outside(first_runs, after):
        return "the forward does something else with fewer of the alike blocks"
    return ""


def _functions_outside(runs: Sequence[_BlockRun], after: Sequence[_FunctionCall]) -> list[tuple[str, int]]:
    """Returns the functions that are called before, between and after the blocks, each with its number of tensors."""
    return [(call.function, len(call.shapes)) for call in chain(*(run.between for run in runs), after)]


def _logged(model: nn.Module, names: Sequence[str], inputs: Any, times: int) -> _FunctionLog | None:
    """Returns what the last of so many forwards calls, or None if the user's code does not run on the meta device."""
    log = _FunctionLog(model, names)
    for _ in range(times):
        log.calls.clear()
        try:
            with ignoring_batch_statistics(model), on_meta(model, values=False), torch.enable_grad(), log:
                call_model(model, inputs)
        except Exception:  # the user's code may raise anything, as where it indexes a block that was taken out
            return None
    return log
