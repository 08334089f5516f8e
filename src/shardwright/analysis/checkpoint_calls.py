"""Finds the call of ``torch.utils.checkpoint``, or of a like function, inside of which a model's code is running.

The backward of such a call runs the function again that the model has passed to it.

The library's own activation checkpointing is not meant: it runs the forward of whole modules again.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from types import CodeType, FrameType
from typing import Any, TypeVar

import torch
import torch.utils.checkpoint
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import _CheckpointFrame

from shardwright.errors import PlanError

OF_REENTRANT = "run_function"
"""The attribute of ``ctx`` in which reentrant checkpoints, torch's and others, keep the function to call again."""
_FUNCTIONS = ("recompute_fn", OF_REENTRANT)
"""The attributes under which a checkpoint keeps the function that a backward calls again.

The first is that of torch's frames, the second that of the ``ctx`` of reentrant checkpoints, of torch's and others.
"""


_T = TypeVar("_T")


class CheckpointCall:
    """A checkpoint whose forward is running: ``place`` keeps the function that the backward will call again.

    ``place`` is torch's frame of the checkpoint; or, if it is reentrant, autograd's node of the call, its ``ctx``.
    """

    def __init__(self, place: Any) -> None:
        self.place = place
        self._name = next((name for name in _FUNCTIONS if callable(getattr(place, name, None))), "")

    @property
    def is_known(self) -> bool:
        """Whether it is known where the function is kept."""
        return bool(self._name)

    @property
    def function(self) -> Callable[..., Any]:
        """The user's function, which the backward calls again to recompute activations; another one can be set.

        A context that :func:`prepare_checkpoint` has put around the call stays around it.
        """
        function: Callable[..., Any] = getattr(self.place, self._name)
        return function.function if isinstance(function, _Prepared) else function

    @function.setter
    def function(self, function: Callable[..., Any]) -> None:
        old_function = getattr(self.place, self._name)
        if isinstance(old_function, _Prepared):
            old_function.function = function
        else:
            setattr(self.place, self._name, function)

    def kept(self, name: str, kind: Callable[[], _T], within: Callable[[_T], AbstractContextManager[Any]]) -> _T:
        """Returns what was kept with the function under ``name``, in the forward, for use in the backward.

        The first call of a checkpoint keeps ``kind()``, an empty list or dict to be filled. The backward then calls the
        function inside of the context ``within(kept)``.
        """
        if not hasattr(self.function, name):
            again, store = self.function, kind()

            @wraps(again)
            def repeated(*args: Any, **named: Any) -> Any:
                with within(store):
                    return again(*args, **named)

            setattr(repeated, name, store)
            self.function = repeated
        contents: _T = getattr(self.function, name)
        return contents


def checkpoint_call(within: CodeType) -> CheckpointCall | None:
    """Returns the checkpoint inside of whose forward the caller's code runs; None outside of one.

    Only checkpoints are looked for that were called by the innermost running function with the code ``within``, or by
    what it called.

    Raises: PlanError: the caller's code is inside of several, one in the other.

    >>> found = []
    >>> def run(x):
    ...     found.append(checkpoint_call(forward.__code__))
    ...     return x.exp()
    >>> def forward(x):
    ...     run(x)
    ...     return torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    >>> output = forward(torch.ones(2, requires_grad=True))
    >>> found[0], found[1].is_known
    (None, True)
    """
    places = list(_places(within))
    if len(places) > 1 and any(checkpoint is not None for checkpoint in places):
        raise PlanError(
            "random numbers are drawn inside of several checkpoints, one in the other",
            given=f"{len(places)} checkpoints around the same code",
            allowed="one checkpoint around code that draws; or modules that draw, such as nn.Dropout",
            fix="draw in a module of its own, or leave out one of the checkpoints",
        )
    return places[0] if places else None


def checkpoints_around() -> Sequence[CheckpointCall]:
    """Returns the checkpoints inside of whose forwards the caller's code runs, innermost first.

    None is found where saved-tensor hooks inside of a checkpoint keep what autograd saves.
    """
    if torch.is_grad_enabled() and not is_in_checkpoint():
        return ()
    return [checkpoint for checkpoint in _places(None) if checkpoint is not None]


def saved_by() -> Any:
    """Returns the pack function of the innermost ``saved_tensors_hooks``, as of a checkpoint; None if there is none."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


def prepare_checkpoint(
    prepared: Callable[[Sequence[Any]], Callable[[Sequence[Any]], AbstractContextManager[Any]]],
) -> None:
    """Prepares the checkpoint inside of whose forward the caller's code runs, if any, for code that runs on shards.

    ``prepared(inputs)`` is called once for each checkpoint, with its positional inputs. It returns a function that the
    backward calls with these inputs, for a context in which it runs the code again. If hooks around the checkpoint have
    saved the inputs, the backward has other tensors, without the attributes of the first ones.
    """
    frame = _frame_of(saved_by())
    if frame is None or isinstance(frame.recompute_fn, _Prepared):
        return
    caller: FrameType | None = sys._getframe(1)
    while caller is not None and caller.f_code is not _CHECKPOINT:
        caller = caller.f_back
    frame.recompute_fn = _Prepared(frame.recompute_fn, prepared(() if caller is None else caller.f_locals["args"]))


def is_in_checkpoint() -> bool:
    """Returns whether a checkpoint without reentry keeps what autograd saves here, and no hook inside of it does."""
    return _frame_of(saved_by()) is not None


_CHECKPOINT = inspect.unwrap(torch.utils.checkpoint.checkpoint).__code__


class _Prepared:
    """The function of a checkpoint, run in the context that ``prepare`` returns for the inputs it is run on."""

    def __init__(
        self, function: Callable[..., Any], prepare: Callable[[Sequence[Any]], AbstractContextManager[Any]]
    ) -> None:
        self.function, self._prepare = function, prepare

    def __call__(self, *inputs: Any) -> Any:
        with self._prepare(inputs):
            return self.function(*inputs)


def _frame_of(hook: Any) -> _CheckpointFrame | None:
    """Returns the checkpoint whose hook packs what autograd saves in its forward; None for any other hook."""
    cells = getattr(hook, "__closure__", None) or ()
    return next((cell.cell_contents for cell in cells if isinstance(cell.cell_contents, _CheckpointFrame)), None)


def _frame_in(call: FrameType) -> _CheckpointFrame | None:
    """Returns the checkpoint that a running call of ``torch.utils.checkpoint`` has opened; None if it keeps nothing."""
    generator = call.f_locals.get("gen")
    place = None if generator is None or generator.gi_frame is None else generator.gi_frame.f_locals.get("new_frame")
    return place if isinstance(place, _CheckpointFrame) else None


def _places(within: CodeType | None) -> Iterator[CheckpointCall | None]:
    """Yields the checkpoints whose forwards are running in this thread, innermost first, up to a call of ``within``.

    If ``within`` is None, all are yielded. None stands for a checkpoint of torch that keeps nothing now, because
    gradients are off around it: its forward may run again when a checkpoint around it repeats its own.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code is not within:
        names = frame.f_code.co_varnames[: frame.f_code.co_argcount]
        place: Any = None
        if frame.f_code is _CHECKPOINT and not frame.f_locals.get("use_reentrant"):
            place = _frame_in(frame)
            if place is None:
                yield None
        elif frame.f_code.co_name == "forward" and names and names[0] != "self":
            place = frame.f_locals.get(names[0])
            place = place if isinstance(place, BackwardCFunction) else None
        if place is not None and CheckpointCall(place).is_known:
            yield CheckpointCall(place)
        frame = frame.f_back
