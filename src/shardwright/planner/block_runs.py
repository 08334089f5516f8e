"""Finds out whether a model's forward uses all its repeated blocks in the same way, so that a few can stand for all.

Blocks with the same code and sizes may still be used in different ways: some under ``torch.no_grad``, some never, some
on fewer tokens, some followed by a layer of their own. And code that indexes its blocks may not run with fewer of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from shardwright.analysis.on_meta.meta_device import on_meta
from shardwright.analysis.on_meta.module_calls import call_model
from shardwright.analysis.on_meta.operator_results import tensors_of
from shardwright.analysis.traced.batch_norms import ignoring_batch_statistics
from shardwright.parallelize.planning import without_storage
from shardwright.planner.blocks import AlikeBlocks

_SUMS = frozenset(("add", "radd", "iadd"))
"""The names, without underscores at their ends, of the functions that add two tensors, or a number and a tensor."""

FEW = 2
"""The number of blocks of the shortened model whose forward is compared with that of the whole model."""


class _FunctionCall(NamedTuple):
    """A call of a torch function: its name, its tensors' shapes, whether autograd is on, and its parameters' names.

    A parameter of a block has its name within the block, so that calls of different blocks can be equal.
    """

    function: str
    shapes: tuple[torch.Size, ...]
    takes_gradients: bool
    parameters: tuple[str, ...]


class _BlockRun(NamedTuple):
    """The torch functions that one block calls, and those called between the block before and this one."""

    block: int
    between: list[_FunctionCall]
    calls: list[_FunctionCall]


class _FunctionLog(TorchFunctionMode):
    """Records each torch function that a forward calls, with the index of the calling block; None outside of blocks."""

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
                if times[module] == 1:  # a module that blocks share, such as a rotary table, belongs to its caller
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
            # Python's sum() of scalar tensors begins with the number 0: its first call has one tensor, the others two
            if name.rpartition(".")[2].strip("_") in _SUMS:
                name, shapes = "add", tuple(filter(None, shapes))
            call = _FunctionCall(name, shapes, torch.is_grad_enabled(), names)
            self.calls.append((self._inside[-1] if self._inside else None, call))
        return func(*args, **(kwargs or {}))

    def runs(self) -> tuple[list[_BlockRun], list[_FunctionCall]]:
        """Returns the calls of each block, in the order of the forward, and the calls after the last block."""
        runs, between = list[_BlockRun](), list[_FunctionCall]()
        for block, call in self.calls:
            if block is None:
                between.append(call)
            elif runs and runs[-1].block == block:  # calls between two of a block's are its own: it may be a ModuleList
                runs[-1].calls.extend((*between, call))
                between = []
            else:
                runs.append(_BlockRun(block, between, [call]))
                between = []
        return runs, between


def unlike_in_run(model: nn.Module, blocks: AlikeBlocks, inputs: Any) -> str:
    """Returns why a few of a model's blocks cannot stand for all in its forward on ``inputs``, or "".

    The forward of a copy runs on the meta device, with all blocks and with two. If it does not run there with all of
    them, nothing is known, and "" is returned. If a first forward shows a difference, a second one decides, since the
    first may have filled a cache, such as a table of positions, that later calls read.

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
    """Returns the calls of the last of ``times`` forwards, or None if the model does not run on the meta device."""
    log = _FunctionLog(model, names)
    for _ in range(times):
        log.calls.clear()
        try:
            with ignoring_batch_statistics(model), on_meta(model, values=False), torch.enable_grad(), log:
                call_model(model, inputs)
        except Exception:  # the user's code may raise anything, as where it indexes a block that was taken out
            return None
    return log
